"""Codes of a chain's int4 layers, calibrated on rows block by block.

states behind the rounded blocks before -> second moments of what the layers see -> codes -> states behind
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from server_export.calibrate.gptq import SecondMoment, gptq
from server_export.calibrate.sensitivities import int4_layers
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock
from server_export.model.inputs import Walk
from server_export.model.quantization import Int4Weight, int8_weight
from server_export.stage import count_parts

_CODES, _SCALE = ".codes", ".scale"


def calibrated(chain: ModelChain, rows: Sequence[Sequence[int]], folder: Path) -> ModelChain:
    """The same blocks with int4 layers whose errors are compensated on some rows.

    Rounding is simulated: weights have their rounded values while rows pass, activations stay float32.

    Args:
        chain: in 8da4w.
        rows: tokens.
        folder: for the codes; they are read from there as long as the chain is used.

    Raises:
        BundleError: the files lack a weight, or it isn't finite.
    """
    exact = chain.in_scheme("fp32")
    walk, done = Walk(exact, rows), count_parts(chain.end)
    files: dict[tuple[str, ...], Path] = {}

    def put(number: int, codes: Mapping[str, Int4Weight]) -> None:
        path = files[chain.blocks[number].weights] = folder / f"{number}.safetensors"
        own = chain.own_names(number)
        tensors = {own[name] + _CODES: each.codes for name, each in codes.items()}
        save_file({**tensors, **{own[name] + _SCALE: each.scale for name, each in codes.items()}}, path)

    def get(number: int) -> Mapping[str, Int4Weight]:
        path = files.get(chain.blocks[number].weights)
        found = load_file(path) if path else {}
        names = [name.removesuffix(_CODES) for name in found if name.endswith(_CODES)]
        return {name: Int4Weight(found[name + _CODES], found[name + _SCALE]) for name in names}

    def prepare(expert: EagerBlock, given: torch.Tensor) -> None:
        moments = _Moments(int4_layers(chain, expert.number))
        if given.numel():
            expert.answer(given, watch=lambda names, states: moments.add(names, states.flatten(0, -2)))
        put(expert.number, _round(chain, expert, moments))

    for turn in chain.turns(chain.end):
        if chain.blocks[turn.start].is_expert:
            walk.advance_experts(turn, prepare)
        else:
            block = EagerBlock(exact, turn.start)
            if chain.blocks[turn.start].weights in files:
                # A layer that is used again has the codes of its first use.
                _give(chain, block, get(turn.start))
            elif layers := int4_layers(chain, turn.start):
                moments = _Moments(layers)
                for _ in walk.answers(block, moments.add):
                    pass
                put(turn.start, _round(chain, block, moments))
            walk.advance(block)
        done(len(turn))
    return replace(chain, rounded=get)


class _Moments:
    """Second moments of what some layers see; layers that see the same share one."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._layers = set(layers)
        self.of: dict[str, SecondMoment] = {}

    def add(self, names: Sequence[str], states: torch.Tensor) -> None:
        if wanted := [name for name in names if name in self._layers]:
            moment = self.of.setdefault(wanted[0], SecondMoment(states.shape[-1]))
            moment.add(states)
            self.of |= dict.fromkeys(wanted, moment)


def _round(chain: ModelChain, block: EagerBlock, moments: _Moments) -> dict[str, Int4Weight]:
    """Codes of the layers that were seen; the block computes with what they stand for from now on."""
    codes = {
        name: gptq(block.tensors[name], moment) for name, moment in moments.of.items() if moment.is_known
    }
    _give(chain, block, {chain.own_names(block.number)[name]: each for name, each in codes.items()})
    return codes


def _give(chain: ModelChain, block: EagerBlock, codes: Mapping[str, Int4Weight]) -> None:
    """Let a block compute with rounded weights: these, and those of its int8 layers."""
    own = chain.own_names(block.number)
    for name, in_groups in chain.kinds[chain.kind_of[block.number]].frozen.layers.items():
        if not in_groups:
            block.tensors[name] = int8_weight(block.tensors[name]).dequantize()
        elif own.get(name) in codes:
            block.tensors[name] = codes[own[name]].dequantize()
