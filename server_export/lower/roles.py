"""A block's type as one program: a method for each role, of any size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.fx import GraphModule

from prge.files.chain import Bounds
from prge.files.signatures import DECODE, PREFILL, ROLE_OF, TAKEN, Derivative, View
from server_export.derive.backprop.layers import transposed_names, with_transposed
from server_export.derive.continuing import taken_past
from server_export.derive.roles import derive, is_head
from server_export.ir.block import Block
from server_export.ir.markers import BATCH, COPIES, PAST, QUERIES, TOKENS
from server_export.ir.modules import attribute, copied
from server_export.lower.cache import ProgramCache, lower_methods
from server_export.lower.kind import LoweredKind
from server_export.lower.sizes import Method, Size


@dataclass(frozen=True)
class LoweredRoles:
    """The program of a kind, its methods by role, its constants that no block has its own of, and which of
    the shared values that its blocks take are keys and values."""

    kind: LoweredKind
    methods: Mapping[str, Method]
    constants: Mapping[str, torch.Tensor]
    past: tuple[int, ...]

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the weights file of a block, from its kind's frozen tensors."""
        self.kind.weights.write(path, self.with_constants(tensors))

    def with_constants(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All constants of a block's programs, from its kind's frozen tensors."""
        graphs = (method.block.graph_module for method in self.methods.values())
        names = {name for graph_module in graphs for name in _constants(graph_module)}
        return {**with_transposed(tensors, names), **self.constants}


def lower_roles(
    block: Block,
    stored: Collection[str],
    roles: Collection[str],
    bounds: Bounds,
    *,
    cache: ProgramCache | None = None,
    done: Callable[[float], object] = lambda share: None,
    saves: bool = True,
) -> LoweredRoles:
    """Lower a block's type for some roles.

    Args:
        block: traced with markers.
        stored: names of its constants that differ from block to block.
        roles: of ROLES.
        bounds: sizes of one call.
        cache: of programs; None: lower in any case.
        done: is told which further share of this is done.
        saves: whether `back` brings the roles along that save what it needs.

    Raises:
        Refusal: an operator has no derivative, or ExecuTorch refuses a method.
    """
    derived, past = derive(block, roles, saves), past_of(block, roles)
    shared = {*stored, *(name for weight in stored for name in transposed_names(weight))}
    constants: dict[str, torch.Tensor] = {}
    methods = dict[str, Method]()
    for role, of_role in derived.items():
        graph_module = _with_own_constants(of_role.graph_module, role, shared)
        constants |= {
            name: attribute(graph_module, name) for name in _constants(graph_module) if name not in shared
        }
        of_role = replace(of_role, graph_module=graph_module)
        methods[role] = Method(of_role, sizes_of(role, bounds, is_head(block)))
    lower = cache.lower if cache else lower_methods
    lowered = lower(methods, constants, {DECODE})
    done(1.0)
    return LoweredRoles(lowered, methods, constants, past)


def past_of(block: Block, roles: Collection[str]) -> tuple[int, ...]:
    """Which of the values that a block takes are the keys and the values of its attention; none if it makes
    its own, or goes on with no sequence.

    Raises:
        Refusal: its attention reads some of them in a way that isn't known here.
    """
    if not block.has(TAKEN) or not {PREFILL, DECODE}.intersection(roles):
        return ()
    return taken_past(block.sized((COPIES, 1), (BATCH, 1)))


def sizes_of(name: str, bounds: Bounds, of_head: bool) -> dict[str, Size]:
    """The sizes that a call of a block's method chooses."""
    role = ROLE_OF[name]
    if role.view is View.TOKEN:
        return {
            "copies": Size(COPIES, 7, 1, bounds.sequences),
            "past": Size(PAST, 13, 2, 1 + bounds.context),
        }
    if role.view is View.CHUNK:
        return {
            "tokens": Size(TOKENS, 5, 2, bounds.piece),
            "past": Size(PAST, 13, 2, 1 + bounds.context, after=TOKENS),
            "queries": Size(QUERIES, 4, 1, bounds.queries),
        }
    if of_head:
        return {"tokens": Size(TOKENS, 5, 2, bounds.states), "queries": Size(QUERIES, 4, 1, bounds.queries)}
    if role.derivative in (Derivative.VALUE, Derivative.JVP):
        return {
            "copies": Size(COPIES, 3, 1, bounds.copies),
            "batch": Size(BATCH, 2, 1, bounds.batch),
            "tokens": Size(TOKENS, 5, 2, bounds.piece),
            "queries": Size(QUERIES, 4, 1, bounds.queries),
        }
    return {"copies": Size(COPIES, 2, 1, bounds.batch), "tokens": Size(TOKENS, 5, 2, bounds.piece)}


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
