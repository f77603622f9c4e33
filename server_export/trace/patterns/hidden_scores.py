"""Scores that a decoder hides in another way than by a sum with a mask.

max(scores, least)                              scores
where(seen, scores, least), masked_fill(scores, hidden, least), scores * seen + mask      scores + mask
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from server_export.ir.markers import TOKENS
from server_export.ir.writer import GraphWriter
from server_export.trace.model_graph import ModelGraph
from server_export.trace.patterns import Pattern, Rewrite, register
from server_export.trace.positional import causal_table, of_one_row
from server_export.trace.scores import HIDDEN, Known, causal_window, readers_of

aten = torch.ops.aten

_LARGER = {aten.maximum.default, aten.max.other}


def write_masks(graph: ModelGraph) -> None:
    """Hide scores by a sum with a mask, in place."""
    writer, known = GraphWriter(graph.graph_module), graph.positions.known

    def mask(before: Node, window: int) -> Node:
        table = causal_table(before, graph.tables, window)
        with before.graph.inserting_before(before):
            new = before.graph.call_function(
                aten.reshape.default, (table, [1] * (before.meta["val"].dim() - 2) + [TOKENS, TOKENS])
            )
        new.meta["val"] = table.meta["val"].reshape(new.args[1])
        return new

    for node in [*graph.positions.ends]:
        shape = of_one_row(node)
        is_done = drop_least(node, known)
        if not is_done and shape[-1:] == [TOKENS] and sum(size % TOKENS == 0 for size in shape) == 2:
            is_done = add_masks(writer, node, known, mask)
        if is_done:
            graph.positions.ends.remove(node)


def add_masks(writer: GraphWriter, node: Node, known: Known, mask: Callable[[Node, int], Node]) -> bool:
    """Hide by a sum what a mask of positions hides in another way, in place.

    Args:
        writer: of the graph.
        node: of a square of numbers.
        known: numbers of nodes.
        mask: writes a causal mask of a window before a node.

    Returns:
        Whether all that reads the node was written so.
    """
    value = known(node)
    assert value is not None
    readers = [*readers_of(node, known)]
    hidden = [_hidden(user, value, known) for user in readers]
    windows = [None if each is None else causal_window(each) for each in hidden]
    for user, window in zip(readers, windows, strict=True):
        if window is None:
            continue
        scores, behind = _scores(user), [*user.users]
        if user.target is not aten.mul.Tensor:
            scores = mask(user, window)
            with user.graph.inserting_before(user):
                scores = user.graph.call_function(aten.add.Tensor, (_scores(user), scores))
            scores.meta = dict(user.meta)
        user.replace_all_uses_with(scores)
        user.graph.erase_node(user)
        if user.target is not aten.mul.Tensor:
            _drop_wider(scores, behind, window, known)
    return bool(windows) and None not in windows


def drop_least(node: Node, known: Known) -> bool:
    """Leave out, in place, where the larger of scores and the least number is taken; whether that was all."""
    value = known(node)
    least = torch.finfo(torch.float32).min
    readers = [*readers_of(node, known)]
    if (
        value is None
        or not bool((value == least).all())
        or any(user.target not in _LARGER for user in readers)
    ):
        return False
    for user in readers:
        (scores,) = (each for each in user.all_input_nodes if known(each) is None)
        user.replace_all_uses_with(scores)
        user.graph.erase_node(user)
    return True


def _drop_wider(masked: Node, behind: list[Node], window: int, known: Known) -> None:
    """Leave out a mask that is added once more and hides nothing else, in place."""
    for user in behind:
        if user.target is not aten.add.Tensor:
            continue
        others = [known(each) for each in user.all_input_nodes if each is not masked]
        if len(others) == 1 and others[0] is not None:
            wider = causal_window(others[0] <= HIDDEN)
            if wider is not None and wider >= window and not bool((others[0] > 0).any()):
                user.replace_all_uses_with(masked)
                user.graph.erase_node(user)


def _scores(user: Node) -> Any:
    first, second, *_ = user.args
    is_behind = user.target is aten.where.self or (
        user.target is aten.mul.Tensor and _is_square(second) > _is_square(first)
    )
    return second if is_behind else first


def _is_square(value: Any) -> int:
    """How many numbers a value has."""
    return int(value.meta["val"].numel()) if isinstance(value, Node) else 0


def _hidden(user: Node, value: torch.Tensor, known: Known) -> torch.Tensor | None:
    """Which scores a reader of a mask hides; None if it does something else."""
    if user.target is aten.where.self and known(user.args[1]) is None:
        least = known(user.args[2])
        return value == 0 if least is not None and bool((least <= HIDDEN).all()) else None
    if user.target is aten.masked_fill.Scalar:
        return value != 0 if user.args[2] <= HIDDEN else None
    if user.target is aten.mul.Tensor and len(user.users) == 1:
        (later,) = user.users
        others = [known(each) for each in later.all_input_nodes if each is not user]
        masks = [each <= HIDDEN for each in others if each is not None]
        is_share = bool(((value == 0) | (value == 1)).all())
        if later.target is aten.add.Tensor and is_share and len(masks) == 1:
            return masks[0] if torch.equal(masks[0].reshape(value.shape), value == 0) else None
    return None


register(
    Pattern(
        "hidden scores",
        serves="decoders that hide scores by where, masked_fill or a product",
        model_types=("gpt_neo", "mpt", "openai-gpt", "xglm"),
        example="gpt_neo",
        rewrites=(Rewrite(write_masks, "tables", of="decoder"),),
    )
)
