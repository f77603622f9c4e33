"""Recurrences and causal convolutions, whose state has a fixed size, as operators of a graph.

    convolution(source [rows, width, tokens], taps, ...)              sum over k of taps[k] source[t - k]
    recurrence(query, key, value, decay, strength, ...)               S = exp(decay[t]) S + key[t] new[t]^T
                                                                      output[t] = query[t] S
        new[t] = value[t], or strength[t] (value[t] - key[t] exp(decay[t]) S) by the delta rule
    scan(factor, source [rows, width, tokens], ...)       output[t] = factor[t] output[t - 1] + source[t]

The graph of a block keeps them whole. `expand` writes them as matrix products over all tokens of a call, of
the same sizes as attention, or as one recurrent step for a single token, so transformations find only
operators that they know. A call starts from a zero state, or from one that is an input; in the second case
the state after the call is an output.

The form over all tokens is "attention" without a softmax, whose scores decay (Dao and Gu, "Transformers are
SSMs", arXiv 2405.21060), for each element of a key or for all alike. The delta rule first solves a triangular
system for what each token adds (Yang et al., "Parallelizing linear transformers with the delta rule", arXiv
2406.06484). A scan, whose elements decay separately, adds the values of 1, 2, 4, ... tokens before (Hillis
and Steele, "Data parallel algorithms", 1986).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.ir.decays import Decays, ElementwiseDecays
from server_export.ir.unit_inverse import UNIT_INVERSE
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten


def convolution(
    source: torch.Tensor,
    taps: Sequence[torch.Tensor],
    before: torch.Tensor,
    entering: Sequence[torch.Tensor],
    leaving: torch.Tensor,
    staying: torch.Tensor,
) -> torch.Tensor:
    """Compute a causal depthwise convolution, of each element of a token with that of the tokens before it.

    Args:
        source: f32 [rows, width, tokens].
        taps: f32 [width, 1] for the token itself, the token before it, and so on.
        before: the table `behind` of the previous token.
        entering: tables of this name, one for each further tap.
        leaving, staying: tables of these names.
    """
    output = source * taps[0]
    for back, tap in enumerate(taps[1:], 1):
        output = output + torch.nn.functional.pad(source, (back, 0))[..., : source.shape[-1]] * tap
    return output


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor | None,
    until: torch.Tensor,
    before: torch.Tensor,
    halves: Sequence[torch.Tensor],
    meeting: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Compute a recurrence of a matrix state [key, value] per row and head, which tokens update and read.

    Args:
        query, key, value: f32 [rows x heads, tokens, width].
        decay: f32 [rows x heads, tokens], the logarithm of a factor of at most 1; or one for each element of
            a key, [rows x heads, tokens, width].
        strength: f32 [rows x heads, tokens] for the delta rule, else None.
        until, before: tables `behind` of all tokens up to each token, including and excluding the token
            itself.
        halves: tables of this name, for the delta rule and for decays of each element.
        meeting: tables of this name, for decays of each element.
    """
    state = query.new_zeros(query.shape[0], query.shape[2], value.shape[2])
    outputs = []
    for token in range(query.shape[1]):
        state = state * decay[:, token].exp().reshape(len(state), -1, 1)
        new = value[:, token]
        if strength is not None:
            new = (new - torch.einsum("rk,rkv->rv", key[:, token], state)) * strength[:, token, None]
        state = state + key[:, token, :, None] * new[:, None]
        outputs.append(torch.einsum("rk,rkv->rv", query[:, token], state))
    return torch.stack(outputs, 1)


def scan(
    factor: torch.Tensor,
    source: torch.Tensor,
    before: Sequence[torch.Tensor],
    entering: torch.Tensor,
    leaving: torch.Tensor,
) -> torch.Tensor:
    """Compute an elementwise recurrence: each element decays by its own factor, and tokens add to it.

    Args:
        factor, source: f32 [rows, width, tokens].
        before: tables `behind` of the token 1, 2, 4, ... positions before.
        entering, leaving: tables of these names, of one token.
    """
    outputs = [source[..., 0]]
    for token in range(1, source.shape[-1]):
        outputs.append(factor[..., token] * outputs[-1] + source[..., token])
    return torch.stack(outputs, -1)


_OPERATORS = {
    function: torch.library.custom_op(f"prge::{function.__name__}", mutates_args=())(function)
    for function in (convolution, recurrence, scan)
}
CONVOLUTION, RECURRENCE = torch.ops.prge.convolution.default, torch.ops.prge.recurrence.default
SCAN = torch.ops.prge.scan.default


