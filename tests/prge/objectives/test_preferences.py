"""Preference losses and their gradients, against torch's autograd in float64 and with every estimator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from prge.errors import ConfigError
from prge.formats.adapter import Adapter
from prge.objectives.examples import Example
from prge.objectives.objective import CROSS_ENTROPY, Loss
from prge.objectives.preferences import (
    DPO,
    IPO,
    KTO,
    ORPO,
    ObjectiveFlags,
    Preference,
    SimPO,
    describe_objective,
    make_objective,
    resolve_objective,
)
from prge.objectives.scoring import score, with_reference_scores
from prge.training.estimators.differences import Antithetic, Differences, OneSided
from prge.training.estimators.directions import DirectionSampler
from prge.training.estimators.exact import Exact
from prge.training.estimators.protocol import Estimator, Step
from prge.training.estimators.tangents import TangentEstimator
from prge.training.evaluation import displacement_warning, evaluate
from prge.training.sampler import Sampler
from tests.numpy_engine import NumpyEngine
from tests.refusals import raises
from tests.rows import completion, long_choice

OBJECTIVES: dict[str, Preference] = {
    "dpo": DPO(0.3),
    "dpo, smoothed": DPO(0.3, 0.2),
    "ipo": IPO(0.2),
    "simpo": SimPO(2.0, 0.7),
    "orpo": ORPO(0.4),
    "kto": KTO(0.3),
}


def pairs(count: int, seed: int = 0) -> list[Example]:
    """Return pairs of answers of different lengths; every other row is liked."""
    random = np.random.default_rng(seed)
    result = []
    for row in range(1, count + 1):
        answers = [random.integers(0, 11, size).tolist() for size in (2, 1 + row % 3)]
        example = long_choice(row, random.integers(0, 11, 2).tolist(), answers, 0)
        result.append(
            replace(example, liked=row % 2 == 0, reference=tuple(random.normal(-2, 0.3, 2).tolist()))
        )
    return result


def by_torch(name: str, scores: torch.Tensor, examples: list[Example]) -> torch.Tensor:
    """Return the losses of one copy by the formulas of the papers."""
    objective: Any = OBJECTIVES[name]
    beta, reference = objective.beta, torch.tensor([each.reference for each in examples], dtype=torch.float64)
    lengths = torch.tensor([[len(s.targets) for s in each.sequences] for each in examples])
    ratios = (scores - reference) * lengths
    if name.startswith("dpo"):
        wrong, margin = objective.label_smoothing, beta * (ratios[:, 0] - ratios[:, 1])
        return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
    if name == "ipo":
        return ((scores - reference) @ torch.tensor([1.0, -1], dtype=torch.float64) - 1 / (2 * beta)) ** 2
    if name == "simpo":
        return -logsigmoid(beta * (scores[:, 0] - scores[:, 1]) - objective.gamma)
    if name == "orpo":
        odds = scores.exp() / (1 - scores.exp())
        return -scores[:, 0] - beta * logsigmoid((odds[:, 0] / odds[:, 1]).log())
    distance = ratios[:, 1].mean().clamp(min=0).detach()
    liked = torch.tensor([each.liked for each in examples])
    away = torch.where(liked, ratios[:, 0] - distance, distance - ratios[:, 0])
    return 1 - torch.sigmoid(beta * away)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("level", [-2.0, -0.05, -9.0])
def test_losses_and_gradients_match_autograd(name: str, level: float) -> None:
    examples = pairs(8)
    table = np.minimum(np.random.default_rng(1).normal(level, abs(level) / 4, (1, 8, 2)), -1e-4)
    scores = torch.tensor(table[0], dtype=torch.float64, requires_grad=True)
    expected = by_torch(name, scores, examples)
    expected.sum().backward()
    assert scores.grad is not None
    np.testing.assert_allclose(OBJECTIVES[name].losses(table, examples)[0], expected.detach(), rtol=1e-12)
    np.testing.assert_allclose(
        OBJECTIVES[name].gradients(table, examples)[0], scores.grad, rtol=1e-9, atol=1e-13
    )


def test_losses_far_from_the_start_stay_finite() -> None:
    examples = pairs(4)
    table = np.array([[[-1e5, -1e-9], [-1e-9, -1e5], [0.0, 0.0], [-700.0, -1.0]]])
    for name, objective in OBJECTIVES.items():
        assert np.isfinite(objective.losses(table, examples)).all(), name
        assert np.isfinite(objective.gradients(table, examples)).all(), name


def test_the_distance_to_the_start_is_the_same_for_all_copies_and_never_negative() -> None:
    examples = pairs(4)
    references = np.array([each.reference for each in examples])
    table = np.stack([references, references])
    table[0, :, 1] += 1.0
    result = KTO(0.3).losses(table, examples)
    np.testing.assert_array_equal(result[0], result[1])
    away = 0.3 * np.mean([len(each.sequences[1].targets) for each in examples]) / 2
    np.testing.assert_allclose(result[0, 0], 1 / (1 + np.exp(away)), rtol=1e-12)
    table[0, :, 1] -= 9.0
    np.testing.assert_allclose(KTO(0.3).losses(table, examples), 0.5)


def _step(name: str, engine: NumpyEngine) -> Step:
    """Return a step on four pairs whose scores differ from their reference."""
    adapter = Adapter.zeros(engine.model.modules)
    examples = with_reference_scores(engine, adapter, pairs(4))
    adapter.values[:] = np.random.default_rng(0).normal(0, 0.3, adapter.size)
    return Step(adapter, examples, 1, 0, objective=OBJECTIVES[name])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tangents_are_the_exact_gradient_along_a_direction(name: str) -> None:
    engine = NumpyEngine()
    step = _step(name, engine)
    exact = Exact().measure(engine, step)
    tangents = TangentEstimator(4, shared=True)
    result = tangents.measure(engine, step)
    assert exact.gradient is not None
    assert exact.loss == pytest.approx(result.loss, rel=1e-5)
    for query in range(4):
        alone = np.zeros(result.projected_gradients.shape)
        alone[query] = 4.0
        along = tangents.gradient({"projected_gradients": alone}, 1, 0, step.adapter.modules)
        expected = float(exact.gradient @ along)
        assert result.projected_gradients[query].mean() == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_differences_are_derivatives(name: str) -> None:
    engine = NumpyEngine()
    step = _step(name, engine)
    gradient = Exact().measure(engine, step).gradient
    assert gradient is not None
    result = Differences(Antithetic(4, 1e-2)).measure(engine, step).projected_gradients
    for query in range(4):
        along = DirectionSampler(1, 0, step.adapter.size)(query)
        assert result[query] == pytest.approx(float(gradient @ along), rel=0.03, abs=3e-3)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_only_the_loss_that_compares_a_steps_examples_is_not_separate(name: str) -> None:
    """With a separable loss, examples have the same losses and gradients in any batch."""
    objective, examples = OBJECTIVES[name], pairs(6)
    # Scores above their references make KTO's mean positive.
    table = np.minimum(np.random.default_rng(2).normal(-1, 0.3, (1, 6, 2)), -0.1)
    parts = slice(0, 2), slice(2, 6)
    same = all(
        np.allclose(
            np.concatenate([whole(table[:, part], examples[part]) for part in parts], 1),
            whole(table, examples),
            rtol=1e-12,
            atol=0,
        )
        for whole in (objective.losses, objective.gradients)
    )
    assert same == objective.is_separable == (name != "kto")


ESTIMATORS: dict[str, tuple[Estimator, float]] = {
    "antithetic": (Differences(Antithetic(8, 1e-3)), 0.1),
    "fzoo": (Differences(OneSided(7, 1e-3)), 0.02),
    "tangents": (TangentEstimator(8), 0.1),
    "exact": (Exact(), 0.1),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_by_every_estimator(name: str, estimator: str) -> None:
    engine, objective = NumpyEngine(), OBJECTIVES[name]
    method, rate = ESTIMATORS[estimator]
    adapter = Adapter.zeros(engine.model.modules)
    rows = with_reference_scores(engine, adapter, pairs(12))
    sampler = Sampler(rows, 4, 1)
    before = score(engine, adapter, rows, objective=objective).loss
    for number in range(40):
        step = Step(adapter, sampler.batch(number), 1, number, objective=objective)
        fields = method.measure(engine, step).journal_fields
        steep = 0.1 if name == "ipo" else 1.0
        adapter.values -= steep * rate * method.gradient(fields, 1, number, adapter.modules)
    assert score(engine, adapter, rows, objective=objective).loss < before


def test_a_weight_multiplies_loss_and_gradient() -> None:
    rows = [completion(1, [1, 2, 3], 1), replace(completion(2, [4, 5], 1), weight=3.0)]
    result = Loss(rows, np.array([[-1.0, -2, -5]]))
    np.testing.assert_allclose(result.losses, [[1.5, 15]])
    np.testing.assert_allclose(result.grad_scores, [[[-1], [-3]]])
    np.testing.assert_allclose(result.grad_outputs, [-0.5, -0.5, -3])


def test_weights_change_the_loss_of_an_evaluation_and_not_its_perplexity() -> None:
    engine = NumpyEngine()
    adapter = Adapter.zeros(engine.model.modules)
    plain = [completion(1, [1, 2, 3], 1), completion(2, [4, 5], 1)]
    heavy = [replace(each, weight=2.0) for each in plain]
    (one, _), (two, _) = (evaluate(engine, adapter, each, None) for each in (plain, heavy))
    assert two["loss"] == pytest.approx(2 * one["loss"])
    assert two["perplexity"] == one["perplexity"]


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo"])
def test_an_evaluation_of_preferences_has_figures(name: str) -> None:
    engine = NumpyEngine()
    adapter = Adapter.zeros(engine.model.modules)
    rows = with_reference_scores(engine, adapter, pairs(6))
    if name != "kto":
        rows = [replace(each, liked=None) for each in rows]
    record, scored = evaluate(engine, adapter, rows, None, objective=OBJECTIVES[name])
    assert (record["chosen_change"], record["rejected_change"]) == (0, 0)
    assert record["value"] == -scored.loss
    if name != "orpo":
        assert (record["pairs_right"], record["margin"]) == (0.5, 0)
    # Chosen answers become less likely by half a nat per token, rejected ones by one nat.
    moved = [
        replace(
            each, reference=tuple(value + fall for value, fall in zip(each.reference, (0.5, 1), strict=True))
        )
        for each in rows
    ]
    result, _ = evaluate(engine, adapter, moved, None, objective=OBJECTIVES[name])
    assert result["value"] == pytest.approx(-result["loss"] - 0.5)
    chosen = [each for each in moved if each.liked is not False]
    lengths = np.array([len(each.sequences[0].targets) for each in chosen])
    assert result["chosen_change"] == pytest.approx(-0.5 * lengths.mean())
    assert displacement_warning(result)


def test_a_warning_for_chosen_rows_that_became_less_likely() -> None:
    assert displacement_warning({"chosen_change": 0.0, "rejected_change": -9.0}) == ""
    assert displacement_warning({}) == ""
    aside = displacement_warning({"chosen_change": -1.0, "rejected_change": -9.0})
    assert aside.endswith("fell by 1 since the start (likelihood displacement)")
    assert "harms what is chosen" in displacement_warning({"chosen_change": -6.0, "rejected_change": -9.0})
    assert "harms" not in displacement_warning({"chosen_change": -1.0})


def test_a_loss_without_its_reference_is_refused() -> None:
    row = replace(pairs(1)[0], reference=())
    with pytest.raises(ValueError, match="row 1"):
        DPO(0.1).losses(np.zeros((1, 1, 2)), [row])
    assert ORPO(0.1).losses(np.full((1, 1, 2), -1.0), [row]).shape == (1, 1)


def test_objectives_by_name_with_their_defaults() -> None:
    flags = ObjectiveFlags()
    assert make_objective("dpo", flags) == DPO(0.1)
    assert make_objective("simpo", flags) == SimPO(2.0, 1.0)
    assert make_objective("kto", replace(flags, beta=0.5)) == KTO(0.5)
    assert make_objective("completion", flags) is CROSS_ENTROPY
    assert describe_objective(CROSS_ENTROPY) is None
    assert describe_objective(DPO(0.1)) == {
        "name": "dpo",
        "beta": 0.1,
        "label_smoothing": 0.0,
    }
    with raises(ConfigError, "setting-of-other-objective", containing="--label-smoothing"):
        make_objective("ipo", replace(flags, label_smoothing=0.1))
    with raises(ConfigError, "setting-of-other-objective", containing="--beta"):
        make_objective("completion", replace(flags, beta=0.1))


def test_the_columns_choose_an_objective() -> None:
    assert [resolve_objective("auto", rows) for rows in ("", "pairs", "ratings")] == [
        "completion",
        "dpo",
        "kto",
    ]
    assert resolve_objective("kto", "pairs") == "kto"
    assert resolve_objective("completion", "pairs") == "completion"
    with pytest.raises(ValueError, match="dpo"):
        resolve_objective("dpo", "ratings")
    with pytest.raises(ValueError, match="candidates"):
        resolve_objective("candidates", "pairs")
