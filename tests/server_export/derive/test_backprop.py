"""Backpropagation as an inference graph, compared with autograd on small modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from prge.errors import Refusal
from server_export.derive.backward.joint import GRAD_OUTPUT, backpropagate
from server_export.derive.backward.layers import TRANSPOSED, add_transposed_weights
from server_export.derive.backward.rules import ONES, write_backward
from server_export.ir.operators import rules
from server_export.ir.rewriting import rewritten_graph
from server_export.ir.shapes import fill_in_values
from server_export.ir.softmax_parts import SOFTMAX_PARTS, SoftmaxParts
from tests.refusals import raises, refusal
from tests.server_export.derive.jvp.graphs import Function, inputs_of, random, relative_difference

torch.set_num_threads(1)

aten = torch.ops.aten

ROWS, LENGTH, WIDTH, RANK = 2, 3, 32, 4


class Adapted(nn.Module):
    """Two frozen layers with attention over the tokens, and an adapter on the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("lora_a", torch.empty(WIDTH, RANK))
        for number, tensor in enumerate((self.first.weight, self.second.weight, self.lora_a)):
            tensor.requires_grad_(False).copy_(random(*tensor.shape, seed=number) / 4)

    def forward(self, state: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.first(state))
        scores = torch.bmm(hidden, hidden.transpose(1, 2))
        hidden = torch.bmm(torch.softmax(scores, -1), hidden)
        reduced = (hidden @ self.lora_a).reshape(1, ROWS * LENGTH, RANK)
        return state + self.second(hidden) + torch.bmm(reduced, lora_b).reshape(state.shape)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, an adapter [1, rank, out] and the gradient of the output."""
    shapes = (ROWS, LENGTH, WIDTH), (1, RANK, WIDTH), (ROWS, LENGTH, WIDTH)
    state, lora_b, grad_output = (random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    return state, lora_b, grad_output


def outputs_of(
    graph: GraphModule, state: torch.Tensor, lora_b: torch.Tensor, grad_output: torch.Tensor
) -> Any:
    arguments = {"state": state, ONES: torch.ones(1, LENGTH, 1), "lora_b": lora_b, GRAD_OUTPUT: grad_output}
    with torch.no_grad():
        return graph(*(arguments[name] for name in inputs_of(graph)))


def by_autograd(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the gradients of hidden states and adapter."""
    state, lora_b, grad_output = inputs()
    state.requires_grad_(), lora_b.requires_grad_()
    grad_state, grad_adapter = torch.autograd.grad(module(state, lora_b), (state, lora_b), grad_output)
    return grad_state, grad_adapter


def constants(graph: GraphModule) -> set[str]:
    return {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}


def transposed(graph: GraphModule) -> set[str]:
    return {name for name in constants(graph) if name.startswith(TRANSPOSED)}


def test_a_graph_returns_the_gradients_of_autograd() -> None:
    module = Adapted()
    forward = rewritten_graph(module, inputs()[:2])
    graph = backpropagate(forward, ["state", "lora_b"], ["lora_b"], LENGTH)
    assert inputs_of(graph) == ["state", ONES, "lora_b", GRAD_OUTPUT]
    for actual, reference in zip(outputs_of(graph, *inputs()), by_autograd(module), strict=True):
        assert relative_difference(actual, reference) < 1e-5
    # The original graph is unchanged, and constants of the forward pass keep their names.
    assert forward.graph.find_nodes(op="call_function", target=aten.linear.default)
    assert constants(graph) - transposed(graph) >= {"first.weight", "lora_a"}


def test_there_is_no_backward_pass_below_the_differentiated_inputs() -> None:
    forward = rewritten_graph(Adapted(), inputs()[:2])
    whole = backpropagate(forward, ["state", "lora_b"], ["lora_b"], LENGTH)
    lowest = backpropagate(forward, ["lora_b"], ["lora_b"], LENGTH)
    assert transposed(whole) == {f"{TRANSPOSED}first_weight", f"{TRANSPOSED}second_weight"}
    assert transposed(lowest) == set()
    (grad_adapter,) = outputs_of(lowest, *inputs())
    assert torch.equal(grad_adapter, outputs_of(whole, *inputs())[1])


def test_ones_are_no_input_if_no_tokens_are_summed() -> None:
    graph = backpropagate(rewritten_graph(Adapted(), inputs()[:2]), ["lora_b"], ["lora_b"], LENGTH)
    assert inputs_of(graph) == ["state", "lora_b", GRAD_OUTPUT]


def test_transposed_weights_follow_from_the_weights() -> None:
    module = Adapted()
    graph = backpropagate(rewritten_graph(module, inputs()[:2]), ["state"], ["lora_b"], LENGTH)
    names = transposed(graph)
    with_transposed = add_transposed_weights(module.state_dict(), names)
    assert names
    for name in names:
        torch.testing.assert_close(with_transposed[name], getattr(graph, name))


