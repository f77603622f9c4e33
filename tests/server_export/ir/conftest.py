"""A fixture with a graph to write into."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from server_export.ir.tangents import GraphTangents
from tests.server_export.derive.jvp.graphs import QUERIES, TOKENS


@pytest.fixture
def tangents() -> GraphTangents:
    graph = Graph()
    ones = graph.placeholder("ones")
    ones.meta["val"] = torch.ones(1, TOKENS, 1)
    return GraphTangents(GraphModule(nn.Module(), Graph()), graph, QUERIES, {TOKENS: ones})
