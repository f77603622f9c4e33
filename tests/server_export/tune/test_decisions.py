"""Decisions of a tuning, in tables of cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.errors import ConfigError
from server_export.tune import decisions
from server_export.tune.decisions import Decision, Pace, RowFacts
from tests.refusals import raises


def facts(rows: int = 100, longest: int = 60, widest: int = 1) -> RowFacts:
    return RowFacts(rows, longest, rows * longest, widest)


@pytest.mark.parametrize(
    ("objective", "tokens", "beta"),
    [("dpo", 1, 1.0), ("dpo", 20, 1.0), ("kto", 80, 0.25), ("dpo", 1000, 0.1), ("ipo", 80, None)],
)
def test_beta_is_larger_for_short_completions(objective: str, tokens: int, beta: float | None) -> None:
    facts = RowFacts(50, 2000, 10**6, 2, 100 * tokens, objective=objective)
    decision = decisions.beta(facts)
    assert (decision.value if decision else None) == beta


@pytest.mark.parametrize(
    ("parameters", "scheme"), [(900_000, "fp32"), (49_999_999, "fp32"), (135_000_000, "8da4w")]
)
def test_weights_of_a_small_model_are_not_quantized(parameters: int, scheme: str) -> None:
    assert decisions.scheme(parameters).value == scheme


@pytest.mark.parametrize(
    ("longest", "positions", "length"),
    [
        (1, 512, 64),
        (64, 512, 64),
        (65, 512, 128),
        (500, 512, 512),
        (100_000, 512, 512),
        (100_000, None, 100_032),
    ],
)
def test_the_longest_row_fits_if_the_model_has_the_positions(
    longest: int, positions: int | None, length: int
) -> None:
    assert decisions.sequence_length(longest, positions).value == length


def test_the_memory_of_a_step_limits_the_length_of_rows() -> None:
    decision = decisions.sequence_length(5_000, 32_768, lambda length: length << 20, 2 << 30)
    assert decision.value == 1216
    assert "a step on 5,056 would take 4.94 GiB, on 1,216 1.19 GiB of the 2.00 GiB" in decision.why


@pytest.mark.parametrize(("rows", "batch"), [(3, 1), (10, 2), (40, 4), (999, 8), (67_000, 16)])
def test_the_batch_size_grows_with_the_number_of_rows(rows: int, batch: int) -> None:
    assert decisions.batch_size(facts(rows)).value == batch


@given(st.integers(1, 10**6))
def test_a_run_has_a_few_epochs_within_bounds(rows: int) -> None:
    batch = decisions.batch_size(facts(rows)).value
    read = batch * decisions.steps(facts(rows), batch).value
    assert rows <= read or read >= 24_000
    assert read <= max(24_000, 40 * rows) + batch


@pytest.mark.parametrize(("epochs", "expected"), [(1.0, 25), (3.0, 75), (0.5, 13), (0.001, 1), (100.0, 2500)])
def test_epochs_of_the_user_determine_the_steps(epochs: float, expected: int) -> None:
    decision = decisions.steps(replace(facts(), rows=200), 8, epochs)
    assert decision.value == expected
    assert "epochs of 200 rows, 8 per step" in decision.why
    repeated = decisions.steps(replace(facts(), rows=200), 8, epochs, repeats=3)
    assert repeated.value == 3 * expected and repeated.why == f"{decision.why}, each for 3 steps"


@pytest.mark.parametrize(("fewest", "folds"), [(None, None), (1, 0), (9, 0), (10, None)])
def test_few_rows_of_a_class_are_never_held_out(fewest: int | None, folds: int | None) -> None:
    decision = decisions.head_folds(replace(facts(), fewest=fewest))
    assert (decision and decision.value) == folds


PACE = Pace(start=2.0, step=1.0, evaluation=0.5)
MAX_STEPS = Decision("steps", 500, "")


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("spent", [1_700.0, 1_100.0, 800.0])
def test_the_steps_fit_into_the_time_left_with_all_starts_and_evaluations(
    spent: float, searched: bool
) -> None:
    by_name = {each.name: each for each in decisions.steps_in(30, spent, PACE, MAX_STEPS, searched)}
    steps, left = by_name["steps"], max(1_800 - spent, 600)
    searched = searched and "learning_rate" not in by_name
    assert decisions.training_seconds(steps.value, PACE, searched) <= left
    if steps != MAX_STEPS:
        assert decisions.training_seconds(steps.value + 2, PACE, searched) > 0.9 * left


def test_training_gets_a_third_of_the_minutes_even_after_a_long_export() -> None:
    [decision] = decisions.steps_in(30, 9_000, PACE, Decision("steps", 9_000, ""), searched=False)
    assert 500 < decision.value < 600 and "a third of 30 minutes" in decision.why


def test_the_time_of_a_search_includes_all_of_its_runs() -> None:
    """With 120 steps there are at most six runs of 10 steps and three of 30, with two evaluations each."""
    runs = 6 * (2 + 10 + 1) + 3 * (2 + 30 + 1)
    final = 2 + 120 + 11 * 0.5
    assert decisions.training_seconds(120, PACE, searched=True) == runs + final
    assert decisions.training_seconds(120, PACE, searched=False) == final


def test_without_time_for_a_search_the_reason_is_given() -> None:
    steps, rate = decisions.steps_in(2, 60.0, PACE, MAX_STEPS, searched=True)
    assert "1 min 0 s left" in steps.why
    assert rate.name == "learning_rate" and "2 minutes leave no time" in rate.why
    assert 30 < steps.value < 60
    assert decisions.steps_in(0.01, 60.0, PACE, MAX_STEPS, searched=True)[0].value == 1


def test_a_pace_excludes_the_time_of_fitting_heads() -> None:
    """The time until the first step includes fitting heads; the rest of it is the start."""
    seconds = [49.0 + 0.8 * step for step in range(1, 11)]
    pace = decisions.pace(seconds, heads=48.0, evaluation=2.0, whole=48 + 2 + 8 + 5)
    assert pace.step == pytest.approx(0.8) and pace.start == pytest.approx(5)
    assert decisions.pace([49.0], 48.0, 0.0, 50.0).step == pytest.approx(1)


@pytest.mark.parametrize(("steps", "evaluations"), [(1, 1), (16, 8), (19, 10), (100, 10), (105, 10)])
def test_a_run_has_ten_evaluations_at_most(steps: int, evaluations: int) -> None:
    assert math.ceil(steps / decisions.eval_steps(steps)) == evaluations


def needed(fixed: int, per_example: int) -> Callable[[int], int]:
    """Return a function from the number of examples of a step to the bytes of a run."""
    return lambda examples: fixed + per_example * examples


@pytest.mark.parametrize(("limit", "expected"), [(2_000, 8), (1_000, 8), (900, 4), (500, 2), (300, 1)])
def test_a_step_has_as_many_examples_as_fit_into_memory(limit: int, expected: int) -> None:
    unlimited = decisions.Decision("batch_size", 8, "because")
    decision = decisions.within_memory(unlimited, limit, needed(100, 100))
    assert decision.value == expected and "because" in decision.why


@given(st.integers(300, 5_000), st.integers(1, 64))
def test_the_chosen_batch_size_needs_no_more_than_the_limit(limit: int, batch: int) -> None:
    bytes_of = needed(50, 20)
    chosen = decisions.within_memory(decisions.Decision("batch_size", batch, ""), limit, bytes_of).value
    assert bytes_of(chosen) <= limit and chosen <= batch


def test_too_little_memory_names_the_minimum() -> None:
    unlimited = decisions.Decision("batch_size", 8, "")
    with raises(ConfigError, "memory-too-little", containing="--memory 200 bytes") as caught:
        decisions.within_memory(unlimited, 200, needed(100, 1000))
    assert caught.value.problems[0].endswith(" 1 MB")


@pytest.mark.parametrize(
    ("estimator", "generates", "roles"),
    [
        (None, True, ["forward", "backward", "prefill", "decode"]),
        ("exact", False, ["forward", "backward"]),
        ("tangent", True, ["forward", "jvp", "prefill", "decode"]),
        ("antithetic", False, ["forward"]),
    ],
)
def test_roles_are_those_that_steps_scores_and_samples_need(
    estimator: Any, generates: bool, roles: list[str]
) -> None:
    assert decisions.roles(estimator, generates).value == roles


def test_the_best_rate_is_that_of_the_longest_trials() -> None:
    trials = [(0.001, 10, 2.0), (0.01, 10, 1.0), (0.001, 30, 0.9), (0.01, 30, 1.1)]
    assert decisions.best_rate(trials).value == 0.001


def test_the_best_rate_for_a_reward_has_the_highest_one() -> None:
    decision = decisions.best_rate(
        [(0.001, 20, -0.25), (0.01, 20, -0.5), (0.1, 20, math.inf)], is_reward=True
    )
    assert decision.value == 0.01
    assert decision.why == "reward 0.5 after 20 steps; 0.25 with 0.001, -inf with 0.1"
    epsilon = decisions.best_epsilon({0.01: -0.5, 0.03: -0.75})
    assert epsilon.value == 0.03 and epsilon.why.endswith("0.75 with 0.03, 0.5 with 0.01")


def test_prompts_of_a_reward_are_read_less_often() -> None:
    prompts = replace(facts(rows=200), completed=True)
    assert decisions.steps(prompts, 8).value == 100 < decisions.steps(facts(rows=200), 8).value


def test_rates_that_all_diverge_are_an_error() -> None:
    with raises(ConfigError, "all-rates-diverged", containing="0.001, 0.01"):
        decisions.best_rate([(0.001, 10, math.inf), (0.01, 10, math.inf)])


def adapter_of(*arguments: Any) -> dict[str, Any]:
    return {each.name: each.value for each in decisions.adapted(*arguments)}


@pytest.mark.parametrize(
    ("estimator", "free"), [(None, 600_000_000), ("exact", 600_000_000), ("exact", 1 << 40)]
)
def test_exact_gradients_train_both_matrices_of_all_layers(estimator: str | None, free: int) -> None:
    adapter = adapter_of(estimator, False, 1_000_000, free)
    assert adapter == {"target_modules": ["all-linear"], "rank": 16, "adapter": "lora", "init": "random"}
    assert adapter_of(estimator, True, 1_000_000, free) == {**adapter, "adapter": "lora-fa"}


@pytest.mark.parametrize(
    ("estimator", "numel", "free", "init"),
    [
        ("tangent", 1_000, 1 << 40, "random"),
        ("antithetic", 1_000, 1 << 40, "random"),
        (None, None, 1 << 40, "eva"),
        (None, 1_875_001, 600_000_000, "eva"),
    ],
)
def test_a_small_adapter_is_trained_if_a_large_one_does_not_fit(
    estimator: str | None, numel: int | None, free: int, init: str
) -> None:
    assert adapter_of(estimator, False, numel, free) == {"rank": 8, "adapter": "lora-fa", "init": init}


def test_a_short_run_that_was_better_than_the_final_one_is_repeated() -> None:
    trials = [(0.001, 25, 0.33), (0.01, 75, 0.27), (0.003, 75, 0.37)]
    by_name = {each.name: each.value for each in decisions.shorter(trials, 0.35, 300)}
    assert by_name == {"learning_rate": 0.01, "steps": 75}


@pytest.mark.parametrize(
    ("trials", "best"), [([(0.01, 75, 0.27)], 0.27), ([(0.01, 75, 0.27)], None), ([], 0.3)]
)
def test_the_final_run_stays_if_no_short_run_was_better(
    trials: list[tuple[float, int, float]], best: float | None
) -> None:
    assert decisions.shorter(trials, best, 300) == []


def test_a_short_run_with_an_equal_reward_is_not_repeated() -> None:
    trials = [(0.01, 20, -0.5 - 1e-7)]
    assert decisions.shorter(trials, -0.5, 300, is_reward=True) == []
    rate, _ = decisions.shorter(trials, -0.25, 300, is_reward=True)
    assert rate.why == "reward 0.5 after 20 steps with 0.01, at best 0.25 in 300 steps"


def test_rows_of_messages_get_a_template_if_there_is_none() -> None:
    assert decisions.chat_template(has_template=True) is None
    decision = decisions.chat_template(has_template=False)
    assert decision is not None and decision.value == "plain" and "no chat template" in decision.why


@pytest.mark.parametrize(
    ("without", "begun", "expected"), [(1.37, 1.323, "always"), (3.264, 3.335, "never"), (2.0, 1.99, "never")]
)
def test_the_frozen_models_losses_decide_how_texts_begin(without: float, begun: float, expected: str) -> None:
    decision = decisions.prepend_bos("<s>", without, begun)
    assert decision.value == expected
    assert f"{without:.4g}" in decision.why and f"{begun:.4g}" in decision.why


def test_a_run_may_use_half_of_a_phones_free_memory() -> None:
    assert decisions.memory(4 << 30) == Decision(
        "memory", 2 << 30, "half of the 4.00 GiB that the phone has free"
    )