def test_gradients_of_selected_elements_are_scattered() -> None:
    """Some elements are masked before the selection, as those of groups of experts are."""

    class Selecting(Adapted):
        def forward(self, state: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
            state = super().forward(state, lora_b)
            masked = state + torch.full((WIDTH,), 0.0).index_fill(0, torch.tensor([1]), -torch.inf)
            shares, index = torch.topk(masked, 5)
            others = torch.sigmoid(state).gather(-1, index)
            return state * (shares * others).sum(-1, keepdim=True)

    module = Selecting()
    graph = backpropagate(rewritten_graph(module, inputs()[:2]), ["state", "lora_b"], ["lora_b"], LENGTH)
    for actual, reference in zip(outputs_of(graph, *inputs()), by_autograd(module), strict=True):
        assert relative_difference(actual, reference) < 1e-5


class Rows(nn.Module):
    """Two adapters of rank 1 in sequence, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(("lora_a_0", "lora_a_1")):
            self.register_buffer(name, random(1, WIDTH, seed=number, dtype=torch.float32))
        self.register_buffer("mean", torch.full((1, WIDTH), 1 / WIDTH))

    def forward(self, state: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
        state = state * F.linear(state, self.mean)
        for lora_a in (self.lora_a_0, self.lora_a_1):
            reduced = F.linear(state, lora_a).reshape(1, ROWS * LENGTH, 1)
            state = state + torch.bmm(reduced, lora_b).reshape(state.shape)
        return state


def test_adapters_of_rank_one_have_transposed_rows() -> None:
    module, (state, lora_b, grad_output) = Rows(), inputs()
    lora_b = lora_b[:, :1]
    graph = backpropagate(rewritten_graph(module, (state, lora_b)), ["state", "lora_b"], ["lora_b"], LENGTH)
    differentiated = state.requires_grad_(), lora_b.requires_grad_()
    grad_state, grad_adapter = torch.autograd.grad(module(*differentiated), differentiated, grad_output)
    gradients = outputs_of(graph, state, lora_b, grad_output)
    for actual, reference in zip(gradients, (grad_state, grad_adapter), strict=True):
        assert relative_difference(actual, reference) < 1e-5
    with_transposed = add_transposed_weights(module.state_dict(), transposed(graph))
    for name in ("lora_a_0", "lora_a_1"):
        assert torch.equal(with_transposed[f"{TRANSPOSED}{name}"], getattr(module, name)[0])


# Quantized layers


class StraightThrough(torch.autograd.Function):
    """A quantized layer whose rounding has the derivative 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor], weight: Any) -> Any:
        ctx.save_for_backward(weight)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight, None, None


def straight_through(module: nn.Module) -> None:
    """Give the quantized layers of a module the derivative of their rounded weights, in place."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            weight, forward = layer.weight.dequantize(), layer.forward
            layer.forward = lambda x, f=forward, w=weight: StraightThrough.apply(x, f, w)  # type: ignore[method-assign]


def quantized(bits: int) -> Adapted:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    module = Adapted()
    dtype = {4: torch.int4, 8: torch.int8}[bits]
    quantize_(
        module, Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=PerGroup(32))
    )
    return module


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_layer_passes_the_gradient_straight_through(bits: int) -> None:
    module = quantized(bits)
    forward = rewritten_graph(module, inputs()[:2])
    graph = backpropagate(forward, ["state", "lora_b"], ["lora_b"], LENGTH)
    gradients = outputs_of(graph, *inputs())
    straight_through(module)
    expected = by_autograd(module)
    for actual, reference in zip(gradients, expected, strict=True):
        # The remaining difference comes from int8 activations and from weights that are rounded once more.
        assert float(F.cosine_similarity(actual.ravel(), reference.ravel(), dim=0)) > 0.999
        assert float(actual.norm() / reference.norm()) == pytest.approx(1, abs=0.02)
    codes = [getattr(graph, name) for name in transposed(graph) if name.endswith("qdata")]
    assert [tensor.dtype for tensor in codes] == [torch.int8] * 2


class Head(nn.Module):
    """Logits of a vocabulary whose rows have much in common, as those of language models do."""

    VOCABULARY, POSITIONS = 4096, 64

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, self.VOCABULARY, bias=False)
        weight = random(self.VOCABULARY, WIDTH, seed=1) + random(WIDTH, seed=2)
        self.layer.weight.requires_grad_(False).copy_(weight / 4)

    def forward(self, state: torch.Tensor, shift: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        parts: torch.Tensor = SOFTMAX_PARTS(self.layer(state), shift, index)
        return parts


def test_small_probabilities_pass_a_quantized_head_backward() -> None:
    """If small probabilities were rounded to 0, the same error would occur at all positions."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerAxis, quantize_

    head = Head()
    state = 2 * random(1, Head.POSITIONS, WIDTH, seed=3, dtype=torch.float32)
    shift = head.layer(state).logsumexp(-1, keepdim=True)
    index = torch.arange(Head.POSITIONS).reshape(1, -1, 1) * 61
    grad_output = torch.tensor([-1.0, 1.0]).expand(1, Head.POSITIONS, 2).contiguous()
    grad_output[:, :3] = 0  # positions without a loss
    quantize_(
        head, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0))
    )
    graph = backpropagate(rewritten_graph(head, (state, shift, index)), ["state"], [], Head.POSITIONS)
    arguments = {"state": state, "shift": shift, "index": index, GRAD_OUTPUT: grad_output}
    with torch.no_grad():
        (grad_state,) = graph(*(arguments[name] for name in inputs_of(graph)))
    straight_through(head)
    state.requires_grad_()
    SoftmaxParts.apply(head.layer(state), shift, index).backward(grad_output)
    assert state.grad is not None and not grad_state[:, :3].any()
    for actual, reference, min_similarity in (
        (grad_state, state.grad, 0.999),
        (grad_state.sum(1), state.grad.sum(1), 0.985),
    ):
        assert float(F.cosine_similarity(actual.ravel(), reference.ravel(), dim=0)) > min_similarity
        assert float(actual.norm() / reference.norm()) == pytest.approx(1, abs=0.05)


