"""What a block's program computes: a block for each role, from one block.

prge/files/signatures.py says what a role is, and what its method takes and answers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from prge.files.signatures import (
    ALL_ROLES,
    ONES,
    PAST_ONES,
    ROLE_OF,
    SAVED,
    SHIFT,
    TARGETS,
    Derivative,
    Port,
    Role,
    View,
    changing,
    gradients,
    with_tangents,
)
from server_export.derive.backprop.joint import backpropagate
from server_export.derive.backprop.partition import partition
from server_export.derive.continuing import continued, logits
from server_export.derive.tangent.transform import Dense, RankOne, Seed, differentiate
from server_export.ir.block import PORT, Block, port_of
from server_export.ir.core import write_core_operators
from server_export.ir.markers import BATCH, COPIES, PAST, QUERIES, TOKENS
from server_export.ir.modules import copied
from server_export.ir.recurrences import expand
from server_export.ir.rewriting import share_equal_calls
from server_export.ir.shapes import fill_in_values

# Gradients are made of values that the forward pass has.
_SHARE_VALUES = (Derivative.BACKWARD, Derivative.SAVE, Derivative.BACKWARD_SAVED)


def derive(block: Block, roles: Collection[str], saves: bool = True) -> dict[str, Block]:
    """The blocks of some roles by their names; beside `back` others that save for it.

    Args:
        block: a block's type, traced with markers. Not changed.
        roles: of prge.files.signatures.ALL_ROLES; those that a head lacks are left out.
        saves: whether `back` brings `save` and `back_saved` along.

    Raises:
        Refusal: an operator has no derivative, or an attention is written in a way that isn't known here.
    """
    derived: dict[Role, Block] = {}
    for name in ALL_ROLES:
        if name in roles and ROLE_OF[name] not in derived:
            derived |= derive_together(block, ROLE_OF[name], saves)
    return {name: derived[role] for name, role in ROLE_OF.items() if role in derived}


def derive_together(block: Block, role: Role, saves: bool = True) -> dict[Role, Block]:
    """A block in a role, in core operators and marker sizes, and those that are made of the same graph.

    Batches and chunks go with any derivative. One token goes with its value alone: it takes the first place
    of the past, which no size of a call tells on the way back.
    """
    if is_head(block) and role.view is View.CHUNK:
        return {}
    assert role.view is not View.TOKEN or role.derivative is Derivative.VALUE
    view = _viewed(block, role)
    match role.derivative:
        case Derivative.VALUE:
            derived = {role: view}
        case Derivative.JVP:
            derived = {role: _jvp(view, rows=1 if role.view is View.CHUNK else BATCH)}
        case Derivative.BACKWARD if role.view is View.CHUNK:
            derived = {role: _backward(view)}
        case _:
            parts = _in_parts(view, 1 if is_head(block) or role.view is View.CHUNK else COPIES)
            found = {replace(role, derivative=derivative): part for derivative, part in parts.items()}
            derived = found if saves else {role: found[role]}
    return {each: _in_core_operators(part, each.derivative) for each, part in derived.items()}


def is_head(block: Block) -> bool:
    """Whether a block is a shard of a decoder's head."""
    return block.has(TARGETS)


def _viewed(block: Block, role: Role) -> Block:
    """A block's value in the shapes of a view, as a derivative of it needs them."""
    is_value = role.derivative is Derivative.VALUE
    match role.view:
        case View.CHUNK:
            one_row = block.sized((COPIES, 1), (BATCH, 1))
            return continued(one_row, rows=1, tokens=TOKENS, past=PAST, any_lora_a=is_value)
        case View.TOKEN:
            if is_head(block):
                return logits(block.sized((BATCH, 1), (TOKENS, 1)))
            one_token = block.sized((BATCH, 1), (TOKENS, 1))
            return continued(one_token, rows=COPIES, tokens=1, past=PAST, any_lora_a=is_value)
    whole = block.copied()
    expand(whole.graph_module)
    if is_head(block):
        # What calls ask at all positions of all rows lies in one row.
        return whole.sized((COPIES, 1), (BATCH, 1))
    if role.derivative is Derivative.JVP:
        return whole.sized((COPIES, 1))
    # Every row has a copy of the adapter, so that it has a gradient of its own.
    return whole if is_value else whole.sized((BATCH, 1))


def _jvp(block: Block, rows: int) -> Block:
    """A block with the tangents of what adapters change; `rows` share an adapter and have own directions."""
    seeds: dict[str, Seed] = {
        str(node.target): RankOne(rows) if port.is_adapter else Dense()
        for port, node in block.inputs.items()
        if port.changes
    }
    ones = {ONES: TOKENS, PAST_ONES: PAST}
    graph_module = differentiate(copied(block.graph_module), seeds, QUERIES, ones)
    return replace(block, graph_module=graph_module, outputs=with_tangents(block.outputs))


def _backward(block: Block, with_answer: bool = False) -> Block:
    """A block that goes through another one and back; that one's outputs may come before the gradients."""
    names = {port: str(node.target) for port, node in block.inputs.items()}
    given = {port.gradient.name.replace(".", "_"): port.gradient for port in block.outputs}
    graph_module = backpropagate(
        block.graph_module,
        [names[port] for port in changing(names)],
        [name for port, name in names.items() if port.is_adapter],
        TOKENS,
        [*given],
        with_answer,
    )
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if port_of(node) is None:
            node.meta[PORT] = given.get(str(node.target), Port(ONES))
    outputs = (*block.outputs, *gradients(names)) if with_answer else gradients(names)
    return replace(block, graph_module=graph_module, outputs=outputs)


def _in_parts(block: Block, rows: int) -> dict[Derivative, Block]:
    """A block's backward pass, and the forward pass whose residuals save it most of the work."""
    joint, answers = _backward(block, with_answer=True), block.outputs
    # A head is read with a shift by what is known of the words so far, and goes back with one by all.
    parts = partition(joint.graph_module, rows, TOKENS, [SHIFT], len(answers))
    saved = len(parts.save.graph.output_node().args[0]) - len(answers)
    residuals = (Port(SAVED, number) for number in range(saved))
    of_gradients = joint.outputs[len(answers) :]
    return {
        Derivative.BACKWARD: Block(parts.back, of_gradients),
        Derivative.SAVE: Block(parts.save, (answers[0], *residuals, *answers[1:])),
        Derivative.BACKWARD_SAVED: Block(parts.back_saved, of_gradients),
    }


def _in_core_operators(block: Block, derivative: Derivative) -> Block:
    graph_module = block.graph_module
    fill_in_values(graph_module)
    write_core_operators(graph_module)
    if derivative in _SHARE_VALUES:
        share_equal_calls(graph_module.graph)
    # Inputs that nothing reads any longer are gone.
    return replace(block)
