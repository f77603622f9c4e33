"""Utilities for graph modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from server_export.ir.modules import get_attribute, make_graph_module, remove_unused_attributes


def test_an_attribute_is_read_by_its_dotted_name() -> None:
    layers = nn.Sequential(nn.Sequential(nn.Linear(2, 3)))
    assert get_attribute(GraphModule(layers, Graph()), "training") is True
    graph_module = torch.export.export(layers, (torch.ones(1, 2),)).module(check_guards=False)
    assert get_attribute(graph_module, "0.0.weight").shape == (3, 2)


def test_unused_attributes_are_removed() -> None:
    root = nn.Module()
    root.layer = nn.Linear(2, 3)
    root.register_buffer("table", torch.ones(2))
    graph = Graph()
    graph.output(graph.get_attr("layer.bias"))
    graph_module = GraphModule(root, Graph())
    graph_module.layer, graph_module.table = root.layer, root.table
    graph_module.graph = graph
    remove_unused_attributes(graph_module)
    assert list(graph_module.state_dict()) == ["layer.bias"]


def test_a_module_of_a_new_graph_shares_its_constants() -> None:
    root = torch.export.export(nn.Linear(2, 3), (torch.ones(1, 2),)).module(check_guards=False)
    graph = Graph()
    graph.output(graph.get_attr("weight"))
    new_module = make_graph_module(root, graph)
    assert get_attribute(new_module, "weight") is get_attribute(root, "weight")
    assert torch.equal(new_module(), root.weight)
