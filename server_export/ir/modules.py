"""Graph modules: a graph, and the tensors that its get_attr nodes read by dotted names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule


def make_graph_module(root: GraphModule, graph: Graph) -> GraphModule:
    """A module of a new graph with the constants of `root`.

    Its Python code is generated when it is called for the first time; most are only read.
    """
    return _LazyGraphModule(root, graph)


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """The same graph and constants; what is added to the copy isn't to the original."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return make_graph_module(graph_module, graph)


def get_attribute(graph_module: GraphModule, name: str) -> Any:
    """What a get_attr node of the module with this target reads."""
    value: Any = graph_module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def replace_tensor(module: GraphModule, name: str, tensor: torch.Tensor | None) -> None:
    """Put a tensor in the place of the one of a dotted name; None leaves it out."""
    parent, _, child = name.rpartition(".")
    owner = module.get_submodule(parent) if parent else module
    delattr(owner, child)
    if tensor is not None:
        owner.register_buffer(child, tensor)


def remove_unused_attributes(graph_module: GraphModule) -> None:
    """Drop parameters and buffers that no node reads, so that they don't reach the program."""
    used = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    names = [name for name, _ in graph_module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in graph_module.named_buffers(remove_duplicate=False)]
    for name in names:
        if name not in used:
            replace_tensor(graph_module, name, None)


def allocate_meta_tensors(graph_module: GraphModule) -> None:
    """Make zeros of the tensors of a module that have no memory, in place; untouched pages take none."""
    for name in {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}:
        tensor = get_attribute(graph_module, name)
        if tensor.is_meta:
            # torch's own zeros are written.
            untouched = torch.from_numpy(np.zeros(tensor.nbytes, np.uint8))
            replace_tensor(graph_module, name, untouched.view(tensor.dtype).reshape(tensor.shape))
