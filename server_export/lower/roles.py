"""What a block's program computes: a method for each role, from one graph of the block.

prge/files/signatures.py has what these take and answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from prge.files.chain import (
    PAST_KEYS,
    PAST_ONES,
    PAST_VALUES,
    SLOPE_KEYS,
    SLOPE_VALUES,
    TABLE,
    Bounds,
    Interface,
)
from prge.files.signatures import (
    BACK,
    BACK_SAVED,
    CARRIED,
    DECODE,
    IN_PIECES,
    OF_BACK,
    PREFILL,
    PREFILL_BACK,
    PREFILL_TANGENT,
    SAVE,
    SAVED,
    STACK,
    TANGENT,
    Sharing,
    of_block,
    of_head,
)
from prge.model_spec import Matrix
from server_export.derive.backprop.joint import SLOPE, backpropagate
from server_export.derive.backprop.layers import transposed_names, with_transposed
from server_export.derive.backprop.partition import SAVED_PREFIX, partition
from server_export.derive.continuing import CARRIED_PREFIX, FROZEN_PREFIX, continued, logits, taken_past
from server_export.derive.tangent.transform import ONES, Dense, RankOne, differentiate
from server_export.ir.core import write_core_operators
from server_export.ir.markers import BATCH, COPIES, PAST, QUERIES, TOKENS
from server_export.ir.modules import attribute, copied
from server_export.ir.recurrences import expand
from server_export.ir.rewriting import share_equal_calls
from server_export.ir.shapes import fill_in_values, with_size
from server_export.lower.cache import ProgramCache
from server_export.lower.kind import LoweredKind, lower_kind
from server_export.lower.sizes import Size, dynamic_program, tensor_specs
from server_export.trace.cutting import STATE, TABLE_PREFIX, TAKEN_PREFIX

# What names of shared values, and of what is carried, begin with, in graphs.
_SHARED = ("taken", "d_taken", "slope_given", "carried", "d_carried", "slope_carried")


@dataclass(frozen=True)
class LoweredRoles:
    """The program of a kind, what its methods take and give, its constants that no block has its own of, the
    programs as they were before they were lowered, and what it has to do with shared values."""

    kind: LoweredKind
    methods: Mapping[str, Interface]
    constants: Mapping[str, torch.Tensor]
    programs: Mapping[str, ExportedProgram]
    sharing: Sharing

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the weights file of a block, from its kind's frozen tensors."""
        self.kind.weights.write(path, self.with_constants(tensors))

    def with_constants(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All constants of a block's programs, from its kind's frozen tensors."""
        names = {name for program in self.programs.values() for name in program.state_dict}
        names |= {name for program in self.programs.values() for name in program.constants}
        return {**with_transposed(tensors, names), **self.constants}


def lower_roles(
    graph_module: GraphModule,
    adapter: Mapping[str, Matrix],
    stored: Collection[str],
    roles: Collection[str],
    bounds: Bounds,
    is_head: bool,
    cache: ProgramCache | None = None,
    done: Callable[[float], object] = lambda share: None,
    sharing: Sharing | None = None,
    saves: bool = True,
) -> LoweredRoles:
    """Lower a kind of block for some roles.

    Args:
        graph_module: of the kind, traced with markers.
        adapter: the trained matrices by its placeholders of them, in order, as the program names them.
        stored: names of its constants that differ from block to block.
        roles: of ROLES.
        bounds: sizes of one call.
        is_head: whether it is a decoder's head.
        cache: of programs; None: lower in any case.
        done: is told which further share of this is done.
        sharing: values that it takes from other blocks or gives to them.
        saves: whether roles beside `back` save what it needs.

    Raises:
        BundleError: an operator has no derivative, or ExecuTorch refuses a method.
    """
    sharing = sharing or Sharing()
    graphs = role_graphs(graph_module, adapter, roles, is_head, sharing, saves)
    methods = {role: _interface(graph, role, adapter, is_head, sharing) for role, graph in graphs.items()}
    shared = {*stored, *(name for weight in stored for name in transposed_names(weight))}
    constants: dict[str, torch.Tensor] = {}
    for role, graph in graphs.items():
        graphs[role] = _with_own_constants(graph, role, shared)
        constants |= {
            name: attribute(graphs[role], name) for name in _constants(graphs[role]) if name not in shared
        }
    sizes = {role: sizes_of(role, bounds, is_head) for role in graphs}
    programs = {}
    for role, graph in graphs.items():
        programs[role] = dynamic_program(graph, sizes[role])
        inputs, outputs = tensor_specs(programs[role], sizes[role].values())
        methods[role] = replace(methods[role], input_specs=inputs, output_specs=outputs)
        done(0.5 / len(graphs))
    every = {size for of_role in sizes.values() for size in of_role.values()}
    lower = cache.lower if cache else lower_kind
    lowered = lower(programs, every, {DECODE})
    done(0.5)
    return LoweredRoles(lowered, methods, constants, programs, sharing)


def role_graphs(
    graph_module: GraphModule,
    adapter: Mapping[str, Matrix],
    roles: Collection[str],
    is_head: bool,
    sharing: Sharing | None = None,
    saves: bool = True,
) -> dict[str, GraphModule]:
    """The graphs of a kind's roles, in marker sizes; beside `back` others that save what it needs."""
    sharing = sharing or Sharing()
    changing = [f"{TAKEN_PREFIX}{number}" for number, changes in enumerate(sharing.takes) if changes]
    slopes = [SLOPE, *(f"{SLOPE}_given_{number}" for number in range(sharing.gives))]
    frozen = [] if any(m.letter == "a" for m in adapter.values()) else list(adapter)
    whole, graph_module = graph_module, copied(graph_module)
    expand(graph_module)
    one_copy = with_size(graph_module, COPIES, 1)
    if is_head:
        graph_module = one_copy = with_size(one_copy, BATCH, 1)
    graphs = {}
    if STACK in roles:
        graphs[STACK] = graph_module
    if TANGENT in roles:
        seeds: dict[str, Any] = dict.fromkeys([STATE, *changing], Dense())
        seeds |= dict.fromkeys(adapter, RankOne(BATCH))
        graphs[TANGENT] = differentiate(copied(one_copy), seeds, QUERIES, {ONES: TOKENS})
    if BACK in roles:
        # Every row has a copy of the adapter, so that it has a gradient of its own.
        each_row = one_copy if is_head else with_size(graph_module, BATCH, 1)
        wanted = [STATE, *changing, *adapter]
        joint = backpropagate(each_row, wanted, list(adapter), TOKENS, slopes, with_answer=True)
        # A head is read with a shift by what is known of the words so far, and goes back with one by all.
        parts = partition(joint, 1 if is_head else COPIES, TOKENS, ["shift"], len(slopes))
        graphs[BACK] = parts.back
        if saves:
            graphs |= {SAVE: parts.save, BACK_SAVED: parts.back_saved}
    one_row = with_size(with_size(whole, COPIES, 1), BATCH, 1)
    if PREFILL in roles and not is_head:
        graphs[PREFILL] = continued(one_row, frozen, 1, TOKENS, PAST)
    if PREFILL_TANGENT in roles and not is_head:
        graphs[PREFILL_TANGENT] = _tangents_of_a_piece(one_row, adapter, changing)
    if PREFILL_BACK in roles and not is_head:
        graphs[PREFILL_BACK] = _back_of_a_piece(one_row, list(adapter), changing, slopes)
    if DECODE in roles:
        one_token = with_size(with_size(whole, BATCH, 1), TOKENS, 1)
        graphs[DECODE] = logits(one_token) if is_head else continued(one_token, frozen, COPIES, 1, PAST)
    graphs = {role: copied(graph) for role, graph in graphs.items()}
    for role, graph in graphs.items():
        fill_in_values(graph)
        write_core_operators(graph)
        if role in (BACK, *OF_BACK):
            # Slopes are made of values that the forward pass has.
            share_equal_calls(graph.graph)
    return graphs


def sharing_of(
    graph_module: GraphModule, takes: Sequence[bool], gives: int, roles: Collection[str]
) -> Sharing:
    """What a kind of block has to do with shared values, of which it takes some that adapters change.

    Raises:
        BundleError: its attention reads some of them in a way that isn't known here.
    """
    past: tuple[int, ...] = ()
    if takes and {PREFILL, DECODE}.intersection(roles):
        past = taken_past(with_size(with_size(graph_module, COPIES, 1), BATCH, 1))
    return Sharing(tuple(takes), gives, past)


def _tangents_of_a_piece(
    one_row: GraphModule, adapter: Collection[str], changing: Collection[str]
) -> GraphModule:
    piece, before = _piece(one_row, changing)
    seeds: dict[str, Any] = dict.fromkeys([STATE, *changing, *before], Dense())
    seeds |= dict.fromkeys(adapter, RankOne(1))
    return differentiate(copied(piece), seeds, QUERIES, {ONES: TOKENS, PAST_ONES: PAST})


def _back_of_a_piece(
    one_row: GraphModule, adapter: list[str], changing: Sequence[str], slopes: Sequence[str]
) -> GraphModule:
    piece, before = _piece(one_row, changing)
    slopes = [*slopes, *(f"slope_{name}" for name in before if name.startswith(CARRIED_PREFIX))]
    if len(piece.graph.output_node().args[0]) > len(slopes):
        slopes = [*slopes, SLOPE_KEYS, SLOPE_VALUES]
    return backpropagate(piece, [STATE, *changing, *before, *adapter], adapter, TOKENS, slopes)


def _piece(one_row: GraphModule, changing: Collection[str]) -> tuple[GraphModule, list[str]]:
    """The graph of a piece of a row, and its inputs of what came before: what recurrences carry, in the order
    of its answers, and keys and values if an adapter changes them."""
    piece = continued(one_row, [], 1, TOKENS, PAST)
    names = [str(node.target) for node in piece.graph.find_nodes(op="placeholder")]
    taken = {f"{TAKEN_PREFIX}{number}" for number in taken_past(one_row)}
    past = [name for name in (PAST_KEYS, PAST_VALUES) if name in names and taken <= {*changing}]
    return piece, [*(name for name in names if name.startswith(CARRIED_PREFIX)), *past]


def sizes_of(role: str, bounds: Bounds, is_head: bool) -> dict[str, Size]:
    """The sizes that a call of a kind's method chooses."""
    if role == DECODE:
        return {
            "copies": Size(COPIES, 7, 1, bounds.sequences),
            "past": Size(PAST, 13, 2, 1 + bounds.context),
        }
    if role in IN_PIECES.values():
        return {
            "tokens": Size(TOKENS, 5, 2, bounds.piece),
            "past": Size(PAST, 13, 2, 1 + bounds.context, after=TOKENS),
            "queries": Size(QUERIES, 4, 1, bounds.queries),
        }
    if is_head:
        return {"tokens": Size(TOKENS, 5, 2, bounds.states), "queries": Size(QUERIES, 4, 1, bounds.queries)}
    if role in (BACK, *OF_BACK):
        return {"copies": Size(COPIES, 2, 1, bounds.batch), "tokens": Size(TOKENS, 5, 2, bounds.piece)}
    return {
        "copies": Size(COPIES, 3, 1, bounds.copies),
        "batch": Size(BATCH, 2, 1, bounds.batch),
        "tokens": Size(TOKENS, 5, 2, bounds.piece),
        "queries": Size(QUERIES, 4, 1, bounds.queries),
    }


def _interface(
    graph: GraphModule, role: str, adapter: Mapping[str, Matrix], is_head: bool, sharing: Sharing
) -> Interface:
    given = {name: matrix.name for name, matrix in adapter.items()}
    given |= {f"u_{name}": matrix.u for name, matrix in adapter.items()}
    given |= {f"v_{name}": matrix.v for name, matrix in adapter.items()}
    given |= {FROZEN_PREFIX + name: f"lora_a.{matrix.of}" for name, matrix in adapter.items()}

    def name_of(node: Node) -> str:
        name = str(node.target)
        if name in given:
            return given[name]
        if name.startswith(TABLE_PREFIX):
            return TABLE + name.removeprefix(TABLE_PREFIX)
        if name.startswith(SAVED_PREFIX):
            return f"{SAVED}.{name.removeprefix(SAVED_PREFIX)}"
        if (shared := name.rpartition("_"))[0] in _SHARED:
            return ".".join(shared[::2])
        if name == "beside":
            return "targets" if is_head else "padding"
        return name

    inputs = tuple(map(name_of, graph.graph.find_nodes(op="placeholder")))
    carried = sum(name.startswith(f"{CARRIED}.") for name in inputs)
    count = len(graph.graph.output_node().args[0])
    saved = count - 1 - sharing.gives if role == SAVE else 0
    block = partial(of_block, role, saved=saved, sharing=sharing, carried=carried)
    signature = of_head(role, saved) if is_head else block(attends=False)
    outputs = signature.answers(0)
    is_back = role in (BACK, BACK_SAVED, PREFILL_BACK)
    gradients = [matrix.gradient for matrix in adapter.values()] if is_back else []
    if count > len(outputs) + len(gradients):
        outputs = block(attends=True).answers(0)
    outputs += gradients
    return Interface(inputs, tuple(outputs))


def _with_own_constants(graph_module: GraphModule, role: str, shared: Collection[str]) -> GraphModule:
    """The graph with names of its own for the constants that rules wrote: another role has others."""
    result = copied(graph_module)
    for node in result.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in shared:
            node.target = f"{name}_of_{role}"
            if not hasattr(result, node.target):
                result.register_buffer(node.target, attribute(graph_module, name))
    return result


def _constants(graph_module: GraphModule) -> set[str]:
    return {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
