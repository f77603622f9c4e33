"""Lower a block type to one program with a dynamically sized method for each role."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.fx import GraphModule

from prge.formats.chain import Bounds
from prge.formats.signatures import DECODE, PREFILL, ROLE_OF, SHARED_IN, Derivative, View
from server_export.derive.backward.layers import add_transposed_weights, transposed_names
from server_export.derive.continuation import shared_keys_and_values
from server_export.derive.roles import derive, is_head
from server_export.ir.block import Block
from server_export.ir.markers import BATCH, COPIES, PAST, QUERIES, TOKENS
from server_export.ir.modules import copy_graph_module, get_attribute
from server_export.lower.block_type import LoweredBlockType
from server_export.lower.cache import ProgramCache, lower_methods
from server_export.lower.sizes import Size, SizedMethod


@dataclass(frozen=True)
class LoweredRoles:
    """The lowered program of a block type.

    Attributes:
        block_type: program and layout of weights files.
        methods: the methods by role.
        constants: constants that all blocks share, by name.
        past: indices of the shared inputs that are keys and values of attention.
    """

    block_type: LoweredBlockType
    methods: Mapping[str, SizedMethod]
    constants: Mapping[str, torch.Tensor]
    past: tuple[int, ...]

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the weights file of a block from its frozen tensors."""
        self.block_type.weights.write(path, self.with_constants(tensors))

    def with_constants(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all constants of a block's program, from the block's frozen tensors."""
        graphs = (method.block.graph_module for method in self.methods.values())
        names = {name for graph_module in graphs for name in _constants(graph_module)}
        return {**add_transposed_weights(tensors, names), **self.constants}


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
    """Lower a block type for some roles.

    Args:
        block: the block, traced with markers.
        stored: names of its constants that differ between blocks.
        roles: names of roles.
        bounds: largest sizes of one call.
        cache: cache of programs; None: lower in any case.
        done: called with the share of the work that was done since its last call.
        saves: whether the role `backward` also adds the roles with saved residuals.

    Raises:
        Refusal: an operator has no derivative, or ExecuTorch refuses a method.
    """
    derived, past = derive(block, roles, saves), past_inputs(block, roles)
    shared = {*stored, *(name for weight in stored for name in transposed_names(weight))}
    constants: dict[str, torch.Tensor] = {}
    methods = dict[str, SizedMethod]()
    for role, role_block in derived.items():
        graph_module = _with_own_constants(role_block.graph_module, role, shared)
        constants |= {
            name: get_attribute(graph_module, name) for name in _constants(graph_module) if name not in shared
        }
        role_block = replace(role_block, graph_module=graph_module)
        methods[role] = SizedMethod(role_block, sizes_of(role, bounds, is_head(block)))
    lower = cache.lower if cache else lower_methods
    lowered = lower(methods, constants, {DECODE})
    done(1.0)
    return LoweredRoles(lowered, methods, constants, past)


def past_inputs(block: Block, roles: Collection[str]) -> tuple[int, ...]:
    """Return the indices of a block's shared inputs that are keys and values of its attention.

    Empty if the block computes its own keys and values, or the roles include no generation.

    Raises:
        Refusal: the attention reads shared inputs in an unknown way.
    """
    if not block.has_input(SHARED_IN) or not {PREFILL, DECODE}.intersection(roles):
        return ()
    return shared_keys_and_values(block.sized((COPIES, 1), (BATCH, 1)))


def sizes_of(name: str, bounds: Bounds, of_head: bool) -> dict[str, Size]:
    """Return the dynamic sizes of a block's method by name.

    Args:
        name: name of the role.
        bounds: largest sizes of one call.
        of_head: whether the block is the head.
    """
    role = ROLE_OF[name]
    if role.view is View.TOKEN:
        return {
            "copies": Size(COPIES, 7, 1, bounds.sequences),
            "past": Size(PAST, 13, 2, 1 + bounds.context),
        }
    if role.view is View.CHUNK:
        return {
            "tokens": Size(TOKENS, 5, 2, bounds.chunk),
            "past": Size(PAST, 13, 2, 1 + bounds.context, after=TOKENS),
            "queries": Size(QUERIES, 4, 1, bounds.queries),
        }
    if of_head:
        return {"tokens": Size(TOKENS, 5, 2, bounds.states), "queries": Size(QUERIES, 4, 1, bounds.queries)}
    if role.derivative in (Derivative.VALUE, Derivative.JVP):
        return {
            "copies": Size(COPIES, 3, 1, bounds.copies),
            "batch": Size(BATCH, 2, 1, bounds.batch),
            "tokens": Size(TOKENS, 5, 2, bounds.chunk),
            "queries": Size(QUERIES, 4, 1, bounds.queries),
        }
    return {"copies": Size(COPIES, 2, 1, bounds.batch), "tokens": Size(TOKENS, 5, 2, bounds.chunk)}


def _with_own_constants(graph_module: GraphModule, role: str, shared: Collection[str]) -> GraphModule:
    """Return a copy of the graph in which constants of derivative rules have names with the role."""
    result = copy_graph_module(graph_module)
    for node in result.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in shared:
            node.target = f"{name}_of_{role}"
            if not hasattr(result, node.target):
                result.register_buffer(node.target, get_attribute(graph_module, name))
    return result


def _constants(graph_module: GraphModule) -> set[str]:
    """Return the names of a graph's constants."""
    return {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
