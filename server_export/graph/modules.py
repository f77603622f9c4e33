"""Graph modules: a graph, and the tensors that its get_attr nodes read by dotted names."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule


def as_module(root: GraphModule, graph: Graph) -> GraphModule:
    """A module of a new graph with the constants of `root`.

    Its Python code is generated when it is called for the first time; most are only read.
    """
    return _LazyGraphModule(root, graph)


def attribute(graph_module: GraphModule, name: str) -> Any:
    """What a get_attr node of the module with this target reads."""
    value: Any = graph_module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def set_attribute(graph_module: GraphModule, name: str, tensor: torch.Tensor) -> None:
    """Give a module a constant that get_attr nodes read by this name, unless it has one."""
    *parents, child = name.split(".")
    owner: torch.nn.Module = graph_module
    for part in parents:
        if not hasattr(owner, part):
            setattr(owner, part, torch.nn.Module())
        owner = getattr(owner, part)
    if not hasattr(owner, child):
        owner.register_buffer(child, tensor.detach())


def remove_unused_attributes(graph_module: GraphModule) -> None:
    """Drop parameters and buffers that no node reads, so that they don't reach the program."""
    used = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    names = [name for name, _ in graph_module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in graph_module.named_buffers(remove_duplicate=False)]
    for name in names:
        if name not in used:
            parent, _, child = name.rpartition(".")
            owner = graph_module.get_submodule(parent) if parent else graph_module
            delattr(owner, child)
