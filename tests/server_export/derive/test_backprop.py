"""Backpropagation as an inference graph: of small modules, against autograd."""

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
from server_export.derive.backprop.joint import SLOPE, backpropagate
from server_export.derive.backprop.layers import TRANSPOSED, with_transposed
from server_export.derive.backprop.rules import ONES, write_backward
from server_export.ir.operators import rules
from server_export.ir.rewriting import rewritten_graph
from server_export.ir.shapes import fill_in_values
from server_export.ir.softmax_parts import SOFTMAX_PARTS, SoftmaxParts
from tests.refusals import raises, refusal
from tests.server_export.derive.tangent.graphs import Function, inputs_of, random, relative_difference

torch.set_num_threads(1)

aten = torch.ops.aten

ROWS, LENGTH, WIDTH, RANK = 2, 3, 32, 4


class Adapted(nn.Module):
    """Two frozen layers, an adapter on the second, attention over the tokens."""

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
    """A state, an adapter [1, rank, out] and the loss's slope by the answer."""
    shapes = (ROWS, LENGTH, WIDTH), (1, RANK, WIDTH), (ROWS, LENGTH, WIDTH)
    state, lora_b, slope = (random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    return state, lora_b, slope


def answers(graph: GraphModule, state: torch.Tensor, lora_b: torch.Tensor, slope: torch.Tensor) -> Any:
    given = {"state": state, ONES: torch.ones(1, LENGTH, 1), "lora_b": lora_b, SLOPE: slope}
    with torch.no_grad():
        return graph(*(given[name] for name in inputs_of(graph)))


def by_autograd(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Slopes by state and adapter."""
    state, lora_b, slope = inputs()
    state.requires_grad_(), lora_b.requires_grad_()
    by_state, by_adapter = torch.autograd.grad(module(state, lora_b), (state, lora_b), slope)
    return by_state, by_adapter


def constants(graph: GraphModule) -> set[str]:
    return {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}


def transposed(graph: GraphModule) -> set[str]:
    return {name for name in constants(graph) if name.startswith(TRANSPOSED)}


def test_a_graph_answers_the_slopes_of_autograd() -> None:
    module = Adapted()
    forward = rewritten_graph(module, inputs()[:2])
    graph = backpropagate(forward, ["state", "lora_b"], ["lora_b"], LENGTH)
    assert inputs_of(graph) == ["state", ONES, "lora_b", SLOPE]
    for ours, theirs in zip(answers(graph, *inputs()), by_autograd(module), strict=True):
        assert relative_difference(ours, theirs) < 1e-5
    # The graph that it was made of is what it was, and what the forward pass reads keeps its name.
    assert forward.graph.find_nodes(op="call_function", target=aten.linear.default)
    assert constants(graph) - transposed(graph) >= {"first.weight", "lora_a"}


def test_nothing_goes_back_below_what_is_wanted() -> None:
    forward = rewritten_graph(Adapted(), inputs()[:2])
    whole = backpropagate(forward, ["state", "lora_b"], ["lora_b"], LENGTH)
    lowest = backpropagate(forward, ["lora_b"], ["lora_b"], LENGTH)
    assert transposed(whole) == {f"{TRANSPOSED}first_weight", f"{TRANSPOSED}second_weight"}
    assert transposed(lowest) == set()
    (found,) = answers(lowest, *inputs())
    assert torch.equal(found, answers(whole, *inputs())[1])


def test_ones_are_no_input_where_no_tokens_are_added_up() -> None:
    graph = backpropagate(rewritten_graph(Adapted(), inputs()[:2]), ["lora_b"], ["lora_b"], LENGTH)
    assert inputs_of(graph) == ["state", "lora_b", SLOPE]


def test_a_blocks_transposed_weights_are_made_of_its_own() -> None:
    module = Adapted()
    graph = backpropagate(rewritten_graph(module, inputs()[:2]), ["state"], ["lora_b"], LENGTH)
    names = transposed(graph)
    made = with_transposed(module.state_dict(), names)
    assert names
    for name in names:
        torch.testing.assert_close(made[name], getattr(graph, name))


def test_what_is_chosen_takes_its_slopes_to_its_places() -> None:
    """Some numbers are masked before the choice, as those of groups of experts are."""

    class Choosing(Adapted):
        def forward(self, state: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
            state = super().forward(state, lora_b)
            masked = state + torch.full((WIDTH,), 0.0).index_fill(0, torch.tensor([1]), -torch.inf)
            shares, index = torch.topk(masked, 5)
            others = torch.sigmoid(state).gather(-1, index)
            return state * (shares * others).sum(-1, keepdim=True)

    module = Choosing()
    graph = backpropagate(rewritten_graph(module, inputs()[:2]), ["state", "lora_b"], ["lora_b"], LENGTH)
    for ours, theirs in zip(answers(graph, *inputs()), by_autograd(module), strict=True):
        assert relative_difference(ours, theirs) < 1e-5


class Rows(nn.Module):
    """Two adapters of rank 1, one after the other, and a mean."""

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


def test_each_row_goes_back_by_itself() -> None:
    module, (state, lora_b, slope) = Rows(), inputs()
    lora_b = lora_b[:, :1]
    graph = backpropagate(rewritten_graph(module, (state, lora_b)), ["state", "lora_b"], ["lora_b"], LENGTH)
    wanted = state.requires_grad_(), lora_b.requires_grad_()
    by_state, by_adapter = torch.autograd.grad(module(*wanted), wanted, slope)
    found = answers(graph, state, lora_b, slope)
    for ours, theirs in zip(found, (by_state, by_adapter), strict=True):
        assert relative_difference(ours, theirs) < 1e-5
    made = with_transposed(module.state_dict(), transposed(graph))
    for name in ("lora_a_0", "lora_a_1"):
        assert torch.equal(made[f"{TRANSPOSED}{name}"], getattr(module, name)[0])


# Quantized layers


class StraightThrough(torch.autograd.Function):
    """A quantized layer whose rounding has the derivative 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor], weight: Any) -> Any:
        ctx.save_for_backward(weight)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None, None