@_OPERATORS[convolution].register_fake
def _(source: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(source, memory_format=torch.contiguous_format)


@_OPERATORS[scan].register_fake
def _(factor: torch.Tensor, source: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(source, memory_format=torch.contiguous_format)


@_OPERATORS[recurrence].register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


# (writer, the operator's node, the state before the call) -> the output, and the state after the call.
Expand = Callable[[GraphWriter, Node, Node | None], tuple[Node, Node | None]]


def recurrent_state_shapes(graph_module: GraphModule, rows: int) -> dict[Node, tuple[int, int, int]]:
    """Return the nodes of a graph that have a recurrent state, with its shape for `rows` rows."""
    return {
        node: (rows, *_state_shape(node, rows))
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.target in _EXPANSIONS
    }


def _state_shape(node: Node, rows: int) -> tuple[int, int]:
    if node.target is CONVOLUTION:
        return int(node.args[0].meta["val"].shape[1]), len(node.args[1]) - 1
    if node.target is SCAN:
        return int(node.args[0].meta["val"].shape[1]), 1
    key, value = (each.meta["val"].shape for each in node.args[1:3])
    return int(key[0]) // rows * int(key[2]), int(value[2])


def expand(
    graph_module: GraphModule, state_before: Callable[[Node], Node | None] = lambda node: None
) -> list[Node]:
    """Expand recurrences and convolutions into ATen operators, in place, and remove unused tables.

    Args:
        graph_module: its nodes have `meta["val"]`.
        state_before: returns the input with an operator's state before the call, in the shape of
            `recurrent_state_shapes`, or None to start from zeros.

    Returns:
        The states after the call of the operators that had an input state.
    """
    writer, states_after = GraphWriter(graph_module), list[Node]()

    def write(writer: GraphWriter, node: Node) -> Node:
        output, state_after = _EXPANSIONS[node.target](writer, node, state_before(node))
        if state_after is not None:
            states_after.append(state_after)
        return output

    tables = set[Node]()
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in _EXPANSIONS:
            tables |= {source for source in node.all_input_nodes if source.op == "placeholder"}
            writer.replace(node, write, node)
    for table in tables:
        if not table.users:
            graph_module.graph.erase_node(table)
    graph_module.recompile()
    return states_after


def _expand_convolution(writer: GraphWriter, node: Node, state: Node | None) -> tuple[Node, Node | None]:
    source, taps, before, entering, leaving, staying = node.args
    tokens = source.meta["val"].shape[-1]

    def at(back: int) -> Node:
        return writer.times(source, taps[back])

    if tokens == 1 and state is not None:
        output = at(0)
        for back in range(1, len(taps)):
            previous = writer.call(aten.slice.Tensor, state, 2, len(taps) - 1 - back, len(taps) - back)
            output = writer.plus(output, writer.times(previous, taps[back]))
        remaining = [writer.call(aten.slice.Tensor, state, 2, 1, len(taps) - 1)] if len(taps) > 2 else []
        return output, writer.call(aten.cat.default, [*remaining, source], 2)
    # Horner's scheme: each step adds one tap and moves the sum by one token.
    table_transposed = writer.call(aten.transpose.int, before, 1, 2)
    output = at(len(taps) - 1)
    for back in reversed(range(len(taps) - 1)):
        output = writer.plus(at(back), _move_tokens(writer, output, table_transposed))
    if state is None:
        return output, None
    for tap, table in zip(taps[1:], entering, strict=True):
        previous = writer.call(aten.bmm.default, state, writer.call(aten.transpose.int, table, 1, 2))
        output = writer.plus(output, writer.times(previous, tap))
    remaining, last_token = (
        writer.call(aten.bmm.default, *pair) for pair in ((state, staying), (source, leaving))
    )
    return output, writer.plus(remaining, last_token)


def _move_tokens(writer: GraphWriter, source: Node, table_transposed: Node) -> Node:
    """Return the preceding tokens of f32 [rows, width, tokens] that the columns of the table select."""
    rows, width, tokens = source.meta["val"].shape
    flat = writer.reshape(source, [1, rows * width, tokens])
    return writer.reshape(writer.call(aten.bmm.default, flat, table_transposed), [rows, width, tokens])


def _expand_scan(writer: GraphWriter, node: Node, state: Node | None) -> tuple[Node, Node | None]:
    factor, output, tables, entering, leaving = node.args
    if state is not None:
        decayed = writer.times(factor, state)
        if output.meta["val"].shape[-1] == 1:
            output = writer.plus(decayed, output)
            return output, output
        output = writer.plus(output, writer.times(decayed, writer.call(aten.transpose.int, entering, 1, 2)))
    for number, before in enumerate(tables, 1):
        table_transposed = writer.call(aten.transpose.int, before, 1, 2)
        output = writer.plus(output, writer.times(factor, _move_tokens(writer, output, table_transposed)))
        if number < len(tables):
            factor = writer.times(factor, _move_tokens(writer, factor, table_transposed))
    return output, None if state is None else writer.call(aten.bmm.default, output, leaving)


def _expand_recurrence(writer: GraphWriter, node: Node, state: Node | None) -> tuple[Node, Node | None]:
    query, key, value, decay, strength, until, before, halves, meeting = node.args
    count, tokens, width = key.meta["val"].shape
    call = writer.call
    if state is not None:
        shape = state.meta["val"].shape
        state = writer.reshape(state, [count, width, value.meta["val"].shape[-1]])
    if strength is not None:
        strength = writer.reshape(strength, [count, tokens, 1])
    if tokens == 1 and state is not None:
        factor = call(aten.exp.default, writer.reshape(decay, [count, -1, 1]))
        state = writer.times(state, factor)
        if strength is not None:
            value = writer.times(writer.minus(value, call(aten.bmm.default, key, state)), strength)
        key_transposed = call(aten.transpose.int, key, 1, 2)
        state = writer.plus(state, call(aten.bmm.default, key_transposed, value))
        return call(aten.bmm.default, query, state), writer.reshape(state, shape)
    arguments = (writer, decay, key, until, before)
    decays = ElementwiseDecays(*arguments, halves, meeting) if meeting else Decays(*arguments)
    if strength is not None:
        if state is not None:
            value = writer.minus(value, decays.read(key, state))
        below = decays.products(writer.times(key, strength), itself=False)
        inverse = call(UNIT_INVERSE, below, writer.minus(until, before), list(halves))
        value = call(aten.bmm.default, inverse, writer.times(value, strength))
    output = call(aten.bmm.default, decays.products(query), value)
    if state is None:
        return output, None
    output = writer.plus(output, decays.read(query, state))
    return output, writer.reshape(decays.state_after(state, value), shape)


_EXPANSIONS: dict[Any, Expand] = {
    CONVOLUTION: _expand_convolution,
    RECURRENCE: _expand_recurrence,
    SCAN: _expand_scan,
}
