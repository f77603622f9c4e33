"""Backpropagation as an inference graph: in the engine, against autograd through the eager model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("executorch")

import torch
import torch.nn.functional as F
from eager_engine import EagerEngine
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from prge.contract import GRADIENT_PREFIX, LORA_B_PREFIX, AdaptedModule, Contract
from prge.engine import Array
from prge.errors import BundleError
from prge.exact import loss_inputs
from prge.examples import Batch, Example, make_batch
from prge.head import CrossFittedHeads, Head
from prge.objectives import losses, scores
from server_export.check.verification import run_program, run_step, verify
from server_export.derive.backprop.joint import backpropagate
from server_export.derive.backprop.rules import RULES
from server_export.graph.shapes import fill_in_values
from server_export.graph.writing import apply_rules
from server_export.lower.lowering import lower, rewritten_graph
from server_export.lower.method_graphs import export_programs
from server_export.model.loss import answer_slopes
from server_export.model.program import BuiltProgram, example_inputs
from tests.rows import choice, classified, completion, long_choice
from tests.server_export.programs import build
from tests.tiny_models import ARCHITECTURES, LENGTH, SHALLOW

torch.set_num_threads(1)

aten = torch.ops.aten

Tensors = tuple[torch.Tensor, ...]


class Lowered:
    """An exact program without its method for scoring: its graphs, its file."""

    def __init__(self, folder: Path, built: BuiltProgram) -> None:
        self.built = replace(built, score_contract=None)
        self.inputs = example_inputs(built.contract, seed=4, lora_b_scale=0.1)
        self.programs = export_programs(self.built)
        lowered = lower(self.programs)
        self.reports = lowered.reports
        self.path = folder / "program.pte"
        lowered.write(self.path)

    def answers(self, inputs: Tensors | None = None) -> Tensors:
        """Outputs in the engine; a trunk goes first."""
        return run_step(
            lambda values, method: run_program(self.path, values, method), self.built, inputs or self.inputs
        )

    @property
    def transposed(self) -> list[str]:
        """Weights of the backward pass, without the rows that means are taken with."""
        state = self.programs[self.built.step_method].state_dict
        return [name for name in state if name.startswith("transposed_") and "row" not in name]


def named(contract: Contract, inputs: Sequence[torch.Tensor]) -> dict[str, Array]:
    """Arrays by input name; the adapter of a P-RGE program has one copy."""
    arrays = {spec.name: value.numpy() for spec, value in zip(contract.inputs, inputs, strict=True)}
    return {name: array[None] if name.startswith(LORA_B_PREFIX) else array for name, array in arrays.items()}


# Against autograd


@pytest.mark.export
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_engine_answers_the_gradient_of_autograd(architecture: str, tmp_path: Path) -> None:
    lowered = Lowered(tmp_path, build(architecture, estimator="exact", target_modules="all-linear"))
    contract = lowered.built.contract
    stack = replace(contract, kind="stack", classes=0)
    arrays = named(contract, lowered.inputs)
    eager = EagerEngine(lowered.built.module, stack)
    plain = {spec.name: arrays[spec.name] for spec in stack.inputs}
    (answer,) = (torch.from_numpy(value) for value in eager.forward(plain).values())
    rest = lowered.inputs[len(stack.inputs) :]
    expected = eager.gradients(plain, answer_slopes(contract, answer, rest).numpy())
    found, *gradients = lowered.answers()
    torch.testing.assert_close(found, answer, atol=2e-5, rtol=1e-5)
    largest = max(float(np.abs(array).max()) for array in expected.values())
    for spec, gradient in zip(contract.outputs[1:], gradients, strict=True):
        theirs = expected[LORA_B_PREFIX + spec.name.removeprefix(GRADIENT_PREFIX)][0]
        np.testing.assert_allclose(gradient.numpy(), theirs, atol=1e-4 * largest, err_msg=spec.name)
    assert lowered.reports[lowered.built.step_method].delegated_products == 1.0


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


def straight_through(model: nn.Module) -> None:
    """Give a model's quantized layers a derivative, in place: that of their weights as they were rounded."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight, forward = layer.weight.dequantize(), layer.forward
            layer.forward = lambda x, f=forward, w=weight: StraightThrough.apply(x, f, w)  # type: ignore[method-assign]


