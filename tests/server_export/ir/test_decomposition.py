"""Operators without a rule are decomposed into operators with rules, and the output stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from server_export.ir.decomposition import decompose, unknown_operators
from server_export.ir.operators import differentiable
from server_export.ir.rewriting import rewrite
from tests.server_export.derive.jvp.graphs import Function

torch.set_num_threads(1)
aten = torch.ops.aten

# Operators of transformers' models that a traced graph contains.
CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "square": torch.square,
    "stack": lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "matmul with one matrix": lambda x: x @ x[0, 0].T,
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=-1),
    "rms_norm": lambda x: F.rms_norm(x, (4,), x[0, 0, 0], 1e-5),
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "glu": F.glu,
    "celu": F.celu,
    "relu6": lambda x: aten.relu6.default(x),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "standard deviation": lambda x: x.std(-1, unbiased=False),
    "einsum": lambda x: torch.einsum("abij,abkj->abik", x, x),
    "baddbmm": lambda x: torch.baddbmm(x[0, :, :, :3], x[0], x[1].transpose(1, 2), beta=0.5, alpha=2.0),
    "pad": lambda x: F.pad(x, (0, 0, 1, 2)),
    "unbind": lambda x: x.unbind(0)[1] + x.unbind(2)[0][..., None, :],
    "masked_fill with a tensor": lambda x: x.masked_fill(x > 0, x[0, 0, 0, 0]),
    "minimum of two": lambda x: aten.min.other(x, 2 * x),
    "outer": lambda x: torch.outer(x[0, 0, 0], x[0, 0, 1]),
    "log_softmax": lambda x: x.log_softmax(-1),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_decomposed_into_known_ones(name: str) -> None:
    x = torch.randn(2, 3, 3, 4, generator=torch.Generator().manual_seed(0))
    module = Function(CASES[name])
    with torch.no_grad():
        graph_module = torch.export.export(module, (x,), strict=False).module(check_guards=False)
        decompose(graph_module)
        rewrite(graph_module)
        decompose(graph_module, declined=True)
        assert not unknown_operators(graph_module)
        remaining = {str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"}
        assert remaining <= differentiable(), remaining - differentiable()
        torch.testing.assert_close(graph_module(x), CASES[name](x))


def test_operators_with_rules_stay() -> None:
    def known(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.gelu(x).view(6, 12), (12,)).softmax(-1)

    graph_module = torch.export.export(Function(known), (torch.randn(2, 3, 3, 4),)).module(check_guards=False)
    before = [(node.name, str(node.target)) for node in graph_module.graph.nodes]
    decompose(graph_module)
    assert [(node.name, str(node.target)) for node in graph_module.graph.nodes] == before
