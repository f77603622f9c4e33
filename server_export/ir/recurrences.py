"""What looks at the tokens before through a memory of fixed size, as operators of a graph.

    convolution(source [rows, width, tokens], taps, ...)              sum over k of taps[k] source[t - k]
    recurrence(query, key, value, decay, strength, ...)               S = exp(decay[t]) S + key[t] new[t]^T
                                                                      answer[t] = query[t] S
        new[t] = value[t], or strength[t] (value[t] - key[t] exp(decay[t]) S) by the delta rule
    scan(factor, source [rows, width, tokens], ...)       answer[t] = factor[t] answer[t - 1] + source[t]

A graph of a block keeps them whole. `expand` writes them as products over all tokens of a call at once, whose
sizes are those of attention, and of one token as its step; so what derives graphs finds no operator that it
doesn't know. The memory that a call begins with is nothing, or an input; then what it ends with is answered.

All tokens at once is "attention" without a softmax, whose scores decay (Dao and Gu, "Transformers are SSMs",
arXiv 2405.21060), each number of a key for itself or all alike; the delta rule first solves a triangular
system for what each token adds (Yang et al., "Parallelizing linear transformers with the delta rule", arXiv
2406.06484). A scan, whose numbers decay each for itself, adds what is 1, 2, 4, ... tokens before (Hillis and
Steele, "Data parallel algorithms", 1986).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.ir.decays import Decays, OwnDecays
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
    """Each token with those before it, each number for itself.

    Args:
        source: f32 [rows, width, tokens].
        taps: f32 [width, 1] of a token itself, the one before it, and so on.
        before: table `behind` of the one before.
        entering: tables of the same name of each further one in turn.
        leaving, staying: tables of the same names.
    """
    answer = source * taps[0]
    for back, tap in enumerate(taps[1:], 1):
        answer = answer + torch.nn.functional.pad(source, (back, 0))[..., : source.shape[-1]] * tap
    return answer


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
    """A matrix [key, value] for each row and head that tokens add to and read.

    Args:
        query, key, value: f32 [rows x heads, tokens, width].
        decay: f32 [rows x heads, tokens], the logarithm of a factor of at most 1; or one for each number of a
            key, [rows x heads, tokens, width].
        strength: f32 [rows x heads, tokens] of the delta rule; None for none.
        until, before: tables `behind` of all tokens up to each, with and without itself.
        halves: tables of the same name, of the delta rule and of decays of each number.
        meeting: tables of the same name, of decays of each number.
    """
    memory = query.new_zeros(query.shape[0], query.shape[2], value.shape[2])
    answers = []
    for token in range(query.shape[1]):
        memory = memory * decay[:, token].exp().reshape(len(memory), -1, 1)
        new = value[:, token]
        if strength is not None:
            new = (new - torch.einsum("rk,rkv->rv", key[:, token], memory)) * strength[:, token, None]
        memory = memory + key[:, token, :, None] * new[:, None]
        answers.append(torch.einsum("rk,rkv->rv", query[:, token], memory))
    return torch.stack(answers, 1)


def scan(
    factor: torch.Tensor,
    source: torch.Tensor,
    before: Sequence[torch.Tensor],
    entering: torch.Tensor,
    leaving: torch.Tensor,
) -> torch.Tensor:
    """Numbers that decay each for itself, and that tokens add to.

    Args:
        factor, source: f32 [rows, width, tokens].
        before: tables `behind` of the one that is 1, 2, 4, ... before.
        entering, leaving: tables of the same names, of one token.
    """
    answers = [source[..., 0]]
    for token in range(1, source.shape[-1]):
        answers.append(factor[..., token] * answers[-1] + source[..., token])
    return torch.stack(answers, -1)


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


# A writer, the operator's node, and the memory before it -> the answer, and the memory behind it.
Step = Callable[[GraphWriter, Node, Node | None], tuple[Node, Node | None]]


def memories(graph_module: GraphModule, rows: int) -> dict[Node, tuple[int, int, int]]:
    """The operators of a graph with a memory, and its shape of so many rows."""
    return {
        node: (rows, *_memory(node, rows))
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.target in _STEPS
    }


def _memory(node: Node, rows: int) -> tuple[int, int]:
    if node.target is CONVOLUTION:
        return int(node.args[0].meta["val"].shape[1]), len(node.args[1]) - 1
    if node.target is SCAN:
        return int(node.args[0].meta["val"].shape[1]), 1
    key, value = (each.meta["val"].shape for each in node.args[1:3])
    return int(key[0]) // rows * int(key[2]), int(value[2])


def expand(
    graph_module: GraphModule, before: Callable[[Node], Node | None] = lambda node: None
) -> list[Node]:
    """Write the operators as others, in place; what nothing reads any longer goes, tables included.

    Args:
        graph_module: its nodes carry `meta["val"]`.
        before: an input for each operator's memory before the call, in the shape of `memories`.

    Returns:
        The memories behind the call, of operators that were given one.
    """
    writer, behind = GraphWriter(graph_module), list[Node]()

    def write(writer: GraphWriter, node: Node) -> Node:
        answer, memory = _STEPS[node.target](writer, node, before(node))
        if memory is not None:
            behind.append(memory)
        return answer

    tables = set[Node]()
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in _STEPS:
            tables |= {source for source in node.all_input_nodes if source.op == "placeholder"}
            writer.replace(node, write, node)
    for table in tables:
        if not table.users:
            graph_module.graph.erase_node(table)
    graph_module.recompile()
    return behind


def _convolved(writer: GraphWriter, node: Node, memory: Node | None) -> tuple[Node, Node | None]:
    source, taps, before, entering, leaving, staying = node.args
    tokens = source.meta["val"].shape[-1]

    def at(back: int) -> Node:
        return writer.times(source, taps[back])

    if tokens == 1 and memory is not None:
        answer = at(0)
        for back in range(1, len(taps)):
            past = writer.call(aten.slice.Tensor, memory, 2, len(taps) - 1 - back, len(taps) - back)
            answer = writer.plus(answer, writer.times(past, taps[back]))
        kept = [writer.call(aten.slice.Tensor, memory, 2, 1, len(taps) - 1)] if len(taps) > 2 else []
        return answer, writer.call(aten.cat.default, [*kept, source], 2)
    # What is one token further back meets its tap, and all of that moves by one token.
    turned = writer.call(aten.transpose.int, before, 1, 2)
    answer = at(len(taps) - 1)
    for back in reversed(range(len(taps) - 1)):
        answer = writer.plus(at(back), _moved(writer, answer, turned))
    if memory is None:
        return answer, None
    for tap, table in zip(taps[1:], entering, strict=True):
        past = writer.call(aten.bmm.default, memory, writer.call(aten.transpose.int, table, 1, 2))
        answer = writer.plus(answer, writer.times(past, tap))
    kept, new = (writer.call(aten.bmm.default, *pair) for pair in ((memory, staying), (source, leaving)))
    return answer, writer.plus(kept, new)


def _moved(writer: GraphWriter, source: Node, turned: Node) -> Node:
    """What is some tokens before each, f32 [rows, width, tokens]; `turned` has those in columns."""
    rows, width, tokens = source.meta["val"].shape
    flat = writer.reshape(source, [1, rows * width, tokens])
    return writer.reshape(writer.call(aten.bmm.default, flat, turned), [rows, width, tokens])


def _scanned(writer: GraphWriter, node: Node, memory: Node | None) -> tuple[Node, Node | None]:
    factor, answer, tables, entering, leaving = node.args
    if memory is not None:
        known = writer.times(factor, memory)
        if answer.meta["val"].shape[-1] == 1:
            answer = writer.plus(known, answer)
            return answer, answer
        answer = writer.plus(answer, writer.times(known, writer.call(aten.transpose.int, entering, 1, 2)))
    for number, before in enumerate(tables, 1):
        turned = writer.call(aten.transpose.int, before, 1, 2)
        answer = writer.plus(answer, writer.times(factor, _moved(writer, answer, turned)))
        if number < len(tables):
            factor = writer.times(factor, _moved(writer, factor, turned))
    return answer, None if memory is None else writer.call(aten.bmm.default, answer, leaving)


def _recurred(writer: GraphWriter, node: Node, memory: Node | None) -> tuple[Node, Node | None]:
    query, key, value, decay, strength, until, before, halves, meeting = node.args
    count, tokens, width = key.meta["val"].shape
    call = writer.call
    if memory is not None:
        shape = memory.meta["val"].shape
        memory = writer.reshape(memory, [count, width, value.meta["val"].shape[-1]])
    if strength is not None:
        strength = writer.reshape(strength, [count, tokens, 1])
    if tokens == 1 and memory is not None:
        factor = call(aten.exp.default, writer.reshape(decay, [count, -1, 1]))
        memory = writer.times(memory, factor)
        if strength is not None:
            value = writer.times(writer.minus(value, call(aten.bmm.default, key, memory)), strength)
        turned = call(aten.transpose.int, key, 1, 2)
        memory = writer.plus(memory, call(aten.bmm.default, turned, value))
        return call(aten.bmm.default, query, memory), writer.reshape(memory, shape)
    of_keys = (writer, decay, key, until, before)
    decays = OwnDecays(*of_keys, halves, meeting) if meeting else Decays(*of_keys)
    if strength is not None:
        if memory is not None:
            value = writer.minus(value, decays.read(key, memory))
        below = decays.products(writer.times(key, strength), itself=False)
        inverse = call(UNIT_INVERSE, below, writer.minus(until, before), list(halves))
        value = call(aten.bmm.default, inverse, writer.times(value, strength))
    answer = call(aten.bmm.default, decays.products(query), value)
    if memory is None:
        return answer, None
    answer = writer.plus(answer, decays.read(query, memory))
    return answer, writer.reshape(decays.behind(memory, value), shape)


_STEPS: dict[Any, Step] = {CONVOLUTION: _convolved, RECURRENCE: _recurred, SCAN: _scanned}
