"""Scores that a decoder masks in another way than by adding a mask.

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
from server_export.trace.position_folding import causal_table, shape_of_one_row
from server_export.trace.scores import HIDDEN, Known, causal_window, readers_of

aten = torch.ops.aten

_LARGER = {aten.maximum.default, aten.max.other}


def write_masks(graph: ModelGraph) -> None:
    """Write masked scores as the sum of scores and a causal mask, in place."""
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
        shape = shape_of_one_row(node)
        is_done = drop_lower_bound(node, known)
        if not is_done and shape[-1:] == [TOKENS] and sum(size % TOKENS == 0 for size in shape) == 2:
            is_done = add_masks(writer, node, known, mask)
        if is_done:
            graph.positions.ends.remove(node)


def add_masks(writer: GraphWriter, node: Node, known: Known, mask: Callable[[Node, int], Node]) -> bool:
    """Replace other ways of masking by the addition of a causal mask, in place.

    Args:
        writer: writes into the graph.
        node: a square matrix.
        known: returns values of nodes.
        mask: writes a causal mask with a window before a node.

    Returns:
        Whether all users of the node were rewritten.
    """
    value = known(node)
    assert value is not None
    readers = [*readers_of(node, known)]
    hidden = [_masked_scores(user, value, known) for user in readers]
    windows = [None if each is None else causal_window(each) for each in hidden]
    for user, window in zip(readers, windows, strict=True):
        if window is None:
            continue
        scores, users_of_masked = _scores_of(user), [*user.users]
        if user.target is not aten.mul.Tensor:
            scores = mask(user, window)
            with user.graph.inserting_before(user):
                scores = user.graph.call_function(aten.add.Tensor, (_scores_of(user), scores))
            scores.meta = dict(user.meta)
        user.replace_all_uses_with(scores)
        user.graph.erase_node(user)
        if user.target is not aten.mul.Tensor:
            _drop_second_mask(scores, users_of_masked, window, known)
    return bool(windows) and None not in windows


def drop_lower_bound(node: Node, known: Known) -> bool:
    """Remove the maximum of scores and the smallest float, in place; return whether all users were such."""
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


def _drop_second_mask(masked: Node, users: list[Node], window: int, known: Known) -> None:
    """Remove a mask that is added again and masks nothing else, in place."""
    for user in users:
        if user.target is not aten.add.Tensor:
            continue
        others = [known(each) for each in user.all_input_nodes if each is not masked]
        if len(others) == 1 and others[0] is not None:
            wider = causal_window(others[0] <= HIDDEN)
            if wider is not None and wider >= window and not bool((others[0] > 0).any()):
                user.replace_all_uses_with(masked)
                user.graph.erase_node(user)


def _scores_of(user: Node) -> Any:
    first, second, *_ = user.args
    is_second = user.target is aten.where.self or (
        user.target is aten.mul.Tensor and _number_of_elements(second) > _number_of_elements(first)
    )
    return second if is_second else first


def _number_of_elements(value: Any) -> int:
    """Return the number of elements of a value."""
    return int(value.meta["val"].numel()) if isinstance(value, Node) else 0


def _masked_scores(user: Node, value: torch.Tensor, known: Known) -> torch.Tensor | None:
    """Return which scores a user of a mask hides, or None if the user does something else."""
    if user.target is aten.where.self and known(user.args[1]) is None:
        least = known(user.args[2])
        return value == 0 if least is not None and bool((least <= HIDDEN).all()) else None
    if user.target is aten.masked_fill.Scalar:
        return value != 0 if user.args[2] <= HIDDEN else None
    if user.target is aten.mul.Tensor and len(user.users) == 1:
        (later,) = user.users
        others = [known(each) for each in later.all_input_nodes if each is not user]
        masks = [each <= HIDDEN for each in others if each is not None]
        is_binary = bool(((value == 0) | (value == 1)).all())
        if later.target is aten.add.Tensor and is_binary and len(masks) == 1:
            return masks[0] if torch.equal(masks[0].reshape(value.shape), value == 0) else None
    return None


register(
    Pattern(
        "masked scores",
        serves="decoders that mask scores by where, masked_fill or a product",
        model_types=("gpt_neo", "mpt", "openai-gpt", "xglm"),
        example="gpt_neo",
        rewrites=(Rewrite(write_masks, "tables", of="decoder"),),
    )
)
