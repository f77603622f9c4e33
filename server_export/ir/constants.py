"""Tensors of a graph that don't depend on its inputs: computed at export, and stored once."""

from __future__ import annotations

import hashlib
import operator
from itertools import count
from typing import Any

import torch
from torch.fx import GraphModule, Node

from server_export.ir.modules import attribute

aten = torch.ops.aten

# How names of constants begin that are no weights.
MADE = "constant_"
_ENLARGING = {
    aten.expand.default,
    aten.expand_as.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
}


class Constants:
    """Constants that are added to a graph module; equal ones are stored once."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self.names: dict[tuple[torch.dtype, torch.Size, bytes], str] = {}

    def node(self, tensor: torch.Tensor, before: Node) -> Node:
        """A get_attr node for `tensor`."""
        tensor = tensor.detach().contiguous()
        digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
        key = (tensor.dtype, tensor.shape, digest)
        if key not in self.names:
            numbers = (f"{MADE}{number}" for number in count(len(self.names)))
            name = next(name for name in numbers if not hasattr(self.graph_module, name))
            self.graph_module.register_buffer(name, tensor, persistent=True)
            self.names[key] = name
        with self.graph_module.graph.inserting_before(before):
            node = self.graph_module.graph.get_attr(self.names[key])
        node.meta["val"] = tensor.to("meta")
        return node

    def fold(self, has_weights: bool = True) -> None:
        """Compute every node that has constant inputs only, and isn't larger than these by repetition.

        Args:
            has_weights: whether weights have their numbers; without them nothing is computed of any.
        """
        values: dict[Node, Any] = {}
        for node in self.graph_module.graph.nodes:
            if node.op == "get_attr":
                tensor = attribute(self.graph_module, str(node.target))
                # A quantized weight is a subclass with its own meaning of every operator.
                is_known = has_weights or str(node.target).startswith(MADE)
                if is_known and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    values[node] = tensor
            elif is_foldable(node, values):
                arguments, named = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                with torch.no_grad():
                    values[node] = node.target(*arguments, **named)
        for node, value in values.items():
            is_read = any(user not in values for user in node.users)
            if node.op == "call_function" and isinstance(value, torch.Tensor) and is_read:
                node.replace_all_uses_with(
                    self.node(value, node), delete_user_cb=lambda user: user not in values
                )
        self.graph_module.graph.eliminate_dead_code()


def is_foldable(node: Node, values: dict[Node, Any]) -> bool:
    """Whether all that an operator computes of is known, and what it answers follows from that alone."""
    if node.op != "call_function" or any(source not in values for source in node.all_input_nodes):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return (
        node.target not in _ENLARGING
        or node.meta["val"].numel() == node.all_input_nodes[0].meta["val"].numel()
    )
