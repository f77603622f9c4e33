"""The evaluation of a stored comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server_export.evidence.compare.command import write_report
from server_export.evidence.compare.outcome import find_target, judge, to_json
from tests.comparisons import SEEDS, make_method, make_result, make_run


def test_target_is_a_share_of_the_references_gain(tmp_path: Path) -> None:
    target = find_target(make_result(tmp_path))
    start, best = 1.0 + 0.02, 0.2 + 0.8 * 0.3**4 + 0.02
    assert target.value == pytest.approx(start + 0.8 * (best - start))
    assert "80% of the way" in target.origin


def test_given_target(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    result["settings"] |= {"target": 0.4}
    outcome = judge(result)
    assert outcome.target.origin == "given"
    assert outcome.figures["backprop-lora-fa"]["seconds_to_target"].mean is not None
    assert outcome.figures["tangent"]["seconds_to_target"].censored == 3


def test_rows_to_a_target_met_by_the_first_evaluation_are_a_bound(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    curves = [(0, 0.73), (2016, 0.108), (4032, 0.103)]
    for run in result["methods"]["backprop-lora-fa"]["runs"]:
        run["curve"] = [
            {"step": rows // 48, "forward_passes": rows, "seconds": rows / 1000, "loss": loss}
            for rows, loss in curves
        ]
    outcome = judge(result)
    rows = outcome.figures["backprop-lora-fa"]["forward_passes_to_target"]
    assert (rows.mean, rows.bounded) == (2016, frozenset(SEEDS))
    # A ratio to a bound was never measured.
    assert {duel.ratio for duel in outcome.duels if duel.figure.key == "forward_passes_to_target"} == {None}
    assert to_json(result, outcome)["methods"]["backprop-lora-fa"]["forward_passes_to_target"]["bounded"] == 3


def test_without_the_reference_another_sets_the_target(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    del result["methods"]["backprop-lora-fa"]
    assert "best of p-rge" in find_target(result).origin
    result["methods"] = {"exact": make_method(False, [])}
    assert find_target(result).value is None
    assert {duel.winner for duel in judge(result).duels} == {None}


def test_no_target_without_a_gain(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    for run in result["methods"]["backprop-lora-fa"]["runs"]:
        run["curve"] = run["curve"][:1]
    target = find_target(result)
    assert target.value is None
    assert "never became better" in target.origin
    assert judge(result).figures["p-rge"]["seconds_to_target"].censored == 3


def test_random_weights_have_no_quality(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    result["settings"]["model"] = "random:smollm2-135m"
    outcome = judge(result)
    assert outcome.target.value is None
    assert {duel.figure.key for duel in outcome.duels} == {
        "peak_mb", "own_peak_mb", "activation_mb", "tokens_per_second",
    }  # fmt: skip
    write_report(result, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "weights are random" in text
    assert "accuracy on test rows" not in text


def test_figures_and_winners_are_computed(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    for run in result["methods"]["backprop-lora-fa"]["runs"]:
        run["own_idle_bytes"] = 300_000_000
    outcome = judge(result)
    backprop, p_rge = outcome.figures["backprop-lora-fa"], outcome.figures["p-rge"]
    assert backprop["peak_mb"].mean == pytest.approx(360)
    assert backprop["own_peak_mb"].mean == pytest.approx(100)
    assert p_rge["peak_mb"].mean == pytest.approx(50, abs=0.1)
    assert p_rge["own_peak_mb"] == p_rge["peak_mb"]
    assert outcome.figures["tangent"]["seconds_to_target"].censored == 3
    winners = {duel.figure.key: duel.winner for duel in outcome.duels}
    assert winners["test_loss"] == winners["forward_passes_to_target"] == "backward"
    assert winners["peak_mb"] == winners["activation_mb"] == "forward"
    assert "tokens_per_second" not in winners
    ratio = next(duel.ratio for duel in outcome.duels if duel.figure.key == "activation_mb")
    assert ratio is not None
    assert ratio.value == pytest.approx(1 / 6)


def test_without_the_reference_no_method_wins(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    del result["methods"]["backprop-lora-fa"]
    assert {duel.winner for duel in judge(result).duels} == {None}


def test_accuracies_within_their_standard_error_are_ties(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    close = [
        make_run(seed, 0.3, 0.02, 48, test={"loss": 0.5, "accuracy": 0.80 + 0.001 * seed}) for seed in SEEDS
    ]
    far = [make_run(seed, 0.3, 0.02, 48, test={"loss": 0.5, "accuracy": 0.81}) for seed in SEEDS]
    result["methods"] = {"p-rge": make_method(True, close), "backprop-lora": make_method(False, far)}
    winners = {duel.figure.key: duel.winner for duel in judge(result).duels}
    assert winners["test_accuracy"] == "tie"


def test_json_has_fractions_and_nulls(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    actual = json.loads(json.dumps(to_json(result, judge(result)), allow_nan=False))
    backprop, tangent = actual["methods"]["backprop-lora-fa"], actual["methods"]["tangent"]
    assert 0 < backprop["test_accuracy"]["mean"] < 1
    assert backprop["seconds_to_target"]["censored"] == 0
    assert tangent["seconds_to_target"] == {
        "mean": None, "lowest": None, "highest": None, "seeds": 0, "censored": 3, "bounded": 0,
    }  # fmt: skip
    assert tangent["learning_rate"] == 0.01
    assert actual["methods"]["exact"]["failures"]
    assert actual["meta"]["prge"] == "0.1.0"