@pytest.mark.export
@pytest.mark.parametrize(
    ("architecture", "scheme"), [("llama", "8da4w"), ("qwen3", "8da8w"), ("gpt2", "8da4w"), ("bert", "8da8w")]
)
def test_a_quantized_layer_passes_the_gradient_straight_through(
    architecture: str, scheme: str, tmp_path: Path
) -> None:
    lowered = Lowered(tmp_path, build(architecture, estimator="exact", quantize=scheme))
    contract, module = lowered.built.contract, lowered.built.module
    _, *gradients = lowered.answers()
    straight_through(module.model)
    first = len(replace(contract, kind="stack", classes=0).inputs)
    leading, adapter = first - len(contract.modules), slice(first - len(contract.modules), first)
    matrices = [matrix.clone().requires_grad_() for matrix in lowered.inputs[adapter]]
    answer = module(*lowered.inputs[:leading], *(matrix[None] for matrix in matrices))
    slopes = answer_slopes(contract, answer.detach(), lowered.inputs[first:])
    expected = torch.autograd.grad(answer, matrices, slopes)
    ours, theirs = (torch.cat([part.ravel() for part in parts]) for parts in (gradients, expected))
    # What is left is the rounding of what flows back: int8 activations, and weights rounded once more.
    assert float(F.cosine_similarity(ours, theirs, dim=0)) > 0.998
    assert float(ours.norm() / theirs.norm()) == pytest.approx(1, abs=0.02)
    state = lowered.programs["forward"].state_dict
    assert {state[name].dtype for name in lowered.transposed if name.endswith("qdata")} == {torch.int8}


