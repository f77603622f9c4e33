"""Rewriting for XNNPACK: everything that can be delegated is delegated, and the outputs are the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from server_export.ir.core import write_core_operators
from server_export.ir.operators import rules
from server_export.ir.rewriting import is_dequantization, rewrite, unshare_quantizations
from tests.server_export.delegates import Functions, in_engine
from tests.server_export.derive.jvp.graphs import Function

torch.set_num_threads(1)
aten = torch.ops.aten


def traced(module: nn.Module, *inputs: torch.Tensor) -> GraphModule:
    with torch.no_grad():
        return torch.export.export(module, inputs, strict=False).module(check_guards=False)


def operators(graph_module: GraphModule) -> list[str]:
    """Return the names of the operators in order, without their overloads."""
    return [
        str(node.target).split(".")[1] if "." in str(node.target) else "getitem"
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    ]


@dataclass(frozen=True)
class Case:
    """A function of `x`, and the operators of it that XNNPACK never delegates."""

    function: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    outside: Collection[str] = ()


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


X = random_tensor(2, 3, 4)
WEIGHT, BIAS = random_tensor(4) + 1, random_tensor(4)
TABLE = random_tensor(5, 3)
COPIES = random_tensor(5, 2, 3, 1)
CASES: dict[str, Case] = {
    # Means become linear layers with a constant row.
    "mean of the last dimension": Case(lambda x: x.mean(-1), X),
    "mean that is kept": Case(lambda x: x.mean(2, keepdim=True), X),
    "mean of another dimension stays": Case(lambda x: x.mean(1), X, {"mean"}),
    "mean of two dimensions stays": Case(lambda x: x.mean((1, 2)), X, {"mean"}),
    "norm": Case(lambda x: F.layer_norm(x, (4,)), X),
    "norm with a scale": Case(lambda x: F.layer_norm(x, (4,), WEIGHT), X),
    "norm with a shift": Case(lambda x: F.layer_norm(x, (4,), WEIGHT, BIAS, 0.1), X),
    "norm of what hardly varies": Case(lambda x: F.layer_norm(1e3 + x / 100.0, (4,)), X),
    "norm over two dimensions stays": Case(lambda x: F.layer_norm(x, (3, 4)), X, {"native_layer_norm"}),
    "standard deviation": Case(
        lambda x: x.std(-1, unbiased=False, keepdim=True),
        X,
    ),
    "standard deviation of a sample stays": Case(lambda x: x.std(-1), X, {"var"}),
    # Elementwise
    "product by its other name": Case(lambda x: torch.multiply(x, x), X),
    "square": Case(lambda x: x**2, X),
    "cube": Case(lambda x: x**3, X),
    "root stays": Case(lambda x: x.abs() ** 0.5, X, {"pow"}),
    "tanh form of gelu": Case(lambda x: F.gelu(x, approximate="tanh"), X),
    "exact gelu stays": Case(F.gelu, X),
    "hard tanh": Case(F.hardtanh, X),
    "expansion like another": Case(lambda x: x[:1].expand_as(x) * 2.0, X, {"expand_copy"}),
    "clamp from below": Case(lambda x: x.clamp_min(0.1), X),
    "clamp from above": Case(lambda x: x.clamp_max(0.1), X),
    "sum with a number": Case(lambda x: aten.add.Scalar(x, 3.0), X),
    "difference with a number": Case(lambda x: aten.sub.Scalar(x, 3.0), X),
    "product with a number": Case(lambda x: aten.mul.Scalar(x, 3.0), X),
    "quotient with a number": Case(lambda x: aten.div.Scalar(x, 3.0), X),
    "product of two matrices": Case(lambda x: aten.mm.default(x[0], aten.t.default(x[1])), X),
    "length": Case(lambda x: torch.linalg.vector_norm(x, dim=-1), X, {"sum"}),
    "another norm stays": Case(lambda x: torch.linalg.vector_norm(x, 1, dim=-1), X, {"pow", "sum"}),
    "variance": Case(
        lambda x: aten.var.correction(x, [-1], correction=1),
        X,
    ),
    # Shapes
    "unbind": Case(lambda x: torch.add(*x.unbind()), X),
    "unsqueeze": Case(lambda x: x.unsqueeze(1), X),
    "squeeze": Case(lambda x: x.squeeze(0), X[:1]),
    "squeeze of several": Case(lambda x: x.squeeze((0, 1)), X[:1, :1]),
    "flatten": Case(lambda x: aten.flatten.using_ints(x, 1), X),
    "select": Case(lambda x: x[:, 1], X),
    "select from the end": Case(lambda x: x.select(2, -1), X),
    "split": Case(lambda x: torch.add(*x.split(2, -1)), X),
    "split by name": Case(lambda x: torch.add(*x.split(2, dim=2)), X),
    "split into unequal parts": Case(lambda x: x.split([1, 3], -1)[1], X),
    "chunk": Case(lambda x: x.chunk(3, 1)[2], X),
    "chunk of the first dimension": Case(lambda x: x.chunk(2)[1], X),
    "stack": Case(lambda x: torch.stack([x, x], 1), X),
    "part that is put between": Case(lambda x: x.slice_scatter(x[:, :1] * 2.0, 1, 1, 2), X),
    "part that is put at the end": Case(lambda x: x.slice_scatter(x[:, :2] * 2.0, 1, 1), X),
    "largest with its index": Case(
        lambda x: x.max(-1, keepdim=True)[0] + x.max(1)[0].sum(), X, {"sum", "topk"}
    ),
    "bounds that are tensors": Case(lambda x: torch.clamp(x, min=x[:1]), X),
    "product of as many matrices": Case(
        lambda x: torch.matmul(x[None], x[None].transpose(2, 3)),
        X,
    ),
    "product of a weight is a layer's": Case(lambda x: torch.matmul(TABLE, x), X),
    "product with one matrix stays": Case(lambda x: torch.matmul(x, BIAS[:, None]), X),
    "repetition in front of a factor": Case(lambda x: x.repeat(5, 1, 1, 1) * COPIES, X),
    "repetition that is an output stays": Case(lambda x: x.repeat(5, 1, 1, 1), X, {"repeat"}),
    "empty parts": Case(lambda x: torch.cat([x[..., :0], x, x], -1), X, {"cat"}),
    "one part and empty ones": Case(lambda x: torch.cat([x[..., 4:], x * 2.0], -1), X),
    "parts that are all there": Case(lambda x: torch.cat([x, x], 1), X, {"cat"}),
    # Identities
    "dropout": Case(lambda x: F.dropout(x, 0.5, training=False) * 2.0, X),
    "cast to the same type": Case(lambda x: x.to(torch.float32) * 2.0, X),
    "type of another": Case(lambda x: x.type_as(x) * 2.0, X),
    "cast to another type stays": Case(lambda x: x.to(torch.float64) * 2.0, X, {"_to_copy", "mul"}),
    "copies": Case(lambda x: x.clone().contiguous().detach() * 2.0, X),
    "expansion to the same shape": Case(lambda x: x.expand(2, 3, 4) * 2.0, X),
    "expansion to another shape stays": Case(lambda x: x.expand(5, 2, 3, 4) * 2.0, X, {"expand_copy"}),
    # Constants
    "table of numbers": Case(lambda x: x * torch.arange(4).float().cos().unsqueeze(0), X),
    "scale that is one more": Case(lambda x: x * (1 + WEIGHT), X),
}


class Checked(torch.fx.Interpreter):
    """Runs a graph and checks the shape and dtype of every node against its `meta["val"]`."""

    def run_node(self, node: torch.fx.Node) -> object:
        value = super().run_node(node)
        if isinstance(value, torch.Tensor):
            assert (node.meta["val"].shape, node.meta["val"].dtype) == (value.shape, value.dtype), node
        return value


@dataclass(frozen=True)
class Rewritten:
    """Cases in one graph: outputs of the graph and of the engine, and operators outside of delegates."""

    by_graph: Mapping[str, torch.Tensor]
    by_engine: Mapping[str, torch.Tensor]
    outside: set[str]

    @classmethod
    def of(cls, cases: Mapping[str, Case]) -> Rewritten:
        inputs = [case.x for case in cases.values()]
        graph_module = traced(Functions([case.function for case in cases.values()]), *inputs)
        rewrite(graph_module)
        by_graph = Checked(graph_module).run(*inputs)
        write_core_operators(graph_module)
        outside, by_engine = in_engine(graph_module, inputs)
        of_graph, of_engine = (dict(zip(cases, each, strict=True)) for each in (by_graph, by_engine))
        return cls(of_graph, of_engine, outside)


@pytest.fixture(scope="module")
def delegated() -> Rewritten:
    return Rewritten.of({name: case for name, case in CASES.items() if not case.outside})


@pytest.fixture(scope="module")
def others() -> Rewritten:
    return Rewritten.of({name: case for name, case in CASES.items() if case.outside})


def test_everything_possible_is_delegated(delegated: Rewritten, others: Rewritten) -> None:
    assert not delegated.outside
    assert others.outside <= {operator for case in CASES.values() for operator in case.outside}


@pytest.mark.parametrize("name", CASES)
def test_the_output_is_the_same(name: str, delegated: Rewritten, others: Rewritten) -> None:
    case = CASES[name]
    # 1000 + x / 100 keeps only a few digits of x.
    tolerance = 1e-2 if "hardly" in name else 1e-6
    results = others if case.outside else delegated
    for output in (results.by_graph[name], results.by_engine[name]):
        torch.testing.assert_close(output, case.function(case.x), atol=tolerance, rtol=1e-5)


def test_every_rule_has_a_case() -> None:
    tried = {
        str(node.target)
        for case in CASES.values()
        for node in traced(Function(case.function), case.x).graph.nodes
        if node.op == "call_function"
    }
    assert tried >= rules("rewrite").keys()


def test_assertions_of_the_tracer_are_removed() -> None:
    module = Function(lambda x: (x.double() * 2).float())
    graph_module = traced(module, X)
    assert "_assert_tensor_metadata" in operators(graph_module)
    rewrite(graph_module)
    assert "_assert_tensor_metadata" not in operators(graph_module)


def test_unused_parameters_are_removed() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.unread = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.unread(x)
            return self.read(x)

    graph_module = traced(Unread(), X)
    rewrite(graph_module)
    assert sorted(name for name, _ in graph_module.named_parameters()) == ["read.bias", "read.weight"]


# Quantized layers


class TwoLayers(nn.Module):
    """Two quantized layers that read the same activation, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_

        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)).requires_grad_(False)
        quantize_(self.layers, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right, last = self.layers
        return last(left(x) + right(x))


def test_an_activation_is_quantized_once_for_all_its_readers() -> None:
    module, x = TwoLayers(), random_tensor(2, 32)
    graph_module = traced(module, x)
    before = operators(graph_module)
    rewrite(graph_module)
    after = operators(graph_module)
    assert (before.count("quantize_affine"), after.count("quantize_affine")) == (3, 2)
    assert (before.count("choose_qparams_affine"), after.count("choose_qparams_affine")) == (3, 2)
    assert after.count("linear") == 3
    with torch.no_grad():
        assert torch.equal(graph_module(x), module(x))


def test_quantized_weights_are_codes_and_scales_and_share_zero_points() -> None:
    graph_module = traced(TwoLayers(), random_tensor(2, 32))
    rewrite(graph_module)
    constants = dict(graph_module.named_buffers())
    codes = [name for name, value in constants.items() if value.dtype == torch.int8 and value.dim() == 2]
    assert len([name for name in codes if name.endswith("qdata")]) == 3
    assert len([name for name in constants if name.endswith("scale")]) == 3
    assert len([name for name in constants if name.endswith("zero_point")]) == 1
    assert "access_subclass_inner_tensor" not in operators(graph_module)


def test_each_use_of_a_quantized_layer_dequantizes_its_own_weight() -> None:
    class Twice(TwoLayers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, *_ = self.layers
            return first(torch.sin(first(x)))

    def weights() -> list[Node]:
        dequantized = filter(is_dequantization, graph_module.graph.nodes)
        return [node for node in dequantized if node.args[0].op == "get_attr"]

    module, x = Twice(), random_tensor(2, 32)
    graph_module = traced(module, x)
    rewrite(graph_module)
    assert [len(node.users) for node in weights()] == [2]
    unshare_quantizations(graph_module.graph)
    assert [len(node.users) for node in weights()] == [1, 1]
    graph_module.recompile()
    with torch.no_grad():
        assert torch.equal(graph_module(x), module(x))
