"""Settings of a run that depend on each other and on the bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from device_runner.session.plan import _resolve_steps, plan_run, resolve_settings
from device_runner.session.settings import RunSettings
from prge.cli.settings import parse_settings
from prge.errors import ConfigError
from prge.formats.bundle import Bundle
from prge.formats.signatures import BACKWARD, FORWARD, JVP
from prge.objectives.preferences import DPO, KTO, OfflineGRPO
from prge.training.estimators.differences import Antithetic, Differences, OneSided
from prge.training.estimators.exact import Exact
from prge.training.estimators.table import make_estimator
from prge.training.estimators.tangents import TangentEstimator
from prge.training.recipe import Recipe
from tests.bundles import in_memory_bundle, make_small_chain
from tests.refusals import raises
from tests.rows import classification, completion, long_choice

CHAIN = in_memory_bundle()


def with_roles(roles: set[str]) -> Bundle:
    programs = [
        replace(program, methods={role: method for role, method in program.methods.items() if role in roles})
        for program in make_small_chain().programs
    ]
    return in_memory_bundle(make_small_chain(programs=tuple(programs)))


def _settings(**changes: Any) -> RunSettings:
    return RunSettings(bundle=Path("b"), train=Path("t"), out=Path("o"), **changes)


@pytest.mark.parametrize(
    ("roles", "estimator", "queries"),
    [({FORWARD, JVP, BACKWARD}, "exact", None), ({FORWARD, JVP}, "tangent", 4), ({FORWARD}, "antithetic", 4)],
)
def test_the_default_estimator_is_the_best_one_that_the_bundle_supports(
    roles: set[str], estimator: str, queries: int | None
) -> None:
    bundle = with_roles(roles)
    result = resolve_settings(_settings(), bundle)
    assert (result.estimator, result.queries) == (estimator, queries)
    assert resolve_settings(result, bundle) == result


@pytest.mark.parametrize(
    ("changes", "optimizer", "adam_beta2"),
    [
        ({}, "adam", 0.98),
        ({"estimator": "tangent"}, "adam", 0.999),
        ({"optimizer": "sgd", "adam_beta2": 0.9, "estimator": "antithetic"}, "sgd", 0.9),
    ],
)
def test_the_optimizer_follows_from_the_estimator(
    changes: dict[str, Any], optimizer: str, adam_beta2: float
) -> None:
    bundle = in_memory_bundle()
    result = resolve_settings(_settings(**changes), bundle)
    assert (result.optimizer, result.adam_beta2) == (optimizer, adam_beta2)
    assert resolve_settings(result, bundle) == result


@pytest.mark.parametrize(
    ("changes", "code", "value"),
    [
        ({"estimator": "tangent"}, "role-missing", "tangent"),
        ({"estimator": "exact"}, "role-missing", "antithetic, fzoo"),
        ({"max_example_grad_norm": 1.0, "batch_size": 1}, "settings-unusable", "--max-example-grad-norm"),
        ({"sample_prompts": Path("p")}, "role-missing", "--sample-prompts"),
        ({"trunk_cache_bytes": 1}, "trunk-missing", "--adapt-layers"),
    ],
)
def test_settings_that_do_not_fit_the_bundle_are_refused(
    changes: dict[str, Any], code: str, value: str
) -> None:
    with raises(ConfigError, code, containing=value):
        resolve_settings(_settings(**changes), with_roles({FORWARD}))


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"epsilon": 1.0, "estimator": "tangent"}, "--epsilon"),
        ({"queries": 2, "estimator": "exact"}, "--queries"),
        ({"share_directions": True, "estimator": "fzoo"}, "--share-directions"),
        ({"max_example_grad_norm": 1.0, "estimator": "tangent", "batch_size": 1}, "--estimator exact"),
        ({"max_example_grad_norm": 1.0, "loss_normalisation": "token"}, "--loss-normalisation"),
        ({"max_example_grad_norm": 1.0, "batch_size": 1, "head_learning_rate": 0.1}, "--head-learning-rate"),
        ({"sample_prompts": Path("p"), "sample_rows": 3}, "--sample-rows"),
        ({"reward": "reward.yaml", "loss_normalisation": "token"}, "--loss-normalisation"),
        ({"max_example_grad_norm": -1.0, "batch_size": 1}, "-1.0"),
    ],
)
def test_settings_without_a_meaning_are_refused(changes: dict[str, Any], value: str) -> None:
    with raises(ConfigError, "settings-unusable", containing=value):
        _settings(**changes)


def test_a_default_that_is_set_is_accepted() -> None:
    arguments = ["--bundle", "b", "--train", "t", "--out", "o", "--epsilon", "0.05"]
    settings = parse_settings(RunSettings, arguments, "prge run")
    assert resolve_settings(settings, with_roles({FORWARD, JVP})).estimator == "tangent"


def test_steps_to_evaluate_at_lie_within_the_run() -> None:
    arguments = ["--bundle", "b", "--train", "t", "--out", "o", "--steps", "8", "--eval-at"]
    assert parse_settings(RunSettings, [*arguments, "0", "3", "8"], "prge run").eval_at == [0, 3, 8]
    with raises(ConfigError, "settings-unusable", containing="--eval-at"):
        parse_settings(RunSettings, [*arguments, "3", "9"], "prge run")


def test_epochs_replace_steps() -> None:
    arguments = ["--bundle", "b", "--train", "t", "--out", "o", "--epochs", "2"]
    with raises(ConfigError, "settings-unusable", containing="--epochs"):
        parse_settings(RunSettings, [*arguments, "--steps", "8"], "prge run")
    settings = parse_settings(RunSettings, [*arguments, "--eval-at", "3", "--batch-size", "12"], "prge run")
    examples = [classification(number, [1], 2, 0) for number in range(25)]

    def planned(settings: RunSettings) -> RunSettings:
        return plan_run(CHAIN, examples, settings).settings

    result = planned(settings)
    # 12 rows per step: 50 rows take 5 steps, of which the last exceeds one epoch.
    assert (result.epochs, result.steps) == (None, 5)
    assert planned(result) == result and result.warmup_steps == 1
    assert planned(replace(settings, epochs=0.001, eval_at=[])).steps == 1
    # grpo reads each batch for several steps.
    again = replace(settings, reward="reward.yaml", objective="grpo", num_iterations=4)
    assert (again.steps_per_batch, replace(again, objective="es").steps_per_batch) == (4, 1)
    assert _resolve_steps(again, batch=12, examples=25).steps == 4 * result.steps
    with raises(ConfigError, "settings-unusable", containing="--eval-at"):
        planned(replace(settings, epochs=0.1))


def test_the_name_of_a_data_set_is_no_path() -> None:
    """Paths become absolute, so that the run can be resumed from another folder."""
    result = replace(_settings(), train=Path("nyu-mll/glue:sst2"), dev=Path("dev.jsonl")).resolved()
    assert result.train == Path("nyu-mll/glue:sst2")
    assert result.dev is not None and result.dev.is_absolute() and result.out.is_absolute()


def test_estimators_have_the_values_of_the_settings() -> None:
    tangents = make_estimator(
        resolve_settings(_settings(estimator="tangent", share_directions=True, max_grad_norm=0.5), CHAIN)
    )
    assert isinstance(tangents, TangentEstimator)
    assert (tangents.queries, tangents.shared, tangents.max_grad_norm) == (4, True, 0.5)
    differences = make_estimator(
        resolve_settings(_settings(estimator="antithetic", max_grad_norm=0.5, epsilon=0.1), CHAIN)
    )
    assert isinstance(differences, Differences)
    assert differences.rule == Antithetic(4, 0.1)
    assert differences.max_grad_norm == 0.5
    fzoo = make_estimator(resolve_settings(_settings(estimator="fzoo"), CHAIN))
    exact = make_estimator(
        resolve_settings(_settings(max_grad_norm=0.5, max_example_grad_norm=0.1, batch_size=4), CHAIN)
    )
    assert isinstance(exact, Exact)
    assert (exact.max_grad_norm, exact.max_example_grad_norm) == (0.5, 0.1)
    assert isinstance(fzoo, Differences) and fzoo.rule == OneSided(4, 0.05)


@pytest.mark.parametrize(
    ("changes", "role", "sizes"),
    [
        ({}, "backward", (1, 4, 0)),
        ({"estimator": "tangent"}, "jvp", (1, 4, 4)),
        ({"estimator": "antithetic", "queries": 3}, "forward", (6, 4, 0)),
        ({"estimator": "fzoo", "batch_size": 2}, "forward", (5, 2, 0)),
        ({"estimator": "exact"}, "backward", (1, 4, 0)),
        # Each of these examples is computed alone.
        ({"estimator": "exact", "max_example_grad_norm": 0.1, "batch_size": 3}, "backward", (1, 1, 0)),
    ],
)
def test_the_plan_of_a_run_has_the_sizes_of_its_steps(
    changes: dict[str, Any], role: str, sizes: tuple[int, int, int]
) -> None:
    plan = plan_run(CHAIN, [], _settings(**changes))
    assert plan.role == plan.shape.role == role
    assert (plan.shape.copies, plan.shape.sequences, plan.shape.queries) == sizes


@pytest.mark.parametrize(
    ("sequences", "changes", "examples", "expected_sequences"),
    [
        (1, {}, 4, 4),
        (1, {"batch_size": 6}, 6, 6),
        # Pairs, and rows of six candidates: an example counts once, however many sequences it has.
        (2, {}, 2, 4),
        (2, {"batch_size": 4}, 4, 8),
        (3, {}, 1, 3),
        (6, {}, 1, 6),
        (6, {"batch_size": 2}, 2, 12),
        (1, {"batch_size": 3, "max_example_grad_norm": 0.1, "estimator": "exact"}, 3, 1),
    ],
)
def test_the_batch_size_counts_the_examples_of_a_step(
    sequences: int, changes: dict[str, Any], examples: int, expected_sequences: int
) -> None:
    narrow = completion(1, [1, 2], 1)
    widest = long_choice(2, [1], [[n, n] for n in range(sequences)], 0) if sequences > 1 else narrow
    training = [narrow, widest] * 6
    plan = plan_run(CHAIN, training, _settings(**changes))
    assert (plan.recipe.batch_size, plan.shape.sequences) == (examples, expected_sequences)
    assert len(plan.recipe.sampler(training).batch(0)) == examples
    assert (plan.shape.sequences_per_example, plan.shape.tokens) == (
        sequences,
        len(widest.sequences[0].tokens),
    )


def test_a_loss_that_compares_examples_has_all_of_a_step_at_once() -> None:
    training = [long_choice(row, [1], [[2] * 8, [3] * 9], 0) for row in range(1, 99)]
    settings = _settings(batch_size=64)
    separate, together = (plan_run(CHAIN, training, settings, loss).shape for loss in (DPO(0.1), KTO(0.1)))
    assert (separate.sequences, separate.sequences_at_once) == (128, 52)
    assert (together.sequences, together.sequences_at_once) == (128, 128)


def test_gradients_of_single_examples_need_a_loss_of_single_examples() -> None:
    settings = _settings(max_example_grad_norm=0.1, objective="grpo", batch_size=2)
    with raises(ConfigError, "clipping-compared-examples", containing="--max-example-grad-norm"):
        plan_run(CHAIN, [completion(1, [1, 2], 1)], settings, OfflineGRPO(0.0))


def test_rows_that_no_step_of_the_estimator_takes_are_refused() -> None:
    long = [completion(1, [1] * 17, 1)]
    with raises(ConfigError, "row-too-long", containing="17"):
        plan_run(CHAIN, long, _settings())


def test_what_changed_in_a_resumed_run_is_reported_by_the_run() -> None:
    """Stored settings, such as the queries of a tangent run, are no errors when another setting changes."""
    changes = {"estimator": "exact", "queries": 4}
    with raises(ConfigError, "settings-unusable", containing="--queries"):
        _settings(**changes)
    assert resolve_settings(_settings(**changes, resume=Path("o")), CHAIN).estimator == "exact"


def test_a_step_that_is_too_large_names_the_runs_flags() -> None:
    settings = _settings(estimator="tangent", queries=1 << 20, batch_size=1 << 12)
    with raises(ConfigError, "step-too-large", containing="--queries"):
        plan_run(CHAIN, [], settings)


def test_settings_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    stored = {"estimator": "tangent", "guided": True}
    with raises(ConfigError, "run-of-other-version", containing="guided"):
        Recipe.from_record(stored)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    with raises(ConfigError, "settings-unusable", containing="guided"):
        parse_settings(RunSettings, ["--config", str(tmp_path / "config.yaml")], "prge run")
