"""Codes of a chain's int4 layers, calibrate_codes on rows block by block.

states behind the rounded blocks before -> second moments of what the layers see -> codes -> states behind
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from server_export.calibrate.gptq import SecondMoment, gptq
from server_export.calibrate.sensitivities import int4_layers
from server_export.ir.block import InputObserver
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock
from server_export.model.walk import BlockwiseForward
from server_export.pipeline import with_scheme
from server_export.progress import count_parts
from server_export.quantize.quantization import Int4Weight, int8_weight

_CODES, _SCALE = ".codes", ".scale"


def calibrate_codes(chain: ModelChain, rows: Sequence[Sequence[int]], folder: Path) -> ModelChain:
    """The same blocks with int4 layers whose errors are compensated on some rows.

    Rounding is simulated: weights have their rounded values while rows pass, activations stay float32.

    Args:
        chain: in 8da4w.
        rows: tokens.
        folder: for the codes; they are read from there as long as the chain is used.

    Raises:
        BundleError: the files lack a weight, or it isn't finite.
    """
    exact = with_scheme(chain, "fp32")
    walk, done = BlockwiseForward(exact, rows), count_parts(chain.head_start)
    places: dict[str, Path] = {}

    def put(number: int, codes: Mapping[str, Int4Weight]) -> None:
        path = folder / f"{number}.safetensors"
        tensors = {name + _CODES: each.codes for name, each in codes.items()}
        save_file({**tensors, **{name + _SCALE: each.scale for name, each in codes.items()}}, path)
        places.update(dict.fromkeys(codes, path))

    def get(number: int) -> Mapping[str, Int4Weight]:
        names = [name for name in chain.weight_names(number).values() if name in places]
        found = [load_file(path) for path in {places[name] for name in names}]
        tensors = {name: tensor for of_block in found for name, tensor in of_block.items()}
        return {name: Int4Weight(tensors[name + _CODES], tensors[name + _SCALE]) for name in names}

    def calibrate(block: EagerBlock, see: Callable[[InputObserver], object]) -> None:
        """Round the int4 layers of a block; a layer that is used again has the codes of its first use."""
        own, known = chain.weight_names(block.number), get(block.number)
        _give_int8(chain, block)
        _give(block, own, known)
        moments = _Moments(name for name in int4_layers(chain, block.number) if own[name] not in known)
        see(moments.add)
        codes = {own[name]: gptq(block.tensors[name], moment) for name, moment in moments.known()}
        _give(block, own, codes)
        put(block.number, codes)

    def calibrate_expert(expert: EagerBlock, given: torch.Tensor) -> None:
        def see(watch: InputObserver) -> None:
            if given.numel():
                expert.compute(given, watch=lambda names, states: watch(names, states.flatten(0, -2)))

        calibrate(expert, see)

    for turn in chain.block_groups(chain.head_start):
        if chain.blocks[turn.start].is_expert:
            walk.advance_experts(turn, calibrate_expert)
        else:
            block = EagerBlock(exact, turn.start)
            calibrate(block, partial(walk.watch, block))
            walk.advance(block)
        done(len(turn))
    return replace(chain, rounded=get)


class _Moments:
    """Second moments of the inputs of some layers; layers with the same input share one."""

    def __init__(self, layers: Iterable[str]) -> None:
        self._layers = set(layers)
        self._of: dict[str, SecondMoment] = {}

    def add(self, names: Sequence[str], states: torch.Tensor) -> None:
        """Take what layers see, f32 [tokens, in]."""
        if wanted := [name for name in names if name in self._layers]:
            moment = self._of.setdefault(wanted[0], SecondMoment(states.shape[-1]))
            moment.add(states)
            self._of |= dict.fromkeys(wanted, moment)

    def known(self) -> Iterator[tuple[str, SecondMoment]]:
        """The layers that have seen enough, with their moments."""
        return ((name, moment) for name, moment in self._of.items() if moment.is_known)


def _give(block: EagerBlock, own: Mapping[str, str], codes: Mapping[str, Int4Weight]) -> None:
    """Let a block compute with what codes, by their own names, stand for."""
    for name in [name for name in block.tensors if own.get(name) in codes]:
        block.tensors[name] = codes[own[name]].dequantize()


def _give_int8(chain: ModelChain, block: EagerBlock) -> None:
    """Let a block compute with the rounded weights of its int8 layers."""
    for name, is_int4 in chain.block_types[chain.type_of[block.number]].frozen.layers.items():
        if not is_int4:
            block.tensors[name] = int8_weight(block.tensors[name]).dequantize()
