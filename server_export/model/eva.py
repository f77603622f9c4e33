"""`--init eva`: an adapter whose frozen `lora_a` are principal directions of what its layers see.

rows -> examples -> tokens -> inputs of every adapted layer, block by block -> directions -> ranks -> lora_a
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prge.errors import DataError
from server_export.adapter.start import StartAdapter
from server_export.model.chain import ModelChain
from server_export.model.inputs import watch_inputs
from server_export.model.principal import Directions, Principal, spread_ranks


def principal_start(
    start: StartAdapter, chain: ModelChain, rows: Sequence[Sequence[int]], spread: bool
) -> tuple[StartAdapter, dict[str, float]]:
    """An untrained adapter with principal directions as `lora_a`.

    Args:
        start: of the same layers.
        chain: of its model, in float32, with an adapter of rank 1 on these layers.
        rows: tokens of what the layers see.
        spread: whether ranks go from 1 to twice the adapter's, with as many trained numbers at most.

    Returns:
        The adapter, and what its `lora_a` explain of the mean square of each layer's inputs.

    Raises:
        DataError: the rows have fewer directions than the adapter.
        BundleError: the model's weights can't be read.
    """
    found = _principal_directions(start, chain, rows, (2 if spread else 1) * start.rank)
    ranks = dict.fromkeys(found, start.rank)
    if spread:
        outputs = {name: len(lora_b) for name, lora_b in start.lora_b.items()}
        shares = {name: directions.shares.tolist() for name, directions in found.items()}
        ranks = spread_ranks(shares, outputs, start.rank)
    explained = {name: float(each.shares[: ranks[name]].sum()) for name, each in found.items()}
    lora_a = {name: found[name].lora_a(rank) for name, rank in ranks.items()}
    return start.starting_from(lora_a), explained


def _principal_directions(
    start: StartAdapter, chain: ModelChain, rows: Sequence[Sequence[int]], count: int
) -> dict[str, Directions]:
    """Of what each layer of an adapter sees: `count` directions, or as many as the rows have.

    Raises:
        DataError: the rows have fewer directions than the adapter.
        BundleError: the model's weights can't be read.
    """
    principals: dict[tuple[str, ...], Principal] = {}

    def watch(names: Sequence[str], states: torch.Tensor) -> None:
        principals.setdefault(tuple(names), Principal(states.shape[1], count)).add(states)

    by_layer: dict[str, Directions] = {}
    for _ in watch_inputs(chain, rows, watch):
        while principals:
            names, principal = principals.popitem()
            by_layer |= dict.fromkeys(names, principal.directions())
    found = {name: by_layer[name] for name in start.lora_a}
    _check(found, start.rank)
    return found


def _check(found: dict[str, Directions], rank: int) -> None:
    few = [
        f"{name} sees {len(directions.rows)} directions of them, the rank is {rank}"
        for name, directions in found.items()
        if len(directions.rows) < rank
    ]
    if few:
        raise DataError(
            "the rows can't give lora_a:",
            few,
            remedy="give more --init-rows, or a lower --rank; or leave out --init eva",
            code="directions-too-few",
        )
