"""Constants of graph modules by their dotted names."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from torch import nn
from torch.fx import Graph, GraphModule

from server_export.graph.modules import as_module, attribute, remove_unused_attributes, set_attribute

NAMES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4).map(".".join)


@given(NAMES)
def test_what_is_set_is_read_by_the_same_name(name: str) -> None:
    graph_module = GraphModule(nn.Module(), Graph())
    set_attribute(graph_module, name, torch.ones(2, requires_grad=True))
    assert attribute(graph_module, name).tolist() == [1, 1]
    assert not attribute(graph_module, name).requires_grad
    assert [name for name, _ in graph_module.named_buffers()] == [name]


def test_what_is_there_is_kept() -> None:
    graph_module = GraphModule(nn.Module(), Graph())
    for number in range(2):
        set_attribute(graph_module, "layer.weight", torch.full((1,), float(number)))
    set_attribute(graph_module, "layer.bias", torch.ones(1))
    assert attribute(graph_module, "layer.weight").item() == 0
    assert attribute(graph_module, "layer.bias").item() == 1


def test_only_what_a_node_reads_is_kept() -> None:
    root = nn.Module()
    root.layer = nn.Linear(2, 3)
    root.register_buffer("table", torch.ones(2))
    graph = Graph()
    graph.output(graph.get_attr("layer.bias"))
    graph_module = GraphModule(root, Graph())
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        set_attribute(graph_module, name, tensor)
    graph_module.graph = graph
    remove_unused_attributes(graph_module)
    assert [name for name, _ in graph_module.named_buffers()] == ["layer.bias"]


def test_a_module_of_a_new_graph_shares_its_constants() -> None:
    root = torch.export.export(nn.Linear(2, 3), (torch.ones(1, 2),)).module(check_guards=False)
    graph = Graph()
    graph.output(graph.get_attr("weight"))
    made = as_module(root, graph)
    assert attribute(made, "weight") is attribute(root, "weight")
    assert torch.equal(made(), root.weight)
