"""Settings of a run that depend on each other and on the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from device_runner.session.inputs import make_estimator
from device_runner.session.settings import RunSettings, bundle_for, settled
from prge.bundle import Bundle
from prge.differences import Antithetic, Differences, OneSided
from prge.errors import ConfigError
from prge.settings import parse_settings
from prge.tangents import Tangents
from tests.bundles import make_contract, make_small_chain
from tests.rows import classified, long_choice

STACK = Bundle(Path(), make_contract(), {"queries": 5})
TANGENT = Bundle(
    Path(), make_contract(kind="tangent", copies=1, queries=3), {"queries": 3}, make_contract(copies=1)
)

CHAIN = Bundle(Path(), make_contract(), {}, chain=make_small_chain())


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


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lengths": [8]}, "--lengths is for a bundle that was exported without --roles"),
        ({"keep_programs": True}, "--keep-programs is for"),
        ({"program_bytes": 1}, "--program-bytes is for"),
        ({"trunk_cache_bytes": 0}, "--trunk-cache-bytes is for"),
        ({"trunk_cache_dtype": "float16"}, "--trunk-cache-dtype is for"),
    ],
)
def test_a_chain_has_no_programs_to_choose_from(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settled(_settings(**changes), CHAIN)


@pytest.mark.parametrize("changes", [{"memory": 1 << 20}, {"batch_size": 4}])
def test_a_whole_program_has_no_sizes_to_choose(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is for a bundle that was exported with --roles"):
        settled(_settings(**changes), STACK)


@pytest.mark.parametrize(
    ("changes", "kind", "sizes"),
    [
        ({}, "tangent", (1, 4, 4)),
        ({"estimator": "antithetic", "queries": 3}, "stack", (6, 4, 0)),
        ({"estimator": "one-sided", "batch_size": 2}, "stack", (5, 2, 0)),
        ({"estimator": "one-sided", "baseline": "leave-one-out"}, "stack", (4, 4, 0)),
        ({"estimator": "exact"}, "exact", (1, 4, 0)),
    ],
)
def test_a_run_on_a_chain_chooses_its_calls(
    changes: dict[str, Any], kind: str, sizes: tuple[int, int, int]
) -> None:
    contract = bundle_for(settled(_settings(**changes), CHAIN), CHAIN).contract
    assert contract.kind == kind
    assert (contract.copies, contract.batch_size, contract.queries) == sizes


def test_a_batch_has_room_for_the_widest_example_unless_its_size_is_named() -> None:
    examples = [long_choice(1, [1], [[2], [3]], 0), long_choice(2, [1], [[n, n] for n in range(6)], 0)]
    for given, expected in ((None, 6), (2, 2), (9, 9)):
        bundle = bundle_for(settled(_settings(batch_size=given), CHAIN), CHAIN, examples)
        assert bundle.contract.batch_size == expected


def test_an_exact_step_of_an_encoder_has_room_for_all_classes() -> None:
    bundle = Bundle(Path(), make_contract(), {}, chain=make_small_chain(readout="pooled"))
    examples = [classified(1, [1], 40, 0)]
    contract = bundle_for(settled(_settings(estimator="exact"), bundle), bundle, examples).contract
    assert contract.candidates == 40


def test_what_changed_in_a_resumed_run_is_told_by_the_run() -> None:
    """Its own settings, such as the queries of a tangent run, are no mistakes of who changes another one."""
    changes = {"estimator": "exact", "queries": 4}
    with pytest.raises(ConfigError, match="--queries belongs to"):
        _settings(**changes)
    assert settled(_settings(**changes, resume=Path("o")), CHAIN).estimator == "exact"


def test_a_call_that_is_too_large_names_the_runs_flags() -> None:
    settings = settled(_settings(queries=1 << 20, batch_size=1 << 12), CHAIN)
    with pytest.raises(ConfigError, match=r"(?s)inputs and outputs take .*fewer --queries or a smaller"):
        bundle_for(settings, CHAIN)
