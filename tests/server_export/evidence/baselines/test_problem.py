"""A baseline's loss equals the driver's up to float32 rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prge.engine import Call, ForwardEngine
from prge.errors import BundleError
from prge.formats.adapter import Adapter
from prge.objectives.classification_head import fit_cross_fitted, fit_head
from prge.objectives.examples import Example, sequences_of
from prge.objectives.objective import Loss
from prge.objectives.scoring import pooled_states, score
from server_export.checkpoint.loading import prepare_model
from server_export.oracle import apply_bundle_weights
from server_export.publishing.module_quantization import Int8Embedding
from tests.refusals import raises
from tests.rows import choice, completion, long_choice, random_completions
from tests.server_export.evidence.baselines.problems import build_problem, classified_rows
from tests.tiny_models import make_model

COMPLETIONS = [*random_completions(3, 100), completion(4, [5, 6, 7], prompt=2)]
CHOICES = [choice(1, [5, 6, 7, 8], [10, 11, 12], 2), choice(2, [9, 8], [10, 11], 0)]
LONG_CHOICES = [long_choice(1, [5, 6, 7], [[8, 9], [3, 4, 5], [6]], 1)]


def driver_loss(engine: ForwardEngine, adapter: Adapter, examples: list[Example]) -> float:
    return score(engine, adapter, examples).loss


@pytest.mark.parametrize("examples", [COMPLETIONS, CHOICES, LONG_CHOICES], ids=["text", "words", "answers"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "opt"])
def test_the_loss_of_a_decoder_equals_the_drivers(
    tmp_path: Path, architecture: str, examples: list[Example]
) -> None:
    problem, engine, adapter = build_problem(tmp_path, architecture, examples)
    expected = driver_loss(engine, adapter, examples)
    assert problem.loss(examples).item() == pytest.approx(expected, abs=1e-5)
    scored = score(problem.engine, adapter, examples).loss
    assert scored == pytest.approx(expected, abs=1e-5)
    assert problem.forward_passes(examples) == sum(len(example.sequences) for example in examples)


@pytest.mark.parametrize(("architecture", "pooling"), [("bert", "mean"), ("roberta", "first")])
def test_the_loss_of_an_encoder_with_cross_fitted_heads_equals_the_drivers(
    tmp_path: Path, architecture: str, pooling: str
) -> None:
    examples = classified_rows()
    problem, engine, adapter = build_problem(tmp_path, architecture, examples, pooling=pooling)
    states = pooled_states(engine, adapter, examples)
    labels, rows = np.array([e.label for e in examples]), [e.row for e in examples]
    heads = fit_cross_fitted(states, labels, rows, 2, 3)
    batch = examples[:4]
    expected = score(engine, adapter, batch, heads).loss
    assert problem.loss(batch).item() == pytest.approx(expected, abs=1e-5)
    alone = score(problem.engine, adapter, examples, problem.heads.head).loss
    assert alone == pytest.approx(
        score(engine, adapter, examples, fit_head(states, labels, 2)).loss, abs=1e-5
    )


@pytest.mark.parametrize("mode", ["merged", "inserted"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_baseline_starts_from_a_trained_adapter(tmp_path: Path, architecture: str, mode: str) -> None:
    problem, engine, adapter = build_problem(tmp_path, architecture, COMPLETIONS, lora_b=0.3)
    expected = driver_loss(engine, adapter, COMPLETIONS)
    assert abs(expected - driver_loss(engine, Adapter.zeros(adapter.modules), COMPLETIONS)) > 1e-3
    problem.merge_adapter() if mode == "merged" else problem.insert_adapter()
    assert problem.loss(COMPLETIONS).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("scheme", ["8da8w", "8da4w"])
def test_a_quantized_base_has_the_rounded_weights(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Makes the tiny table count as a large one.
    monkeypatch.setattr("server_export.quantize.quantization.EMBEDDING_BYTES", 1)
    problem, engine, adapter = build_problem(tmp_path, "llama", COMPLETIONS, scheme=scheme)
    assert isinstance(engine.network.get_input_embeddings(), Int8Embedding)
    expected = driver_loss(engine, adapter, COMPLETIONS)
    assert problem.loss(COMPLETIONS).item() == pytest.approx(expected, abs=1e-5)
    plain, _, _ = build_problem(tmp_path / "plain", "llama", COMPLETIONS)
    assert abs(problem.loss(COMPLETIONS).item() - plain.loss(COMPLETIONS).item()) > 1e-4


def test_gradients_equal_the_drivers(tmp_path: Path) -> None:
    problem, engine, adapter = build_problem(tmp_path, "llama", COMPLETIONS, lora_b=0.3)
    call = Call(sequences_of(COMPLETIONS), adapter.values[None])
    _, expected = engine.vjp(call, lambda o: Loss(COMPLETIONS, o[None]).grad_outputs / len(COMPLETIONS))
    values = problem.insert_adapter()
    problem.loss(COMPLETIONS).backward()
    assert values.grad is not None
    np.testing.assert_allclose(values.grad.numpy(), expected, atol=1e-6)


def test_full_logits_never_exist(tmp_path: Path) -> None:
    problem, _, _ = build_problem(tmp_path, "llama", CHOICES)
    shapes = []
    problem.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(output.shape))
    )
    problem.loss(CHOICES)
    # One position for each of the two prompts, although five words are compared.
    assert shapes == [(1, 2, 128)]


def test_another_model_is_refused(tmp_path: Path) -> None:
    problem, _, _ = build_problem(tmp_path, "llama", CHOICES)
    bundle = problem.bundle
    bundle.manifest["model"] = {"architecture": "LlamaForCausalLM", "parameters": 12}  # type: ignore[index]
    loaded = prepare_model(make_model("llama"), "other", True)
    with raises(BundleError, "model-differs", containing="other"):
        apply_bundle_weights(bundle, loaded)
