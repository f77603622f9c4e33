"""`--init eva`: an adapter whose frozen `lora_a` are principal directions of its layers' inputs (EVA).

rows -> examples -> tokens -> inputs of every adapted layer, block by block -> directions -> ranks -> lora_a
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prge.errors import DataError
from server_export.adapter.initial_adapter import StartAdapter
from server_export.model.blockwise import watch_inputs
from server_export.model.chain import ModelChain
from server_export.model.principal import IncrementalSVD, PrincipalDirections, spread_ranks


def eva_adapter(
    start: StartAdapter, chain: ModelChain, rows: Sequence[Sequence[int]], spread: bool
) -> tuple[StartAdapter, dict[str, float]]:
    """Return an untrained adapter with principal directions as `lora_a`.

    Args:
        start: an adapter of the same layers.
        chain: the chain of its model, in float32, with an adapter of rank 1 on these layers.
        rows: the tokens of the rows that the directions are computed on.
        spread: whether ranks differ from 1 to twice the adapter's, with no more trainable parameters.

    Returns:
        The adapter, and for each layer the share of its inputs' mean square that `lora_a` explains.

    Raises:
        DataError: the rows have fewer directions than the adapter's rank.
        BundleError: the model's weights can't be read.
    """
    by_layer = _principal_directions(start, chain, rows, (2 if spread else 1) * start.rank)
    ranks = dict.fromkeys(by_layer, start.rank)
    if spread:
        outputs = {name: len(lora_b) for name, lora_b in start.lora_b.items()}
        shares = {name: directions.shares.tolist() for name, directions in by_layer.items()}
        ranks = spread_ranks(shares, outputs, start.rank)
    explained = {name: float(each.shares[: ranks[name]].sum()) for name, each in by_layer.items()}
    lora_a = {name: by_layer[name].lora_a(rank) for name, rank in ranks.items()}
    return start.starting_from(lora_a), explained


def _principal_directions(
    start: StartAdapter, chain: ModelChain, rows: Sequence[Sequence[int]], count: int
) -> dict[str, PrincipalDirections]:
    """Return `count` directions of each adapted layer's inputs, or as many as the rows have.

    Raises:
        DataError: the rows have fewer directions than the adapter's rank.
        BundleError: the model's weights can't be read.
    """
    accumulators: dict[tuple[str, ...], IncrementalSVD] = {}

    def watch(names: Sequence[str], states: torch.Tensor) -> None:
        accumulators.setdefault(tuple(names), IncrementalSVD(states.shape[1], count)).add(states)

    by_layer: dict[str, PrincipalDirections] = {}
    for _ in watch_inputs(chain, rows, watch):
        while accumulators:
            names, accumulator = accumulators.popitem()
            by_layer |= dict.fromkeys(names, accumulator.directions())
    adapted = {name: by_layer[name] for name in start.lora_a}
    _check(adapted, start.rank)
    return adapted


def _check(by_layer: dict[str, PrincipalDirections], rank: int) -> None:
    problems = [
        f"the inputs of {name} have only {len(directions.rows)} directions, but the rank is {rank}"
        for name, directions in by_layer.items()
        if len(directions.rows) < rank
    ]
    if problems:
        raise DataError(
            "Cannot compute lora_a from these rows:",
            problems,
            remedy="Use more --init-rows or a lower --rank, or omit --init eva.",
            code="directions-too-few",
        )
