"""The effect of each layer's int4 rounding on its block's outputs, and the choice of layers that stay int8.

Each block computes some rows with one of its layers rounded to the nearest and the others in float32. The
layers with the largest effect per weight get the available bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from server_export.calibrate.gptq import round_to_nearest
from server_export.model.blockwise import BlockwiseForward
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock
from server_export.pipeline import with_scheme
from server_export.progress import count_parts

_INT4, _INT8 = 4.0, 8.0


@dataclass(frozen=True)
class Sensitivity:
    """The sensitivity of a layer to rounding.

    Attributes:
        numel: the number of elements of its weight.
        error: the relative squared error of the block's outputs if only this layer is rounded: the mean over
            tokens, plus that of all tokens together. In some models a few tokens with very large hidden
            states dominate the second.
    """

    numel: int
    error: float


def measure_sensitivities(
    chain: ModelChain, rows: Sequence[Sequence[int]]
) -> dict[int, dict[str, Sensitivity]]:
    """Return the sensitivities of all int4 layers by the number of the block and the name of its weight.

    Args:
        chain: a chain in 8da4w. Its experts are left out, since each sees few tokens.
        rows: the tokens of the rows.

    Raises:
        BundleError: the files lack a weight, or it is not finite.
    """
    exact = with_scheme(chain, "fp32")
    walk, count_done, by_block = (
        BlockwiseForward(exact, rows),
        count_parts(chain.head_start),
        dict[int, dict[str, Sensitivity]](),
    )
    for group in chain.block_groups(chain.head_start):
        if chain.blocks[group.start].is_expert:
            walk.advance_experts(group)
        else:
            block = EagerBlock(exact, group.start)
            if layers := int4_layers(chain, group.start):
                names = chain.weight_names(group.start)
                by_block[group.start] = {names[name]: _measure_layer(walk, block, name) for name in layers}
            walk.advance(block)
        count_done(len(group))
    return by_block


def int4_layers(chain: ModelChain, number: int) -> list[str]:
    """Return the names, in the block type's graph, of int4 weights that are stored as they are."""
    layers, names = chain.block_types[chain.type_of[number]].frozen.layers, chain.weight_names(number)
    return [name for name, is_int4 in layers.items() if is_int4 and name in names]


def _measure_layer(walk: BlockwiseForward, block: EagerBlock, name: str) -> Sensitivity:
    outputs, weight = walk.tokens(walk.outputs(block)), block.tensors[name]
    block.tensors[name] = round_to_nearest(weight).dequantize()
    errors = (walk.tokens(walk.outputs(block)) - outputs).square().sum(1)
    block.tensors[name] = weight
    squares = outputs.square().sum(1).clamp_min(1e-30)
    return Sensitivity(weight.numel(), float((errors / squares).mean() + errors.sum() / squares.sum()))


def choose_int8(
    chain: ModelChain, sensitivities: Mapping[int, Mapping[str, Sensitivity]], bits: float
) -> dict[int, frozenset[str]]:
    """Return the names of the weights that stay int8, by block, within an average of `bits` per weight.

    A block type is split into at most two, since every block type needs its own programs: some layers are
    int8 in all of its blocks, and some more in a part of them.

    Args:
        chain: a chain in 8da4w.
        sensitivities: the sensitivities of its layers.
        bits: the average bits per weight, without scales.
    """
    by_type: dict[int, dict[int, dict[str, Sensitivity]]] = defaultdict(dict)
    seen = set[str]()
    for number, of_block in sensitivities.items():
        if not seen.issuperset(of_block):
            pairs = chain.weight_names(number).items()
            in_graph = {name: of_block[weight] for name, weight in pairs if weight in of_block}
            by_type[chain.type_of[number]][number] = in_graph
            seen.update(of_block)
    share = (bits - _INT4) / (_INT8 - _INT4)
    chosen: dict[int, frozenset[str]] = {}
    for blocks in by_type.values():
        for number, names in int8_of_block_type(blocks, share).items():
            weight_names = chain.weight_names(number)
            chosen[number] = frozenset(weight_names[name] for name in names)
    # A reused layer has the bits of its first use.
    is_int8: dict[str, bool] = {}
    by_block: dict[int, frozenset[str]] = {}
    for number, of_block in sensitivities.items():
        for name in of_block:
            is_int8.setdefault(name, name in chosen.get(number, ()))
        if names := frozenset(name for name in of_block if is_int8[name]):
            by_block[number] = names
    return by_block


def int8_of_block_type(
    blocks: Mapping[int, Mapping[str, Sensitivity]], share: float
) -> dict[int, frozenset[str]]:
    """Return the names of each block's int8 layers, with at most this share of all elements."""
    sizes = {name: each.numel for name, each in next(iter(blocks.values())).items()}
    budget = share * sum(sizes.values()) * len(blocks)
    totals = {name: sum(of_block[name].error for of_block in blocks.values()) for name in sizes}
    by_density = sorted(sizes, key=lambda name: -totals[name] / sizes[name])
    best: dict[int, frozenset[str]] = dict.fromkeys(blocks, frozenset())
    largest_gain = 0.0
    for count in range(len(by_density) + 1):
        everywhere, others = by_density[:count], by_density[count:]
        remaining = budget - len(blocks) * sum(sizes[name] for name in everywhere)
        if remaining < 0:
            break
        saved = sum(totals[name] for name in everywhere)
        for extra in [(), *combinations(others, 1), *combinations(others, 2)]:
            size = sum(sizes[name] for name in extra)
            blocks_that_fit = int(remaining // size) if extra else 0
            gains = {
                number: sum(of_block[name].error for name in extra) for number, of_block in blocks.items()
            }
            selected = sorted(gains, key=lambda number: -gains[number])[:blocks_that_fit]
            if (gain := saved + sum(gains[number] for number in selected)) > largest_gain:
                largest_gain = gain
                best = {
                    number: frozenset(everywhere).union(extra if number in selected else ())
                    for number in blocks
                }
    return best


def mean_bits(
    sensitivities: Mapping[int, Mapping[str, Sensitivity]], int8: Mapping[int, frozenset[str]]
) -> float:
    """Return the average bits per weight of the measured layers, without scales."""
    total = in_int8 = 0
    for number, of_block in sensitivities.items():
        total += sum(each.numel for each in of_block.values())
        in_int8 += sum(of_block[name].numel for name in int8.get(number, ()))
    return _INT4 + (_INT8 - _INT4) * in_int8 / max(total, 1)
