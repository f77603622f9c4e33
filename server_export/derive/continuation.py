"""Let a block continue a sequence: keys, values and recurrent states of earlier tokens become inputs.

    softmax([q k_past + past_mask, q k + causal_mask]) [v_past, v]        one attention over both parts

A single token takes the first slot of the past, which holds zeros, so nothing is copied:

    p = softmax(q k_past + q k own_mask + past_mask), own_mask = [1, 0, 0, ...];     p v_past + p_0 v

If the attention has sinks, the logarithm of the softmax's sum covers both parts as well.

A block returns the keys and values of its tokens after the hidden states, unless another block computes them,
and the caller stores them. The same holds for the states of recurrences and convolutions, which replace the
earlier states.
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
from prge.formats.signatures import (
    CAUSAL_MASK,
    KEYS,
    LOGITS,
    LORA_A,
    OWN_MASK,
    PAST_KEYS,
    PAST_MASK,
    PAST_VALUES,
    RECURRENT_STATE,
    SHARED_IN,
    TABLE,
    VALUES,
    Port,
)
from server_export.ir.block import PORT, Block, is_input, new_input, port_of
from server_export.ir.mixed_parts import MIXED_PARTS
from server_export.ir.modules import copy_graph_module, make_graph_module
from server_export.ir.operators import Category, members
from server_export.ir.recurrences import expand, recurrent_state_shapes
from server_export.ir.shapes import fill_in_values, resized
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from server_export.ir.traversal import origin, readers
from server_export.ir.writer import GraphWriter

aten = torch.ops.aten

_RESHAPES = members(Category.RESHAPE)
_TRANSPOSITIONS = (aten.transpose.int, aten.permute.default)
_LAYOUTS = (*_RESHAPES, *_TRANSPOSITIONS)
# Sinks are compared with this value.
_LOGSUMEXP = aten.logsumexp.default
_REMEDY = (
    "Leave prefill and decode out of --roles, use rows of at most 512 tokens, and please report the name of "
    "the model."
)


def continuation(block: Block, *, rows: int, tokens: int, past: int, any_lora_a: bool) -> Block:
    """Return a block that continues sequences: any number of tokens of one, or one token of each.

    Args:
        block: an embedding or a block after it; its nodes have `meta["val"]`, and constants are shared.
        rows, tokens: the sizes of the block, one of them 1 and the other a marker.
        past: the marker of the earlier tokens.
        any_lora_a: whether a frozen `lora_a` becomes an input, so that every row can have its own adapter.

    Returns:
        A block that also takes these `lora_a` [rows, rank, in]; `past_keys` and `past_values` f32 [rows x
        heads, past, width]; and `past_mask`, which is added to the scores of the past: f32 [members x tokens,
        past] for one row, [rows x heads, 1, past] for one token, with `own_mask` f32 [1, 1, past]. A causal
        mask becomes the input `causal_mask` [members x tokens, tokens] instead of a table; other tables have
        as many rows as the hidden states. The block returns the keys and values of its tokens after the
        hidden states, in the layout of the past, unless they come from another block. Recurrent states f32
        [rows, ...] in the shapes of `recurrent_state_shapes` come before keys and values.

    Raises:
        Refusal: the attention is written in a way that isn't supported.
    """
    graph_module, result = block.graph_module, copy_graph_module(block.graph_module)
    outputs = [*block.outputs, *_add_recurrent_states(result, rows)]
    _set_table_rows(result, rows)
    adapter = [] if block.has_input(LORA_A) else [port for port in block.inputs if port.is_adapter]
    for port in adapter if any_lora_a else []:
        _add_lora_a(result, port, rows)
    for table, masked in _attentions(result):
        outputs += _attend(result, table, masked, rows, tokens, past)
    _simplify_shapes(result)
    _infer_sizes(result, max(rows, tokens))
    for node in result.graph.find_nodes(op="placeholder"):
        if not node.users and _is_causal(node):
            result.graph.erase_node(node)
    output, original_output = (
        graph.graph.output_node().args[0][0].meta["val"] for graph in (result, graph_module)
    )
    if [*output.shape] != [rows, *original_output.shape[1:]]:
        raise Refusal(
            "unknown-positions",
            f"Hidden states of {rows} rows get the shape {[*output.shape]}, because the model computes its "
            "positions in a way that prge does not recognize.",
            remedy=_REMEDY,
        )
    result.recompile()
    return replace(block, graph_module=result, outputs=tuple(outputs))


def shared_keys_and_values(one_row: Block) -> tuple[int, ...]:
    """Return the indices of the shared inputs that are the keys and the values of a block's attention.

    The result is empty if the block computes them itself. They have the layout [1, tokens, heads x width].

    Raises:
        Refusal: they have another layout, or only one of them is a shared input.
    """
    for _, masked in _attentions(one_row.graph_module):
        sources = [origin(node, _LAYOUTS) for node in _keys_and_values(masked)]
        are_shared = [is_input(source[0], SHARED_IN) for source in sources]
        if any(are_shared):
            if not all(are_shared) or not all(_is_in_order(*source) for source in sources):
                raise Refusal(
                    "unknown-shared-keys",
                    "An attention reads another block's keys and values in a layout that is not supported.",
                    remedy=_REMEDY,
                )
            return tuple(node.meta[PORT].index for node, _ in sources)
    return ()


def _attentions(graph_module: GraphModule) -> list[tuple[Node, Node]]:
    """Return pairs of a causal mask and the scores that it is added to."""
    attentions = [
        (table, user)
        for table in graph_module.graph.find_nodes(op="placeholder")
        if _is_causal(table)
        for shaped in table.users
        for user in shaped.users
    ]
    if len(attentions) > 1:
        raise Refusal(
            "several-attentions",
            f"A block has {len(attentions)} attentions, but prge supports one.",
            remedy=_REMEDY,
        )
    return attentions


def _is_in_order(shared: Node, steps: Sequence[Node]) -> bool:
    """Return whether these steps turn [1, tokens, heads x width] into [heads, tokens, width]."""
    _, tokens, whole = shared.meta["val"].shape
    heads, _, width = steps[-1].meta["val"].shape if steps else (0, 0, 0)
    if heads * width != whole:
        return False
    indices = result = torch.arange(2 * whole).reshape(1, 2, whole)
    for step in steps:
        target: Any = step.target
        result = target(result, *map_aggregate(step.args[1:], partial(resized, marker=tokens, size=2)))
    return torch.equal(result, indices.reshape(2, heads, width).transpose(0, 1))


def logits_head(head: Block) -> Block:
    """Return a vocabulary shard of the head that returns the logits of all its tokens."""
    result = copy_graph_module(head.graph_module)
    output = result.graph.output_node()
    (parts,) = output.args[0]
    assert parts.target is SOFTMAX_PARTS
    output.args = ((parts.args[0],),)
    result.graph.eliminate_dead_code()
    for node in result.graph.find_nodes(op="placeholder"):
        if not node.users:
            result.graph.erase_node(node)
    return replace(head, graph_module=make_graph_module(result, result.graph), outputs=(Port(LOGITS),))


def _add_recurrent_states(graph_module: GraphModule, rows: int) -> list[Port]:
    """Make recurrent states inputs and outputs of the graph, in place; return the ports of the outputs."""
    shapes = recurrent_state_shapes(graph_module, rows)
    ports = [Port(RECURRENT_STATE, number, is_differentiable=True) for number in range(len(shapes))]
    state_inputs = {
        node: _add_input(graph_module, port, *shape)
        for port, (node, shape) in zip(ports, shapes.items(), strict=True)
    }
    output = graph_module.graph.output_node()
    output.args = ((*output.args[0], *expand(graph_module, state_inputs.get)),)
    return ports


def _is_causal(node: Node) -> bool:
    """Return whether a placeholder is a mask f32 [members, tokens, tokens]: a square table that is added."""
    shape = node.meta["val"].shape
    is_table = is_input(node, TABLE) and node.meta["val"].dtype == torch.float32
    return (
        is_table
        and shape[1] == shape[2]
        and all(user.target is aten.add.Tensor for user in readers(node, _RESHAPES))
    )


def _set_table_rows(graph_module: GraphModule, rows: int) -> None:
    """Give tables one row per sequence, in place."""
    if rows == 1:
        return
    with_rows = set[Node]()
    for node in graph_module.graph.nodes:
        if is_input(node, TABLE) and not _is_causal(node):
            value = node.meta["val"]
            node.meta["val"] = torch.empty(rows, *value.shape[1:], dtype=value.dtype, device="meta")
            with_rows.add(node)
        elif node.op == "call_function" and with_rows.intersection(node.all_input_nodes):
            if node.target in (*_RESHAPES, aten.expand.default) and node.args[1][0] == 1:
                node.args = (node.args[0], [rows, *node.args[1][1:]])
            before = node.meta.pop("val").shape
            fill_in_values(graph_module)
            if node.meta["val"].shape != before:
                with_rows.add(node)


def _add_lora_a(graph_module: GraphModule, port: Port, rows: int) -> None:
    """Make the `lora_a` [rows, rank, in] that precedes a `lora_b` an input, in place."""
    name = port.name
    (lora_b,) = (node for node in graph_module.graph.find_nodes(op="placeholder") if port_of(node) == port)
    product, *others = lora_b.users
    if others:
        raise Refusal(
            "layer-used-twice",
            f"{name} belongs to a layer that a block calls more than once.",
            remedy=_REMEDY,
        )
    layer, _ = origin(product.args[0], _RESHAPES)
    if layer.target is not aten.linear.default:
        raise Refusal(
            "unknown-adapted-layer",
            f"The input of {name} comes from {layer.format_node()}, which is not a linear layer.",
            remedy=_REMEDY,
        )
    source, matrix = layer.args
    rank, width = matrix.meta["val"].shape
    lora_a = _add_input(graph_module, replace(port, value=LORA_A), rows, rank, width)

    def factor(writer: GraphWriter) -> Node:
        states = writer.reshape(source, [rows, -1, width])
        product = writer.call(aten.bmm.default, states, writer.call(aten.transpose.int, lora_a, 1, 2))
        return writer.reshape(product, layer.meta["val"].shape)

    GraphWriter(graph_module).replace(layer, factor)


def _add_input(graph_module: GraphModule, port: Port, *shape: int) -> Node:
    """Add a placeholder after the others."""
    graph = graph_module.graph
    with graph.inserting_after([*graph.find_nodes(op="placeholder")][-1]):
        return new_input(graph, port, torch.empty(shape, device="meta"))


def _attend(
    graph_module: GraphModule, table: Node, masked: Node, rows: int, tokens: int, past: int
) -> list[Port]:
    """Rewrite one attention, whose masked scores are `masked`, in place.

    Returns:
        The ports of keys and values, which become outputs; none if they come from another block.
    """
    graph = graph_module.graph
    scores: Any = masked.args[0]
    product, between = _scores_product(masked)
    softmax, mixed = _softmax_and_mix(masked)
    totals = [user for user in masked.users if user.target is _LOGSUMEXP]
    query = product.args[0]
    keys, values = _keys_and_values(masked)
    heads, _, width = keys.meta["val"].shape
    value_width = values.meta["val"].shape[-1]
    group_size = table.meta["val"].shape[0]
    add_input = partial(_add_input, graph_module)
    shared_inputs = [
        source
        for source, _ in (origin(node, _LAYOUTS) for node in (keys, values))
        if is_input(source, SHARED_IN)
    ]
    changes_with_adapter = all(source.meta[PORT].is_differentiable for source in shared_inputs)
    past_keys = add_input(Port(PAST_KEYS, is_differentiable=changes_with_adapter), heads, past, width)
    past_values = add_input(
        Port(PAST_VALUES, is_differentiable=changes_with_adapter), heads, past, value_width
    )
    past_mask = add_input(Port(PAST_MASK), *((group_size * tokens, past) if rows == 1 else (heads, 1, past)))
    causal_input = add_input(Port(CAUSAL_MASK), group_size * tokens, tokens) if rows == 1 else None
    own_mask = add_input(Port(OWN_MASK), 1, 1, past) if rows != 1 else None

    def scores_of_past(writer: GraphWriter) -> Node:
        # XNNPACK packs keys from their layout, so a transposition before a product costs nothing.
        products = writer.call(aten.bmm.default, query, writer.call(aten.transpose.int, past_keys, 1, 2))
        if own_mask is not None:
            products = writer.plus(products, writer.times(product, own_mask))
        replacements = {product: products}
        for node in between:
            replacements[node] = writer.call(
                node.target, *(replacements.get(each, each) for each in node.args)
            )
        return writer.plus(replacements[scores], past_mask)

    def mixed_with_one(writer: GraphWriter) -> Node:
        weight = writer.call(aten.slice.Tensor, softmax, -1, 0, 1)
        mixed_past = writer.call(aten.bmm.default, softmax, past_values)
        return writer.plus(mixed_past, writer.times(weight, values))

    parts: list[Node] = []

    def mixed_of_both(writer: GraphWriter) -> Node:
        within = writer.plus(scores, causal_input)
        parts.extend((scores_of_past(writer), within))
        return writer.call(MIXED_PARTS, *parts, past_values, values)

    writer = GraphWriter(graph_module)
    if causal_input is None:
        writer.replace(masked, scores_of_past)
        del softmax.meta["val"]
        fill_in_values(graph_module)
        writer.replace(mixed, mixed_with_one)
    else:
        writer.replace(mixed, mixed_of_both)
        for total in totals:
            writer.replace(total, _logsumexp_of_both, *parts)
    if shared_inputs:
        return []
    output = graph.output_node()
    output.args = ((*output.args[0], keys, values),)
    return [Port(KEYS, is_differentiable=True), Port(VALUES, is_differentiable=True)]


def _logsumexp_of_both(writer: GraphWriter, before: Node, within: Node) -> Node:
    """Return log(exp(a) + exp(b)), which is exact even if all of the past is masked."""
    past, own = (writer.call(_LOGSUMEXP, part, [-1], True) for part in (before, within))
    return writer.plus(own, writer.call(aten.softplus.default, writer.minus(past, own)))


def _scores_product(masked: Node) -> tuple[Any, list[Node]]:
    """Return the product of queries and keys that computes the scores, and the operators between both."""
    product: Any = masked.args[0]
    between: list[Node] = []
    while product.target is not aten.bmm.default:
        sources = [source for source in product.all_input_nodes if source.op == "call_function"]
        if len(sources) != 1:
            raise Refusal(
                "unknown-attention",
                f"Attention scores come from {product.format_node()}, which prge does not recognize.",
                remedy=_REMEDY,
            )
        between.insert(0, product)
        (product,) = sources
    return product, between


def _keys_and_values(masked: Node) -> tuple[Node, Node]:
    """Return the keys and values of an attention, f32 [rows x heads, tokens, width]."""
    transposed = _scores_product(masked)[0].args[1]
    if transposed.target is not aten.transpose.int:
        raise Refusal(
            "unknown-attention",
            f"The keys come from {transposed.format_node()}, which is not a transposition.",
            remedy=_REMEDY,
        )
    return transposed.args[0], _softmax_and_mix(masked)[1].args[1]


def _softmax_and_mix(masked: Node) -> tuple[Node, Node]:
    """Return the softmax of masked scores, and its product with the values."""
    chain = [masked]
    for target in (aten.softmax.int, aten.bmm.default):
        users = [user for user in chain[-1].users if user.target is not _LOGSUMEXP]
        if len(users) != 1 or users[0].target is not target:
            raise Refusal(
                "unknown-attention",
                f"Masked scores go to {users[0].format_node()}, which prge does not recognize.",
                remedy=_REMEDY,
            )
        chain += users
    return chain[1], chain[2]


def _simplify_shapes(graph_module: GraphModule) -> None:
    """Remove changes of shape that change nothing, in place, because XNNPACK copies for each of them.

    If a row has a single token, most permutations are reshapes.
    """
    for node in graph_module.graph.nodes:
        if node.target in _TRANSPOSITIONS and _is_reshape(node):
            node.target, node.args = aten.view.default, (node.args[0], [*node.meta["val"].shape])
        if node.target in _RESHAPES:
            source, _ = origin(node.args[0], _RESHAPES)
            if source.meta["val"].shape == node.meta["val"].shape:
                node.replace_all_uses_with(source)
            else:
                node.args = (source, *node.args[1:])
    graph_module.graph.eliminate_dead_code()


def _is_reshape(node: Node) -> bool:
    """Return whether a permutation keeps the order of all dimensions that are longer than 1."""
    shape = node.args[0].meta["val"].shape
    order = list(range(len(shape)))
    if node.target is aten.permute.default:
        order = [axis % len(shape) for axis in node.args[1]]
    else:
        first, second = node.args[1:]
        order[first], order[second] = order[second], order[first]
    long_axes = [axis for axis in order if shape[axis] > 1]
    return long_axes == sorted(long_axes)


def _infer_sizes(graph_module: GraphModule, marker: int) -> None:
    """Let reshapes infer the one size that a call determines, in place, which XNNPACK supports."""
    for node in graph_module.graph.nodes:
        if node.target in _RESHAPES:
            shape = node.meta["val"].shape
            chosen = [number % marker == 0 for number in shape]
            if sum(chosen) == 1:
                sizes = [-1 if is_chosen else n for n, is_chosen in zip(shape, chosen, strict=True)]
                node.target, node.args = aten.view.default, (node.args[0], sizes)