# Refusals


def test_an_input_without_influence_is_named() -> None:
    shapes = torch.randn(2, 3, 4), torch.randn(1, 2, 4)
    graph_module = rewritten_graph(Function(lambda state, matrix: state * 2), shapes)
    state, matrix = inputs_of(graph_module)
    with raises(Refusal, "independent-of-adapter", containing=matrix):
        backpropagate(graph_module, [state, matrix], [matrix], 3)


def test_rounding_outside_a_layer_is_refused_instead_of_stopping_the_gradient() -> None:
    graph_module = rewritten_graph(quantized(8), inputs()[:2])
    last = graph_module.graph.find_nodes(op="call_function", target=aten.linear.default)[-1]
    with graph_module.graph.inserting_before(last):
        weight = graph_module.graph.call_function(aten.mul.Tensor, (last.args[1], 1.0))
    weight.meta["val"] = last.args[1].meta["val"]
    last.update_arg(1, weight)
    with raises(Refusal, "quantized-outside-layers", containing="torchao."):
        backpropagate(graph_module, ["state"], [], LENGTH)


def test_an_operator_without_a_derivative_is_refused() -> None:
    graph_module = rewritten_graph(Function(lambda x: torch.argsort(x).float() * 2), (torch.randn(2, 3, 4),))
    with refusal("no-backward-pass"):
        backpropagate(graph_module, inputs_of(graph_module), [], 3)


# Rules

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(4, 6).reshape(2, 12).view(24) ** 2,
    "mul.Scalar": lambda x: aten.mul.Scalar(x, 3.0),
    "div.Scalar": lambda x: aten.div.Scalar(x, 4.0),
    "sum.dim_IntList": lambda x: x * x[..., :1] * x[:1],
    "_softmax_backward_data": lambda x: torch.softmax(x, -1) ** 2,
    "_softmax_backward_data over rows": lambda x: torch.softmax(x, 0) ** 2,
    "sigmoid_backward": torch.sigmoid,
    "tanh_backward": torch.tanh,
    "silu_backward": F.silu,
    "softplus_backward": F.softplus,
    "threshold_backward": F.relu,
    "gelu_backward": F.gelu,
    "logical_and_": lambda x: x.clamp(-0.5, 0.5),
    "masked_fill_": lambda x: torch.minimum(x, x.flip(-1) ** 2),
    "slice_backward": lambda x: torch.cat([x[..., 1:3] ** 2, x[..., -2:]], -1) * x[:, 1:2],
    "slice_backward with steps": lambda x: torch.cat([x[..., 1::2] ** 2, x[..., ::3]], -1),
    "index_add": lambda x: x.reshape(6, 4).index_select(0, torch.tensor([0, 2, 2])) ** 2,
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_keeps_the_derivative_and_leaves_no_operator_of_autograd(name: str) -> None:
    def derivative(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        result = CASES[name](x).ravel()
        return torch.autograd.grad(result, x, weights[: len(result)])[0]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, generator=generator)
    weights = torch.randn(64, generator=generator)
    expected = derivative(x, weights)
    graph_module = make_fx(derivative, tracing_mode="fake")(x, weights)
    targets = {str(node.target) for node in graph_module.graph.nodes}
    assert any(name.split()[0] in target for target in targets & rules("backward").keys()), targets
    fill_in_values(graph_module)
    write_backward(graph_module)
    graph_module.recompile()
    # No operator may modify a value in place either.
    remaining = {str(node.target) for node in graph_module.graph.nodes}
    assert not [target for target in remaining if "_backward" in target or "_." in target]
    torch.testing.assert_close(graph_module(x, weights), expected, atol=1e-6, rtol=1e-5)


def test_every_rule_has_a_test() -> None:
    tested = {name.split()[0] for name in CASES}
    # A view with another name.
    untested = rules("backward").keys() - {"aten._unsafe_view.default"}
    assert {name for name in untested if not any(case in name for case in tested)} == set()
