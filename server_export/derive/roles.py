"""Derive the block of each role from one block.

prge/formats/signatures.py defines the roles, and the inputs and outputs of their methods.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from prge.formats.signatures import (
    ALL_ROLES,
    ONES,
    PAST_ONES,
    RESIDUAL,
    ROLE_OF,
    SHIFT,
    TARGETS,
    Derivative,
    Port,
    Role,
    View,
    differentiable_ports,
    gradients,
    with_tangents,
)
from server_export.derive.backward.joint import backpropagate
from server_export.derive.backward.partition import partition
from server_export.derive.continuation import continuation, logits_head
from server_export.derive.jvp.transform import Dense, RankOne, Seed, differentiate
from server_export.ir.block import PORT, Block, port_of
from server_export.ir.core import write_core_operators
from server_export.ir.markers import BATCH, COPIES, PAST, QUERIES, TOKENS
from server_export.ir.modules import copy_graph_module
from server_export.ir.recurrences import expand
from server_export.ir.rewriting import share_equal_calls
from server_export.ir.shapes import fill_in_values
from server_export.trace.rotation import write_rotations_as_copies

# Backward passes use values that the forward pass computes too.
_SHARE_VALUES = (Derivative.BACKWARD, Derivative.SAVE, Derivative.BACKWARD_SAVED)


def derive(block: Block, roles: Collection[str], saves: bool = True) -> dict[str, Block]:
    """Return the blocks of some roles by name.

    Args:
        block: the block of a type, traced with markers; it is not modified.
        roles: roles of prge.formats.signatures.ALL_ROLES; roles that a head doesn't have are left out.
        saves: whether `backward` is accompanied by `forward_save` and `backward_saved`.

    Raises:
        Refusal: an operator has no derivative, or the attention is written in a way that isn't supported.
    """
    derived: dict[Role, Block] = {}
    for name in ALL_ROLES:
        if name in roles and ROLE_OF[name] not in derived:
            derived |= derive_together(block, ROLE_OF[name], saves)
    return {name: derived[role] for name, role in ROLE_OF.items() if role in derived}


def derive_together(block: Block, role: Role, saves: bool = True) -> dict[Role, Block]:
    """Return a block in a role, in core operators at marker sizes, and in roles derived from the same graph.

    Batches and chunks have all derivatives. For a single token, only the value is derived: the token takes
    the first slot of the past, whose size no input of a backward pass determines.
    """
    if is_head(block) and role.view is View.CHUNK:
        return {}
    assert role.view is not View.TOKEN or role.derivative is Derivative.VALUE
    view = _in_view(block, role)
    match role.derivative:
        case Derivative.VALUE:
            derived = {role: view}
        case Derivative.JVP:
            derived = {role: _jvp(view, rows=1 if role.view is View.CHUNK else BATCH)}
        case Derivative.BACKWARD if role.view is View.CHUNK:
            derived = {role: _backward(view)}
        case _:
            parts = _partitioned(view, 1 if is_head(block) or role.view is View.CHUNK else COPIES)
            backward_roles = {
                replace(role, derivative=derivative): part for derivative, part in parts.items()
            }
            derived = backward_roles if saves else {role: backward_roles[role]}
    return {each: _in_core_operators(part, each) for each, part in derived.items()}


def is_head(block: Block) -> bool:
    """Return whether a block is a vocabulary shard of a decoder's head."""
    return block.has_input(TARGETS)


def _in_view(block: Block, role: Role) -> Block:
    """Return a block in the shapes of a view, as the derivative of the role needs them."""
    is_value = role.derivative is Derivative.VALUE
    match role.view:
        case View.CHUNK:
            one_row = block.sized((COPIES, 1), (BATCH, 1))
            return continuation(one_row, rows=1, tokens=TOKENS, past=PAST, any_lora_a=is_value)
        case View.TOKEN:
            if is_head(block):
                return logits_head(block.sized((BATCH, 1), (TOKENS, 1)))
            one_token = block.sized((BATCH, 1), (TOKENS, 1))
            return continuation(one_token, rows=COPIES, tokens=1, past=PAST, any_lora_a=is_value)
    whole = block.copy()
    expand(whole.graph_module)
    if is_head(block):
        # The head gets the selected positions of all rows as one row.
        return whole.sized((COPIES, 1), (BATCH, 1))
    if role.derivative is Derivative.JVP:
        return whole.sized((COPIES, 1))
    # Every row has its own copy of the adapter, so that it gets its own gradient.
    return whole if is_value else whole.sized((BATCH, 1))


def _jvp(block: Block, rows: int) -> Block:
    """Return a block with the tangents of everything that depends on the adapter.

    `rows` rows share an adapter copy and have their own directions.
    """
    seeds: dict[str, Seed] = {
        str(node.target): RankOne(rows) if port.is_adapter else Dense()
        for port, node in block.inputs.items()
        if port.is_differentiable
    }
    ones = {ONES: TOKENS, PAST_ONES: PAST}
    graph_module = differentiate(copy_graph_module(block.graph_module), seeds, QUERIES, ones)
    return replace(block, graph_module=graph_module, outputs=with_tangents(block.outputs))


def _backward(block: Block, with_outputs: bool = False) -> Block:
    """Return the block of a backward pass with recomputation, optionally with the outputs first."""
    names = {port: str(node.target) for port, node in block.inputs.items()}
    grad_outputs = {port.gradient.name.replace(".", "_"): port.gradient for port in block.outputs}
    graph_module = backpropagate(
        block.graph_module,
        [names[port] for port in differentiable_ports(names)],
        [name for port, name in names.items() if port.is_adapter],
        TOKENS,
        [*grad_outputs],
        with_outputs,
    )
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if port_of(node) is None:
            node.meta[PORT] = grad_outputs.get(str(node.target), Port(ONES))
    outputs = (*block.outputs, *gradients(names)) if with_outputs else gradients(names)
    return replace(block, graph_module=graph_module, outputs=outputs)


def _partitioned(block: Block, rows: int) -> dict[Derivative, Block]:
    """Return a block's backward pass, and the pair of forward and backward pass that share residuals."""
    joint, outputs = _backward(block, with_outputs=True), block.outputs
    # The forward pass of a head gets a shift from the shards so far, its backward pass one from all shards.
    parts = partition(joint.graph_module, rows, TOKENS, [SHIFT], len(outputs))
    residual_count = len(parts.save.graph.output_node().args[0]) - len(outputs)
    residuals = (Port(RESIDUAL, number) for number in range(residual_count))
    gradients_out = joint.outputs[len(outputs) :]
    return {
        Derivative.BACKWARD: Block(parts.backward, gradients_out),
        Derivative.SAVE: Block(parts.save, (outputs[0], *residuals, *outputs[1:])),
        Derivative.BACKWARD_SAVED: Block(parts.backward_saved, gradients_out),
    }


def _in_core_operators(block: Block, role: Role) -> Block:
    graph_module = block.graph_module
    fill_in_values(graph_module)
    write_core_operators(graph_module)
    if role.view is not View.TOKEN:
        write_rotations_as_copies(graph_module)
    if role.derivative in _SHARE_VALUES:
        share_equal_calls(graph_module.graph)
    # A new instance, because cached inputs may have been removed.
    return replace(block)
