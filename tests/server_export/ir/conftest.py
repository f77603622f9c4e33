"""A graph to write into."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from server_export.ir.tangents import Tangents
from tests.server_export.derive.jvp.graphs import QUERIES, TOKENS


@pytest.fixture
def tangents() -> Tangents:
    graph = Graph()
    ones = graph.placeholder("ones")
    ones.meta["val"] = torch.ones(1, TOKENS, 1)
    return Tangents(GraphModule(nn.Module(), Graph()), graph, QUERIES, {TOKENS: ones})
