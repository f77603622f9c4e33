"""A graph to write into."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.fx import Graph, GraphModule  # noqa: E402

from server_export.derive.tangent.builder import Builder  # noqa: E402
from tests.server_export.derive.tangent.graphs import QUERIES  # noqa: E402


@pytest.fixture
def builder() -> Builder:
    return Builder(GraphModule({}, Graph()), Graph(), QUERIES)
