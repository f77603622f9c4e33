"""The transformation that lets a block go on with a sequence: what it made of earlier tokens comes in.

    softmax([q k_past + seen, q k + causal]) [v_past, v]          one attention, over both

A token that comes alone takes the first place of the past, which holds zeros, and copies nothing:

    p = softmax(q k_past + q k own + seen), own = [1, 0, 0, ...];     p v_past + p_0 v

Where attention has sinks, the logarithm of a softmax's sum is that of both parts as well.

A block answers the keys and values of its tokens beside the state, unless it takes them from another; whoever
asks keeps them. So it does with what its recurrences and convolutions carry, which takes the place of what
they carried before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from prge.errors import Refusal
from prge.files.signatures import (
    CARRIED,
    CAUSAL,
    KEYS,
    LOGITS,
    LORA_A,
    OWN,
    PAST_KEYS,
    PAST_VALUES,
    SEEN,
    TABLE,
    TAKEN,
    VALUES,
    Port,
)
from server_export.ir.block import PORT, Block, is_input, new_input, port_of
from server_export.ir.mixed_parts import MIXED_PARTS
from server_export.ir.modules import as_module, copied
from server_export.ir.operators import Category, members
from server_export.ir.recurrences import expand, memories
from server_export.ir.shapes import fill_in_values, resized
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.walks import origin, readers
from server_export.ir.writer import Writer

aten = torch.ops.aten

_RESHAPES = members(Category.RESHAPE)
_TRANSPOSITIONS = (aten.transpose.int, aten.permute.default)
_LAYOUTS = (*_RESHAPES, *_TRANSPOSITIONS)
# What sinks of an attention are weighed against.
_TOTAL = aten.logsumexp.default
_REMEDY = (
    "leave prefill and decode out of --roles, with rows of at most 512 tokens, and please report it with the "
    "name of the model"
)


def continued(block: Block, *, rows: int, tokens: int, past: int, any_lora_a: bool) -> Block:
    """A block that goes on with sequences: any tokens of one, or one token of any number of them.

    Args:
        block: an embedding or a block between; its nodes carry `meta["val"]`, and constants are shared.
        rows, tokens: its sizes, one of them 1 and the other a marker.
        past: marker of the tokens that came before.
        any_lora_a: whether a frozen `lora_a` becomes an input, so that every row may have one from elsewhere.

    Returns:
        A block that also takes these `lora_a` [rows, rank, in]; `past_keys` and `past_values` f32 [rows x
        heads, past, width]; and `seen`, which is added to the scores of what came before: f32 [members x
        tokens, past] for one row, [rows x heads, 1, past] for one token, with `own` f32 [1, 1, past]. It
        answers keys and values of its tokens after the hidden states, laid out as those of the past. A causal
        mask is `causal` [members x tokens, tokens] and not a table; other tables have as many rows as the
        hidden states. Keys and values that come from another block aren't answered. Recurrent states f32
        [rows, ...] of `memories` come before keys and values.

    Raises:
        Refusal: an attention is written in a way that isn't known here.
    """
    graph_module, result = block.graph_module, copied(block.graph_module)
    outputs = [*block.outputs, *_carry(result, rows)]
    _give_rows(result, rows)
    adapter = [] if block.has(LORA_A) else [port for port in block.inputs if port.is_adapter]
    for port in adapter if any_lora_a else []:
        _give_lora_a(result, port, rows)
    for table, masked in _attentions(result):
        outputs += _attend(result, table, masked, rows, tokens, past)
    _simplify_shapes(result)
    _infer_sizes(result, max(rows, tokens))
    for node in result.graph.find_nodes(op="placeholder"):
        if not node.users and _is_causal(node):
            result.graph.erase_node(node)
    answer, state = (graph.graph.output_node().args[0][0].meta["val"] for graph in (result, graph_module))
    if [*answer.shape] != [rows, *state.shape[1:]]:
        raise Refusal(
            "unknown-positions",
            f"of {rows} rows the state becomes {[*answer.shape]}: positions are numbered in a way that isn't "
            "known here",
            remedy=_REMEDY,
        )
    result.recompile()
    return replace(block, graph_module=result, outputs=tuple(outputs))


def taken_past(one_row: Block) -> tuple[int, ...]:
    """Which of the values that a block takes are the keys and the values of its attention; none if it makes
    its own. They lie as [1, tokens, heads x width].

    Raises:
        Refusal: they lie otherwise, or only one of them is taken.
    """
    for _, masked in _attentions(one_row.graph_module):
        sources = [origin(node, _LAYOUTS) for node in _keys_and_values(masked)]
        taken = [is_input(source[0], TAKEN) for source in sources]
        if any(taken):
            if not all(taken) or not all(_is_in_order(*source) for source in sources):
                raise Refusal(
                    "unknown-shared-keys",
                    "an attention takes keys and values from another block that aren't laid out as its own",
                    remedy=_REMEDY,
                )
            return tuple(node.meta[PORT].index for node, _ in sources)
    return ()


def _attentions(graph_module: GraphModule) -> list[tuple[Node, Node]]:
    """A mask, and the scores that have it."""
    found = [
        (table, user)
        for table in graph_module.graph.find_nodes(op="placeholder")
        if _is_causal(table)
        for shaped in table.users
        for user in shaped.users
    ]
    if len(found) > 1:
        raise Refusal("several-attentions", f"a block has {len(found)} attentions", remedy=_REMEDY)
    return found


def _is_in_order(taken: Node, steps: Sequence[Node]) -> bool:
    """Whether these steps turn [1, tokens, heads x width] into [heads, tokens, width]."""
    _, tokens, whole = taken.meta["val"].shape
    heads, _, width = steps[-1].meta["val"].shape if steps else (0, 0, 0)
    if heads * width != whole:
        return False
    value = found = torch.arange(2 * whole).reshape(1, 2, whole)
    for step in steps:
        target: Any = step.target
        found = target(found, *map_aggregate(step.args[1:], partial(resized, marker=tokens, size=2)))
    return torch.equal(found, value.reshape(2, heads, width).transpose(0, 1))


def logits(head: Block) -> Block:
    """A shard of the head that returns the logits of all its tokens."""
    result = copied(head.graph_module)
    output = result.graph.output_node()
    (answer,) = output.args[0]
    assert answer.target is SOFTMAX_PARTS
    output.args = ((answer.args[0],),)
    result.graph.eliminate_dead_code()
    for node in result.graph.find_nodes(op="placeholder"):
        if not node.users:
            result.graph.erase_node(node)
    return replace(head, graph_module=as_module(result, result.graph), outputs=(Port(LOGITS),))


def _carry(graph_module: GraphModule, rows: int) -> list[Port]:
    """Write recurrences that go on with their states, and answer these, in place; returns their ports."""
    shapes = memories(graph_module, rows)
    ports = [Port(CARRIED, number, changes=True) for number in range(len(shapes))]
    given = {
        node: _given(graph_module, port, *shape)
        for port, (node, shape) in zip(ports, shapes.items(), strict=True)
    }
    output = graph_module.graph.output_node()
    output.args = ((*output.args[0], *expand(graph_module, given.get)),)
    return ports


def _is_causal(node: Node) -> bool:
    """Whether a placeholder is a mask f32 [members, tokens, tokens]: a square table that is added."""
    shape = node.meta["val"].shape
    is_table = is_input(node, TABLE) and node.meta["val"].dtype == torch.float32
    return (
        is_table
        and shape[1] == shape[2]
        and all(user.target is aten.add.Tensor for user in readers(node, _RESHAPES))
    )


def _give_rows(graph_module: GraphModule, rows: int) -> None:
    """Let the tables that every row has its own of have that many rows, in place."""
    if rows == 1:
        return
    given = set[Node]()
    for node in graph_module.graph.nodes:
        if is_input(node, TABLE) and not _is_causal(node):
            value = node.meta["val"]
            node.meta["val"] = torch.empty(rows, *value.shape[1:], dtype=value.dtype, device="meta")
            given.add(node)
        elif node.op == "call_function" and given.intersection(node.all_input_nodes):
            if node.target in (*_RESHAPES, aten.expand.default) and node.args[1][0] == 1:
                node.args = (node.args[0], [rows, *node.args[1][1:]])
            before = node.meta.pop("val").shape
            fill_in_values(graph_module)
            if node.meta["val"].shape != before:
                given.add(node)


def _give_lora_a(graph_module: GraphModule, port: Port, rows: int) -> None:
    """Make an input [rows, rank, in] of the matrix before an input of the adapter, in place."""
    name = port.name
    (lora_b,) = (node for node in graph_module.graph.find_nodes(op="placeholder") if port_of(node) == port)
    product, *others = lora_b.users
    if others:
        raise Refusal(
            "layer-used-twice", f"{name} is of a layer that a block asks more than once", remedy=_REMEDY
        )
    layer, _ = origin(product.args[0], _RESHAPES)
    if layer.target is not aten.linear.default:
        raise Refusal(
            "unknown-adapted-layer",
            f"what {name} multiplies comes from {layer.format_node()}",
            remedy=_REMEDY,
        )
    source, matrix = layer.args
    rank, width = matrix.meta["val"].shape
    lora_a = _given(graph_module, replace(port, kind=LORA_A), rows, rank, width)

    def factor(writer: Writer) -> Node:
        states = writer.reshape(source, [rows, -1, width])
        found = writer.call(aten.bmm.default, states, writer.call(aten.transpose.int, lora_a, 1, 2))
        return writer.reshape(found, layer.meta["val"].shape)

    Writer(graph_module).replace(layer, factor)


def _given(graph_module: GraphModule, port: Port, *shape: int) -> Node:
    """One more input, behind the others."""
    graph = graph_module.graph
    with graph.inserting_after([*graph.find_nodes(op="placeholder")][-1]):
        return new_input(graph, port, torch.empty(shape, device="meta"))


def _attend(
    graph_module: GraphModule, table: Node, masked: Node, rows: int, tokens: int, past: int
) -> list[Port]:
    """Rewrite one attention, whose scores have their mask in `masked`, in place.

    Returns:
        Ports of keys and values, which are answered now; none if they come from another block.
    """
    graph = graph_module.graph
    scores: Any = masked.args[0]
    product, between = _product(masked)
    softmax, mixed = _weighing(masked)
    totals = [user for user in masked.users if user.target is _TOTAL]
    query = product.args[0]
    keys, values = _keys_and_values(masked)
    heads, _, width = keys.meta["val"].shape
    value_width = values.meta["val"].shape[-1]
    members = table.meta["val"].shape[0]
    given = partial(_given, graph_module)
    taken = [
        source for source, _ in (origin(node, _LAYOUTS) for node in (keys, values)) if is_input(source, TAKEN)
    ]
    changes = all(source.meta[PORT].changes for source in taken)
    past_keys = given(Port(PAST_KEYS, changes=changes), heads, past, width)
    past_values = given(Port(PAST_VALUES, changes=changes), heads, past, value_width)
    seen = given(Port(SEEN), *((members * tokens, past) if rows == 1 else (heads, 1, past)))
    causal = given(Port(CAUSAL), members * tokens, tokens) if rows == 1 else None
    own = given(Port(OWN), 1, 1, past) if rows != 1 else None

    def scores_of_past(writer: Writer) -> Node:
        # XNNPACK packs keys from where they lie: a transposition before a product is none of its own.
        products = writer.call(aten.bmm.default, query, writer.call(aten.transpose.int, past_keys, 1, 2))
        if own is not None:
            products = writer.plus(products, writer.times(product, own))
        found = {product: products}
        for node in between:
            found[node] = writer.call(node.target, *(found.get(each, each) for each in node.args))
        return writer.plus(found[scores], seen)

    def mixed_with_one(writer: Writer) -> Node:
        weight = writer.call(aten.slice.Tensor, softmax, -1, 0, 1)
        mixture = writer.call(aten.bmm.default, softmax, past_values)
        return writer.plus(mixture, writer.times(weight, values))

    parts: list[Node] = []

    def mixed_of_both(writer: Writer) -> Node:
        within = writer.plus(scores, causal)
        parts.extend((scores_of_past(writer), within))
        return writer.call(MIXED_PARTS, *parts, past_values, values)

    writer = Writer(graph_module)
    if causal is None:
        writer.replace(masked, scores_of_past)
        del softmax.meta["val"]
        fill_in_values(graph_module)
        writer.replace(mixed, mixed_with_one)
    else:
        writer.replace(mixed, mixed_of_both)
        for total in totals:
            writer.replace(total, _total_of_both, *parts)
    if taken:
        return []
    output = graph.output_node()
    output.args = ((*output.args[0], keys, values),)
    return [Port(KEYS, changes=True), Port(VALUES, changes=True)]


def _total_of_both(writer: Writer, before: Node, within: Node) -> Node:
    """log(exp(a) + exp(b)), where what came before may be nothing but masked."""
    past, own = (writer.call(_TOTAL, part, [-1], True) for part in (before, within))
    return writer.plus(own, writer.call(aten.softplus.default, writer.minus(past, own)))


def _product(masked: Node) -> tuple[Any, list[Node]]:
    """The product of queries and keys that scores come from, and what is done to it on the way."""
    product: Any = masked.args[0]
    between: list[Node] = []
    while product.target is not aten.bmm.default:
        sources = [source for source in product.all_input_nodes if source.op == "call_function"]
        if len(sources) != 1:
            raise Refusal("unknown-attention", f"scores come from {product.format_node()}", remedy=_REMEDY)
        between.insert(0, product)
        (product,) = sources
    return product, between


def _keys_and_values(masked: Node) -> tuple[Node, Node]:
    """Of an attention, f32 [rows x heads, tokens, width]."""
    transposed = _product(masked)[0].args[1]
    if transposed.target is not aten.transpose.int:
        raise Refusal("unknown-attention", f"keys come from {transposed.format_node()}", remedy=_REMEDY)
    return transposed.args[0], _weighing(masked)[1].args[1]


def _weighing(masked: Node) -> tuple[Node, Node]:
    """The softmax of masked scores, and the product of its answer with the values."""
    found = [masked]
    for target in (aten.softmax.int, aten.bmm.default):
        users = [user for user in found[-1].users if user.target is not _TOTAL]
        if len(users) != 1 or users[0].target is not target:
            raise Refusal(
                "unknown-attention", f"masked scores go to {users[0].format_node()}", remedy=_REMEDY
            )
        found += users
    return found[1], found[2]


def _simplify_shapes(graph_module: GraphModule) -> None:
    """Leave out changes of shape that change nothing, in place: XNNPACK copies for each of them.

    Where a row has one token, most changes of order are such of shape.
    """
    for node in graph_module.graph.nodes:
        if node.target in _TRANSPOSITIONS and _moves_ones(node):
            node.target, node.args = aten.view.default, (node.args[0], [*node.meta["val"].shape])
        if node.target in _RESHAPES:
            source, _ = origin(node.args[0], _RESHAPES)
            if source.meta["val"].shape == node.meta["val"].shape:
                node.replace_all_uses_with(source)
            else:
                node.args = (source, *node.args[1:])
    graph_module.graph.eliminate_dead_code()


def _moves_ones(node: Node) -> bool:
    """Whether a change of order leaves that of all axes that are longer than 1."""
    shape = node.args[0].meta["val"].shape
    order = list(range(len(shape)))
    if node.target is aten.permute.default:
        order = [axis % len(shape) for axis in node.args[1]]
    else:
        first, second = node.args[1:]
        order[first], order[second] = order[second], order[first]
    kept = [axis for axis in order if shape[axis] > 1]
    return kept == sorted(kept)


def _infer_sizes(graph_module: GraphModule, marker: int) -> None:
    """Leave the one size of a shape that a call chooses to be inferred, in place: XNNPACK can do that."""
    for node in graph_module.graph.nodes:
        if node.target in _RESHAPES:
            shape = node.meta["val"].shape
            chosen = [number % marker == 0 for number in shape]
            if sum(chosen) == 1:
                sizes = [-1 if is_chosen else n for n, is_chosen in zip(shape, chosen, strict=True)]
                node.target, node.args = aten.view.default, (node.args[0], sizes)
