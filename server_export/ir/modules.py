"""Utilities for graph modules: copies of graphs, and tensors that get_attr nodes read by dotted names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule


def make_graph_module(root: GraphModule, graph: Graph) -> GraphModule:
    """Return a module with a new graph and the constants of `root`.

    Its Python code is generated at its first call, because most graph modules are never called.
    """
    return _LazyGraphModule(root, graph)


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """Return a copy of a graph; it shares the tensors, but new attributes belong to the copy only."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return make_graph_module(graph_module, graph)


def get_attribute(graph_module: GraphModule, name: str) -> Any:
    """Return the attribute of a module with a dotted name, as a get_attr node reads it."""
    value: Any = graph_module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def replace_tensor(module: GraphModule, name: str, tensor: torch.Tensor | None) -> None:
    """Replace the tensor with a dotted name by a buffer; None removes it."""
    parent, _, child = name.rpartition(".")
    owner = module.get_submodule(parent) if parent else module
    delattr(owner, child)
    if tensor is not None:
        owner.register_buffer(child, tensor)


def remove_unused_attributes(graph_module: GraphModule) -> None:
    """Remove the parameters and buffers that no node reads, so that they don't reach the program."""
    used = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    names = [name for name, _ in graph_module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in graph_module.named_buffers(remove_duplicate=False)]
    for name in names:
        if name not in used:
            replace_tensor(graph_module, name, None)


def allocate_meta_tensors(graph_module: GraphModule) -> None:
    """Replace the meta tensors that a graph reads by zeros, in place; untouched pages take no memory."""
    for name in {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}:
        tensor = get_attribute(graph_module, name)
        if tensor.is_meta:
            # numpy leaves the pages of zeros untouched, torch writes them.
            zeros = torch.from_numpy(np.zeros(tensor.nbytes, np.uint8))
            replace_tensor(graph_module, name, zeros.view(tensor.dtype).reshape(tensor.shape))
