"""A graph to write into."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.fx import Graph, GraphModule  # noqa: E402

from server_export.derive.tangent.builder import Builder  # noqa: E402
from tests.server_export.derive.tangent.graphs import QUERIES, TOKENS  # noqa: E402


@pytest.fixture
def builder() -> Builder:
    graph = Graph()
    ones = graph.placeholder("ones")
    ones.meta["val"] = torch.ones(1, TOKENS, 1)
    return Builder(GraphModule(nn.Module(), Graph()), graph, QUERIES, ones)
