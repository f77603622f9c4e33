"""Core operators compute the same values, and operators that reorder elements return contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from server_export.ir.core import write_core_operators
from server_export.ir.rewriting import rewrite
from server_export.ir.shapes import fill_in_values
from server_export.ir.softmax_parts import SOFTMAX_PARTS
from tests.server_export.delegates import Functions, in_engine
from tests.server_export.derive.jvp.graphs import Function

aten = torch.ops.aten
X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([[[1], [0], [3]], [[2], [2], [1]]])


# By name, a function and the operators of it that XNNPACK doesn't delegate.
CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], set[str]]] = {
    "transpose": (lambda x: x.transpose(-1, 0), set()),
    "permute": (lambda x: x.permute(2, 0, 1), set()),
    "matrix transpose": (lambda x: x[0].t(), {"select_copy"}),
    "slice": (lambda x: x[:, 1:], set()),
    "softmax": (lambda x: torch.softmax(x, 1), {"_softmax"}),
    "silu": (nn.functional.silu, set()),
    "softplus": (lambda x: nn.functional.softplus(30.0 * x), set()),
    "logsumexp": (lambda x: (40.0 * x).logsumexp(-1), {"amax", "sum"}),
    "expand": (lambda x: x[:, :1].expand(2, 5, 4), {"expand_copy"}),
    "reversed difference": (lambda x: 1.5 - x, set()),
    "parts of a softmax": (lambda x: SOFTMAX_PARTS(x, x[..., :1], INDEX), {"gather"}),
    "a sum of many": (lambda x: SOFTMAX_PARTS(x.repeat(1, 1, 512), x[..., :1], INDEX), {"gather", "repeat"}),
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the outputs of each case by the graph of core operators and by the engine."""
    results = dict[str, tuple[torch.Tensor, torch.Tensor]]()
    for is_delegated in (True, False):
        names = [name for name, (_, outside) in CASES.items() if is_delegated != bool(outside)]
        functions, inputs = Functions([CASES[name][0] for name in names]), (X,) * len(names)
        graph_module = torch.export.export(functions, inputs, strict=False).module(check_guards=False)
        fill_in_values(graph_module)
        write_core_operators(graph_module)
        by_graph = graph_module(*inputs)
        outside, by_engine = in_engine(graph_module, inputs)
        assert outside <= set[str]().union(*(CASES[name][1] for name in names))
        results |= dict(zip(names, zip(by_graph, by_engine, strict=True), strict=True))
    return results


@pytest.mark.parametrize("name", sorted(CASES))
def test_core_operators_compute_the_same(
    name: str, outputs: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    # The default for float32; 2,048 terms in another order differ by the square root of that many roundings.
    relative = 2048**0.5 * torch.finfo(torch.float32).eps if name == "a sum of many" else 1.3e-6
    for output in outputs[name]:
        torch.testing.assert_close(output, CASES[name][0](X), rtol=relative, atol=1e-5)


def test_reordered_elements_are_contiguous() -> None:
    graph_module = torch.export.export(
        Function(lambda x: x.transpose(1, 2).reshape(2, 12)), (X,), strict=False
    ).module(check_guards=False)
    fill_in_values(graph_module)
    write_core_operators(graph_module)
    (permuted,) = graph_module.graph.find_nodes(op="call_function", target=aten.permute_copy.default)
    assert permuted.meta["val"].is_contiguous()


def test_activations_are_quantized_by_operators_that_a_trace_keeps_whole() -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_

    layer, x = nn.Linear(32, 8).requires_grad_(False), X.repeat(1, 1, 8)
    quantize_(layer, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8))
    graph_module = torch.export.export(Function(layer), (x,), strict=False).module(check_guards=False)
    rewrite(graph_module)
    write_core_operators(graph_module)
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]
    assert [name.split(".")[1] for name in names if name.startswith("quantized_decomposed")] == [
        "choose_qparams_per_token_asymmetric",
        "quantize_per_token",
        "dequantize_per_token",
    ]
    # The only operator of torchao that remains dequantizes the weight.
    assert [name for name in names if name.startswith("torchao")] == ["torchao.dequantize_affine.default"]
    torch.testing.assert_close(graph_module(x), layer(x), atol=1e-5, rtol=1e-5)