@pytest.mark.export
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_a_cut_program_answers_the_same_and_nothing_goes_back_below_the_adapter(
    architecture: str, tmp_path: Path
) -> None:
    upper = {"estimator": "exact", "adapt_layers": "top:1", "target_modules": ["q_proj", "v_proj"]}
    if architecture == "bert":
        upper["target_modules"] = ["query", "value"]
    folders = [tmp_path / name for name in ("whole", "cut", "all")]
    for folder in folders:
        folder.mkdir()
    whole = Lowered(folders[0], build(architecture, **upper))
    cut = Lowered(folders[1], build(architecture, **upper, trunk_cache=True))
    every = Lowered(
        folders[2], build(architecture, estimator="exact", target_modules=upper["target_modules"])
    )
    for ours, theirs in zip(cut.answers(), whole.answers(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    # A decoder's head; down, gate, up and output of its block, or three layers of an encoder's.
    assert len(whole.transposed) == len(cut.transposed) == (5 if architecture == "llama" else 3)
    # And its queries, keys and values, both lora_a, and the block below down to its output.
    assert len(every.transposed) == (5 + 5 + 4 if architecture == "llama" else 3 + 5 + 3)


@pytest.mark.export
def test_methods_for_shorter_rows_answer_what_the_longest_does(tmp_path: Path) -> None:
    built = build("llama", SHALLOW["llama"], estimator="exact", lengths=[LENGTH // 2])
    programs = export_programs(built)
    assert set(programs) == {"forward", "forward_6", "score", "score_6"}
    path = tmp_path / "program.pte"
    lower(programs).write(path)
    # Every method is held against the module, the shorter ones against the longest.
    found = verify(path, built, programs)
    assert found.tangent_difference is not None
    assert found.tangent_difference < 1e-5


@pytest.mark.export
def test_an_adapter_that_moves_nothing_is_refused(tmp_path: Path) -> None:
    # The last layer's queries of the first token can't reach a readout of the first token.
    settings = {"readout": "pooled", "pooling": "first", "target_modules": ["q_proj"], "estimator": "exact"}
    built = build("llama", SHALLOW["llama"], **settings)
    built = replace(built, score_contract=None)
    programs = export_programs(built)
    path = tmp_path / "program.pte"
    lower(programs).write(path)
    with pytest.raises(BundleError, match="the gradient of the lowered program is zero"):
        verify(path, built, programs)


@pytest.mark.export
def test_rounding_outside_a_layer_is_refused_instead_of_stopping_the_gradient() -> None:
    built = build("llama", SHALLOW["llama"], estimator="exact", quantize="8da8w")
    plain = replace(built.contract, kind="stack")
    graph_module = rewritten_graph(built.module, example_inputs(plain))
    last = [node for node in graph_module.graph.nodes if node.target is aten.linear.default][-1]
    with graph_module.graph.inserting_before(last):
        weight = graph_module.graph.call_function(aten.mul.Tensor, (last.args[1], 1.0))
    weight.meta["val"] = last.args[1].meta["val"]
    last.update_arg(1, weight)
    with pytest.raises(BundleError, match=r"the quantized operator torchao.*is in no layer"):
        backpropagate(graph_module, built.contract)


@pytest.mark.export
def test_an_operator_without_a_derivative_is_named() -> None:
    built = build("llama", SHALLOW["llama"], estimator="exact")
    graph_module = rewritten_graph(built.module, example_inputs(replace(built.contract, kind="stack")))
    last = [node for node in graph_module.graph.nodes if node.target is aten.linear.default][-1]
    with graph_module.graph.inserting_before(last):
        order = graph_module.graph.call_function(aten.argsort.default, (last.args[0],))
        back = graph_module.graph.call_function(aten.to.dtype, (order, torch.float32))
    last.update_arg(0, back)
    with pytest.raises(BundleError, match="has no backward pass"):
        backpropagate(graph_module, built.contract)


# The loss

DECODER = Contract(
    kind="exact", readout="logprobs", copies=1, batch_size=7, sequence_length=8, positions=4, width=0,
    vocabulary_size=11, label_tokens=(), modules=(AdaptedModule("layer", 2, 6, 11),),
)  # fmt: skip
ENCODER = replace(DECODER, readout="pooled", positions=0, width=6, classes=5)

BATCHES: dict[str, list[Example]] = {
    "completions": [completion(1, [1, 2, 3, 4], 2), completion(2, [4, 5, 6], 1)],
    "candidates": [choice(row, [row, 2], [1, 3, 8][: 2 + row % 2], row % 2) for row in range(1, 7)],
    "longer candidates": [long_choice(row, [row], [[1], [2, 3, 4], [5, 6]], row % 3) for row in range(1, 3)],
    "both": [choice(1, [1], [2, 3], 1), completion(2, [1, 2, 3], 1)],
}


def slopes_of_losses(batch: Batch, answers: Array, head: Any = None) -> Array:
    """Central differences of the mean loss of prge.objectives by every answer."""

    def loss(values: Array) -> float:
        name = "logprobs" if head is None else "pooled"
        return float(losses(scores(batch, {name: values}, 1, head), batch.labels).mean())

    found = np.zeros(answers.shape)
    for place in np.ndindex(answers.shape):
        moved = [answers.copy(), answers.copy()]
        moved[0][place] += 1e-5
        moved[1][place] -= 1e-5
        found[place] = (loss(moved[0]) - loss(moved[1])) / 2e-5
    return found


def slopes_in_the_program(contract: Contract, batch: Batch, answers: Array, head: Any = None) -> Array:
    inputs = loss_inputs(contract, batch, batch.examples, head)
    names = [spec.name for spec in contract.inputs if spec.name in inputs]
    assert all(inputs[spec.name].dtype == spec.dtype for spec in contract.inputs if spec.name in inputs)
    tensors = [torch.from_numpy(inputs[name]) for name in names]
    return answer_slopes(contract, torch.from_numpy(answers.astype(np.float32)), tensors).numpy()


@pytest.mark.parametrize("name", BATCHES)
def test_slopes_are_those_of_the_objectives(name: str) -> None:
    batch = make_batch(BATCHES[name], DECODER)
    # Log-probabilities of sequences are far below what exp can tell from 0.
    answers = -40 * np.random.default_rng(0).random((7, 4))
    found = slopes_in_the_program(DECODER, batch, answers)
    np.testing.assert_allclose(found, slopes_of_losses(batch, answers), atol=2e-5)
    # Rows that hold no example, and slots that nothing is read from, have none.
    assert not found[batch.owner < 0].any()
    assert not found[batch.weights == 0].any()


@pytest.mark.parametrize("folds", [0, 2])
def test_slopes_of_an_encoder_are_those_of_its_head(folds: int) -> None:
    random = np.random.default_rng(0)

    def head() -> Head:
        made = Head(3, 6)
        made.values[:] = random.normal(size=made.size)
        return made

    heads = CrossFittedHeads([head() for _ in range(folds)]) if folds else head()
    batch = make_batch([classified(row, [row, 2], 3, row % 3) for row in range(1, 6)], ENCODER)
    answers = random.normal(size=(7, 6))
    found = slopes_in_the_program(ENCODER, batch, answers, heads)
    np.testing.assert_allclose(found, slopes_of_losses(batch, answers, heads), atol=2e-5)


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
    "threshold_backward": F.relu,
    "gelu_backward": F.gelu,
    "slice_backward": lambda x: torch.cat([x[..., 1:3] ** 2, x[..., -2:]], -1) * x[:, 1:2],
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
    targets = {node.target for node in graph_module.graph.nodes}
    rule = next((target for target in RULES if target in targets and name.split()[0] in str(target)), None)
    assert rule is not None, [str(target) for target in targets]
    fill_in_values(graph_module)
    apply_rules(graph_module, RULES)
    graph_module.recompile()
    assert not [node for node in graph_module.graph.nodes if "_backward" in str(node.target)]
    torch.testing.assert_close(graph_module(x, weights), expected, atol=1e-6, rtol=1e-5)


def test_every_rule_has_a_test() -> None:
    tested = {name.split()[0] for name in CASES}
    # Views under another name.
    untested = {str(target) for target in RULES} - {"aten._unsafe_view.default"}
    assert {name for name in untested if not any(case in name for case in tested)} == set()
