"""Codes of a chain's int4 layers, calibrated on rows block by block.

hidden states before a block -> second moments of its layers' inputs -> codes -> hidden states after the
block
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
from server_export.model.blockwise import BlockwiseForward
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock
from server_export.pipeline import with_scheme
from server_export.progress import count_parts
from server_export.quantize.quantization import Int4Weight, int8_weight

_CODES, _SCALE = ".codes", ".scale"


def calibrate_codes(chain: ModelChain, rows: Sequence[Sequence[int]], folder: Path) -> ModelChain:
    """Return the same chain with codes of int4 layers whose errors are compensated on rows.

    Rounding is simulated: the blocks compute with rounded weights and float32 activations.

    Args:
        chain: a chain in 8da4w.
        rows: the tokens of the rows.
        folder: the folder for the codes, which the chain reads as long as it is used.

    Raises:
        BundleError: the files lack a weight, or it is not finite.
    """
    exact = with_scheme(chain, "fp32")
    walk, count_done = BlockwiseForward(exact, rows), count_parts(chain.head_start)
    paths: dict[str, Path] = {}

    def save(number: int, codes: Mapping[str, Int4Weight]) -> None:
        path = folder / f"{number}.safetensors"
        tensors = {name + _CODES: each.codes for name, each in codes.items()}
        save_file({**tensors, **{name + _SCALE: each.scale for name, each in codes.items()}}, path)
        paths.update(dict.fromkeys(codes, path))

    def load(number: int) -> Mapping[str, Int4Weight]:
        names = [name for name in chain.weight_names(number).values() if name in paths]
        files = [load_file(path) for path in {paths[name] for name in names}]
        tensors = {name: tensor for tensors_of_block in files for name, tensor in tensors_of_block.items()}
        return {name: Int4Weight(tensors[name + _CODES], tensors[name + _SCALE]) for name in names}

    def calibrate(block: EagerBlock, observe: Callable[[InputObserver], object]) -> None:
        """Round the int4 layers of a block; a reused layer keeps the codes of its first use."""
        names, known = chain.weight_names(block.number), load(block.number)
        _use_int8(chain, block)
        _use_codes(block, names, known)
        moments = _Moments(name for name in int4_layers(chain, block.number) if names[name] not in known)
        observe(moments.add)
        codes = {names[name]: gptq(block.tensors[name], moment) for name, moment in moments.sufficient()}
        _use_codes(block, names, codes)
        save(block.number, codes)

    def calibrate_expert(expert: EagerBlock, inputs: torch.Tensor) -> None:
        def observe(watch: InputObserver) -> None:
            if inputs.numel():
                expert.compute(inputs, watch=lambda names, states: watch(names, states.flatten(0, -2)))

        calibrate(expert, observe)

    for group in chain.block_groups(chain.head_start):
        if chain.blocks[group.start].is_expert:
            walk.advance_experts(group, calibrate_expert)
        else:
            block = EagerBlock(exact, group.start)
            calibrate(block, partial(walk.watch, block))
            walk.advance(block)
        count_done(len(group))
    return replace(chain, rounded=load)


class _Moments:
    """Second moments of the inputs of layers; layers with the same input share one."""

    def __init__(self, layers: Iterable[str]) -> None:
        self._layers = set(layers)
        self._of: dict[str, SecondMoment] = {}

    def add(self, names: Sequence[str], states: torch.Tensor) -> None:
        """Add the inputs f32 [tokens, in] of layers."""
        if wanted := [name for name in names if name in self._layers]:
            moment = self._of.setdefault(wanted[0], SecondMoment(states.shape[-1]))
            moment.add(states)
            self._of |= dict.fromkeys(wanted, moment)

    def sufficient(self) -> Iterator[tuple[str, SecondMoment]]:
        """Return the layers with enough tokens, and their moments."""
        return ((name, moment) for name, moment in self._of.items() if moment.is_known)


def _use_codes(block: EagerBlock, weight_names: Mapping[str, str], codes: Mapping[str, Int4Weight]) -> None:
    """Let a block compute with the dequantized codes of its weights."""
    for name in [name for name in block.tensors if weight_names.get(name) in codes]:
        block.tensors[name] = codes[weight_names[name]].dequantize()


def _use_int8(chain: ModelChain, block: EagerBlock) -> None:
    """Let a block compute with the rounded weights of its int8 layers."""
    for name, is_int4 in chain.block_types[chain.type_of[block.number]].frozen.layers.items():
        if not is_int4:
            block.tensors[name] = int8_weight(block.tensors[name]).dequantize()
