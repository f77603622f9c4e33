"""Settings of a run that depend on each other and on the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from device_runner.session.inputs import make_estimator
from device_runner.session.settings import RunSettings, settled
from prge.bundle import Bundle
from prge.differences import Antithetic, Differences, OneSided
from prge.errors import ConfigError
from prge.settings import parse_settings
from prge.tangents import Tangents
from tests.bundles import make_contract

STACK = Bundle(Path(), make_contract(), {"queries": 5})
TANGENT = Bundle(
    Path(), make_contract(kind="tangent", copies=1, queries=3), {"queries": 3}, make_contract(copies=1)
)


def _settings(**changes: Any) -> RunSettings:
    return RunSettings(bundle=Path("b"), train=Path("t"), out=Path("o"), **changes)


@pytest.mark.parametrize(
    ("bundle", "estimator", "queries"), [(STACK, "antithetic", 5), (TANGENT, "tangent", 3)]
)
def test_without_an_estimator_it_is_the_one_of_the_bundle(
    bundle: Bundle, estimator: str, queries: int
) -> None:
    found = settled(_settings(), bundle)
    assert (found.estimator, found.queries) == (estimator, queries)
    assert settled(found, bundle) == found


def test_a_stack_program_takes_any_difference_and_any_number_of_queries() -> None:
    found = settled(_settings(estimator="one-sided", queries=7), STACK)
    assert (found.estimator, found.queries) == ("one-sided", 7)


@pytest.mark.parametrize(
    ("bundle", "changes", "told"),
    [
        (STACK, {"estimator": "tangent"}, "for antithetic or one-sided.*export with --estimator tangent"),
        (TANGENT, {"estimator": "antithetic"}, "is for tangent.*export with --estimator antithetic"),
        (TANGENT, {"estimator": "one-sided"}, "is for tangent.*export with --estimator antithetic"),
        (TANGENT, {"queries": 4}, "--queries is 4, .*computes 3.*export with --queries 4"),
        (TANGENT, {"epsilon": 0.02}, "--epsilon belongs to --estimator antithetic or one-sided"),
        (TANGENT, {"directions": "gaussian"}, "--directions belongs to --estimator antithetic or one-sided"),
        (STACK, {"trunk_cache_dtype": "float16"}, "the bundle has no trunk.*export with --trunk-cache"),
        (STACK, {"share_directions": True}, "--share-directions belongs to --estimator tangent"),
    ],
)
def test_settings_that_dont_fit_the_bundle(bundle: Bundle, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        settled(_settings(**changes), bundle)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"baseline": "leave-one-out"}, "--baseline belongs to --estimator one-sided, .* is not given"),
        ({"normalize": True, "estimator": "antithetic"}, "--normalize belongs to --estimator one-sided"),
        ({"normalize": True, "estimator": "tangent"}, "--normalize belongs to --estimator one-sided"),
        ({"epsilon": 1.0, "estimator": "tangent"}, "--epsilon belongs to"),
        ({"share_directions": True, "estimator": "one-sided"}, "--share-directions belongs to"),
        (
            {"baseline": "leave-one-out", "estimator": "one-sided", "queries": 1},
            "--baseline leave-one-out needs --queries of at least 2",
        ),
    ],
)
def test_settings_without_a_meaning(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        _settings(**changes)


def test_a_default_that_is_given_is_no_mistake() -> None:
    words = ["--bundle", "b", "--train", "t", "--out", "o", "--epsilon", "0.01", "--directions", "rademacher"]
    given = parse_settings(RunSettings, words, "prge run")
    assert settled(given, TANGENT).estimator == "tangent"


def test_steps_to_evaluate_at_lie_within_the_run() -> None:
    words = ["--bundle", "b", "--train", "t", "--out", "o", "--steps", "8", "--evaluate-at"]
    assert parse_settings(RunSettings, [*words, "0", "3", "8"], "prge run").evaluate_at == [0, 3, 8]
    with pytest.raises(ConfigError, match="--evaluate-at has 9, there are only 8 --steps"):
        parse_settings(RunSettings, [*words, "3", "9"], "prge run")


def test_an_exports_single_query_is_too_few_to_leave_one_out() -> None:
    single = Bundle(Path(), make_contract(), {"queries": 1})
    with pytest.raises(ConfigError, match="needs --queries of at least 2"):
        settled(_settings(estimator="one-sided", baseline="leave-one-out"), single)


def test_estimators_have_what_the_settings_say() -> None:
    tangents = make_estimator(settled(_settings(share_directions=True, clip=0.5), TANGENT))
    assert isinstance(tangents, Tangents)
    assert (tangents.shared, tangents.clip) == (True, 0.5)
    differences = make_estimator(settled(_settings(directions="gaussian", clip=0.5, epsilon=0.1), STACK))
    assert isinstance(differences, Differences)
    assert differences.rule == Antithetic(5, 0.1)
    assert (differences.distribution, differences.clip) == ("gaussian", 0.5)
    one_sided = make_estimator(settled(_settings(estimator="one-sided", normalize=True), STACK))
    assert isinstance(one_sided, Differences) and one_sided.rule == OneSided(5, 0.01, "clean", True)