def straight_through(module: nn.Module) -> None:
    """Give a module's quantized layers a derivative, in place: that of their weights as they were rounded."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            weight, forward = layer.weight.dequantize(), layer.forward
            layer.forward = lambda x, f=forward, w=weight: StraightThrough.apply(x, f, w)  # type: ignore[method-assign]


def quantized(bits: int) -> Adapted:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    module = Adapted()
    kind = {4: torch.int4, 8: torch.int8}[bits]
    quantize_(
        module, Int8DynamicActivationIntxWeightConfig(weight_dtype=kind, weight_granularity=PerGroup(32))
    )
    return module


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_layer_passes_the_slope_straight_through(bits: int) -> None:
    module = quantized(bits)
    forward = rewritten_graph(module, inputs()[:2])
    graph = backpropagate(forward, ["state", "lora_b"], ["lora_b"], LENGTH)
    found = answers(graph, *inputs())
    straight_through(module)
    expected = by_autograd(module)
    for ours, theirs in zip(found, expected, strict=True):
        # What is left is the rounding of what flows back: int8 activations, and weights rounded once more.
        assert float(F.cosine_similarity(ours.ravel(), theirs.ravel(), dim=0)) > 0.999
        assert float(ours.norm() / theirs.norm()) == pytest.approx(1, abs=0.02)
    codes = [getattr(graph, name) for name in transposed(graph) if name.endswith("qdata")]
    assert [tensor.dtype for tensor in codes] == [torch.int8] * 2


class Head(nn.Module):
    """Logits of a vocabulary whose words have much in common, as those of language models do."""

    WORDS, POSITIONS = 4096, 64

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, self.WORDS, bias=False)
        weight = random(self.WORDS, WIDTH, seed=1) + random(WIDTH, seed=2)
        self.layer.weight.requires_grad_(False).copy_(weight / 4)

    def forward(self, state: torch.Tensor, shift: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = SOFTMAX_PARTS(self.layer(state), shift, index)
        return found


def test_small_probabilities_go_back_through_a_quantized_head() -> None:
    """Rounded to 0 beside the target's slope, they would be missing alike at all positions."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerAxis, quantize_

    head = Head()
    state = 2 * random(1, Head.POSITIONS, WIDTH, seed=3, dtype=torch.float32)
    shift = head.layer(state).logsumexp(-1, keepdim=True)
    index = torch.arange(Head.POSITIONS).reshape(1, -1, 1) * 61
    slope = torch.tensor([-1.0, 1.0]).expand(1, Head.POSITIONS, 2).contiguous()
    slope[:, :3] = 0  # positions that nothing is asked at
    quantize_(
        head, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0))
    )
    graph = backpropagate(rewritten_graph(head, (state, shift, index)), ["state"], [], Head.POSITIONS)
    given = {"state": state, "shift": shift, "index": index, SLOPE: slope}
    with torch.no_grad():
        (found,) = graph(*(given[name] for name in inputs_of(graph)))
    straight_through(head)
    state.requires_grad_()
    SoftmaxParts.apply(head.layer(state), shift, index).backward(slope)
    assert state.grad is not None and not found[:, :3].any()
    for ours, theirs, least in ((found, state.grad, 0.999), (found.sum(1), state.grad.sum(1), 0.985)):
        assert float(F.cosine_similarity(ours.ravel(), theirs.ravel(), dim=0)) > least
        assert float(ours.norm() / theirs.norm()) == pytest.approx(1, abs=0.05)


# What can't be


def test_what_the_answer_does_not_depend_on_is_named() -> None:
    shapes = torch.randn(2, 3, 4), torch.randn(1, 2, 4)
    graph_module = rewritten_graph(Function(lambda state, matrix: state * 2), shapes)
    state, matrix = inputs_of(graph_module)
    with raises(Refusal, "independent-of-adapter", saying=matrix):
        backpropagate(graph_module, [state, matrix], [matrix], 3)


def test_rounding_outside_a_layer_is_refused_instead_of_stopping_the_gradient() -> None:
    graph_module = rewritten_graph(quantized(8), inputs()[:2])
    last = graph_module.graph.find_nodes(op="call_function", target=aten.linear.default)[-1]
    with graph_module.graph.inserting_before(last):
        weight = graph_module.graph.call_function(aten.mul.Tensor, (last.args[1], 1.0))
    weight.meta["val"] = last.args[1].meta["val"]
    last.update_arg(1, weight)
    with raises(Refusal, "quantized-outside-layers", saying="torchao."):
        backpropagate(graph_module, ["state"], [], LENGTH)


def test_an_operator_without_a_derivative_is_told() -> None:
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
    # Nor one that changes a value that is there.
    left = {str(node.target) for node in graph_module.graph.nodes}
    assert not [target for target in left if "_backward" in target or "_." in target]
    torch.testing.assert_close(graph_module(x, weights), expected, atol=1e-6, rtol=1e-5)


def test_every_rule_has_a_test() -> None:
    tested = {name.split()[0] for name in CASES}
    # Views under another name.
    untested = rules("backward").keys() - {"aten._unsafe_view.default"}
    assert {name for name in untested if not any(case in name for case in tested)} == set()
