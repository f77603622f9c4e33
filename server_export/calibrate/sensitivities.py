"""How much each layer's rounding to int4 changes what its block answers, and which layers are int8 for it.

A block answers some rows with one of its layers rounded to the nearest, the others in float32. Layers that
change the answer most for each of their weights get the bits that there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from server_export.calibrate.gptq import nearest
from server_export.model.chain import ModelChain
from server_export.model.eager import EagerBlock
from server_export.model.inputs import Walk
from server_export.pipeline import in_scheme
from server_export.stage import count_parts

_INT4, _INT8 = 4.0, 8.0


@dataclass(frozen=True)
class Sensitivity:
    """Of a layer: the `numbers` of its weight, and `error`, what rounding it alone does.

    `error` is the relative squared error of the block's answer, of a token on average plus of all tokens
    together: some models have few tokens whose states are so large that they decide the second.
    """

    numbers: int
    error: float


def measure(chain: ModelChain, rows: Sequence[Sequence[int]]) -> dict[int, dict[str, Sensitivity]]:
    """Sensitivities of all int4 layers of blocks, by number of the block and the name of its own weight.

    Args:
        chain: in 8da4w. Experts are left out: each sees few tokens.
        rows: tokens.

    Raises:
        BundleError: the files lack a weight, or it isn't finite.
    """
    exact = in_scheme(chain, "fp32")
    walk, done, found = Walk(exact, rows), count_parts(chain.end), dict[int, dict[str, Sensitivity]]()
    for turn in chain.turns(chain.end):
        if chain.blocks[turn.start].is_expert:
            walk.advance_experts(turn)
        else:
            block = EagerBlock(exact, turn.start)
            if layers := int4_layers(chain, turn.start):
                own = chain.own_names(turn.start)
                found[turn.start] = {own[name]: _of_layer(walk, block, name) for name in layers}
            walk.advance(block)
        done(len(turn))
    return found


def int4_layers(chain: ModelChain, number: int) -> list[str]:
    """Names, in its kind, of a block's weights that are int4; none that is computed of others."""
    layers, own = chain.kinds[chain.kind_of[number]].frozen.layers, chain.own_names(number)
    return [name for name, in_groups in layers.items() if in_groups and name in own]


def _of_layer(walk: Walk, block: EagerBlock, name: str) -> Sensitivity:
    answers, weight = walk.tokens(walk.answers(block)), block.tensors[name]
    block.tensors[name] = nearest(weight).dequantize()
    errors = (walk.tokens(walk.answers(block)) - answers).square().sum(1)
    block.tensors[name] = weight
    squares = answers.square().sum(1).clamp_min(1e-30)
    return Sensitivity(weight.numel(), float((errors / squares).mean() + errors.sum() / squares.sum()))


def choose_int8(
    chain: ModelChain, sensitivities: Mapping[int, Mapping[str, Sensitivity]], bits: float
) -> dict[int, frozenset[str]]:
    """Names of weights that are int8, by block, so that a weight has `bits` on average at most.

    A kind of block becomes two at most: layers that are int8 in all of its blocks, and more in some of them.
    Each further kind would take programs of its own.

    Args:
        chain: in 8da4w.
        sensitivities: of its layers.
        bits: of codes, scales not counted.
    """
    by_kind: dict[int, dict[int, dict[str, Sensitivity]]] = defaultdict(dict)
    seen = set[str]()
    for number, found in sensitivities.items():
        if not seen.issuperset(found):
            own = chain.own_names(number).items()
            of_kind = {name: found[weight] for name, weight in own if weight in found}
            by_kind[chain.kind_of[number]][number] = of_kind
            seen.update(found)
    share = (bits - _INT4) / (_INT8 - _INT4)
    chosen: dict[int, frozenset[str]] = {}
    for blocks in by_kind.values():
        for number, names in int8_of_kind(blocks, share).items():
            own_names = chain.own_names(number)
            chosen[number] = frozenset(own_names[name] for name in names)
    # A layer that is used again has the bits of its first use.
    decided: dict[str, bool] = {}
    by_block: dict[int, frozenset[str]] = {}
    for number, found in sensitivities.items():
        for name in found:
            decided.setdefault(name, name in chosen.get(number, ()))
        if names := frozenset(name for name in found if decided[name]):
            by_block[number] = names
    return by_block


def int8_of_kind(blocks: Mapping[int, Mapping[str, Sensitivity]], share: float) -> dict[int, frozenset[str]]:
    """Names of the layers of each block that are int8, at most this share of all numbers."""
    numbers = {name: each.numbers for name, each in next(iter(blocks.values())).items()}
    room = share * sum(numbers.values()) * len(blocks)
    totals = {name: sum(found[name].error for found in blocks.values()) for name in numbers}
    by_density = sorted(numbers, key=lambda name: -totals[name] / numbers[name])
    best: dict[int, frozenset[str]] = dict.fromkeys(blocks, frozenset())
    most = 0.0
    for count in range(len(by_density) + 1):
        everywhere, others = by_density[:count], by_density[count:]
        left = room - len(blocks) * sum(numbers[name] for name in everywhere)
        if left < 0:
            break
        spared = sum(totals[name] for name in everywhere)
        for more in [(), *combinations(others, 1), *combinations(others, 2)]:
            size = sum(numbers[name] for name in more)
            fit = int(left // size) if more else 0
            gains = {number: sum(found[name].error for name in more) for number, found in blocks.items()}
            some = sorted(gains, key=lambda number: -gains[number])[:fit]
            if (gain := spared + sum(gains[number] for number in some)) > most:
                most = gain
                best = {
                    number: frozenset(everywhere).union(more if number in some else ()) for number in blocks
                }
    return best


def mean_bits(
    sensitivities: Mapping[int, Mapping[str, Sensitivity]], int8: Mapping[int, frozenset[str]]
) -> float:
    """Bits of a weight's code on average, over the layers that were measured."""
    of_all = of_int8 = 0
    for number, found in sensitivities.items():
        of_all += sum(each.numbers for each in found.values())
        of_int8 += sum(found[name].numbers for name in int8.get(number, ()))
    return _INT4 + (_INT8 - _INT4) * of_int8 / max(of_all, 1)
