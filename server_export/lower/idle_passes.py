"""Leaves out those of ExecuTorch's passes that would change nothing.

On its way to the edge dialect a graph goes through seven passes, each of which interprets all of it, operator
by operator: a quarter of a lowering. What most of them look for can be seen in the graph at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from executorch.exir.passes.normalize_transpose_pass import NormalizeTransposePass
from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
from executorch.exir.passes.replace_broken_ops_with_function_ops_pass import (
    ReplaceBrokenOpsWithFunctionalOpsPass,
)
from executorch.exir.passes.scalar_to_tensor_pass import ScalarToTensorPass
from executorch.exir.passes.sym_to_tensor_pass import SymToTensorPass
from torch._export.passes import ReplaceViewOpsWithViewCopyOpsPass
from torch._export.passes.replace_view_ops_with_view_copy_ops_pass import get_view_copy_of_view_op
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

aten = torch.ops.aten

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (bool, int, float)


def write_views_as_copies(graph: Graph) -> None:
    """Write views as the copies that the edge dialect has in their place; in place.

    What is known of their strides is that of views until the graph is interpreted once more.
    """
    for node in graph.nodes:
        if (copy := _view_copy(node)) is not None:
            node.target = copy


@contextmanager
def idle_passes_left_out() -> Iterator[None]:
    """Within the block, passes that have nothing to change return a graph as it is."""
    before = {each: each.__dict__.get("call") for each in _NEEDED}
    for each, needed in _NEEDED.items():
        each.call = _guarded(each.call, needed)
    try:
        yield
    finally:
        for each, call in before.items():
            if call is None:
                del each.call
            else:
                each.call = call


def _guarded(call: Callable[..., PassResult], needed: Callable[[Node], bool]) -> Callable[..., PassResult]:
    def guarded(self: Any, graph_module: GraphModule) -> PassResult:
        if any(needed(node) for node in graph_module.graph.nodes if node.op == "call_function"):
            return call(self, graph_module)
        return PassResult(graph_module, False)

    return guarded


def _view_copy(node: Node) -> OpOverload | None:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    if node.target is aten._unsafe_view.default:
        return aten.view_copy.default
    return get_view_copy_of_view_op(node.target._schema)


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and (_view_copy(node) is not None or node.target.is_view)


def _takes_as_tensor(node: Node, found: Callable[[Any], bool]) -> bool:
    """Whether an operator is given such a value where it takes a tensor."""
    if not isinstance(node.target, OpOverload):
        return False
    for place, argument in enumerate(node.target._schema.arguments):
        value = node.kwargs.get(argument.name)
        if value is None and not argument.kwarg_only and place < len(node.args):
            value = node.args[place]
        if isinstance(argument.type, torch.TensorType) and found(value):
            return True
    return False


def _takes_a_number(node: Node) -> bool:
    return _takes_as_tensor(node, lambda value: isinstance(value, _NUMBERS))


def _takes_a_symbol(node: Node) -> bool:
    return _takes_as_tensor(
        node, lambda value: isinstance(value, Node) and isinstance(value.meta.get("val"), _SYMBOLS)
    )


def _mixes_types(node: Node) -> bool:
    """Whether an operator takes tensors of several types, or something else that has another one."""
    if node.target not in _PROMOTING:
        return False
    types = set()
    for value in node.args:
        known = value.meta.get("val") if isinstance(value, Node) else value
        if not isinstance(known, torch.Tensor):
            return True
        types.add(known.dtype)
    # Integers are divided as floats.
    return len(types) > 1 or not next(iter(types)).is_floating_point


_PROMOTING = {
    *(aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.div.Tensor_mode),
    aten.minimum.default,
}
# What each pass changes.
_NEEDED: dict[Any, Callable[[Node], bool]] = {
    ReplaceViewOpsWithViewCopyOpsPass: _is_view,
    NormalizeTransposePass: lambda node: node.target is aten.t.default,
    ReplaceBrokenOpsWithFunctionalOpsPass: _is_view,
    ScalarToTensorPass: _takes_a_number,
    SymToTensorPass: _takes_a_symbol,
    RemoveMixedTypeOperators: _mixes_types,
}
