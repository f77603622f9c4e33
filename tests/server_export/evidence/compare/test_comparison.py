"""A comparison with fake verbs: calls, skipped work, and failures of single methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prge.cli.settings import settings_to_yaml
from prge.errors import RunError
from server_export.evidence.compare.command import compare
from tests.comparisons import FakeVerbs, settings_for, write_run
from tests.refusals import raises

RATES = '{"backprop-lora-fa": 0.01, "p-rge": 0.03}'
BOTH = ("--methods", "backprop-lora-fa", "p-rge", "--seeds", 1, 2, "--learning-rates", RATES)


def run(out: Path, verbs: FakeVerbs, *arguments: object) -> dict[str, Any]:
    return compare(settings_for(out, *arguments), "prge compare", verbs)


def test_searches_then_runs_each_seed(tmp_path: Path) -> None:
    verbs = FakeVerbs()
    result = run(tmp_path / "cmp", verbs, *BOTH)
    # Both methods run on one bundle.
    assert verbs.verbs().count("export") == 1
    # One measurement, three trials, one more beyond the edge at 0.03, and two seeds.
    assert verbs.verbs().count("baseline") == 7
    backprop, p_rge = result["methods"]["backprop-lora-fa"], result["methods"]["p-rge"]
    assert backprop["learning_rate"] == p_rge["learning_rate"] == 0.03
    assert [trial["learning_rate"] for trial in backprop["search"]] == [0.00333, 0.01, 0.03, 0.09]
    assert [run["seed"] for run in p_rge["runs"]] == [1, 2]
    assert p_rge["runs"][0]["test"]["accuracy"] == 0.75
    assert backprop["runs"][0]["test"]["accuracy"] == 0.875
    assert backprop["runs"][0]["activation_bytes"] == 7_000_000
    assert (p_rge["runs"][0]["steps"], backprop["runs"][0]["steps"]) == (24000 // 32, 24000 // 48)
    assert result["hashes"].keys() == {"train rows", "dev rows", "test rows", "bundle"}
    assert result["idle_bytes"] is None or result["idle_bytes"] > 10_000_000


def test_all_methods_are_evaluated_at_the_same_rows(tmp_path: Path) -> None:
    verbs = FakeVerbs()
    run(tmp_path / "cmp", verbs, *BOTH)
    rows = {"baseline": 48, "run": 32}
    evaluated = {
        verb: [step * rows[verb] for step in settings["eval_at"]]
        for verb, settings in verbs.calls
        if verb in rows and "/runs/" in settings["out"]
    }
    assert evaluated["baseline"][:4] == [0, 48, 96, 96 + 48]
    series = [48 * 1.3**power for power in range(24)]
    for verb, actual in evaluated.items():
        assert all(any(point <= got < point + rows[verb] for got in actual) for point in series), verb


def test_only_reported_runs_read_test_rows(tmp_path: Path) -> None:
    verbs = FakeVerbs()
    run(tmp_path / "cmp", verbs, *BOTH)
    reading = [str(settings) for _, settings in verbs.calls if "test.jsonl" in str(settings)]
    assert len(reading) == 4
    assert all("/runs/" in output for output in reading)


def test_the_same_command_continues_and_accepts_more_seeds(tmp_path: Path) -> None:
    run(tmp_path / "cmp", FakeVerbs(), *BOTH)
    again = FakeVerbs()
    run(tmp_path / "cmp", again, *BOTH)
    assert again.calls == []
    more = ("--methods", "p-rge", "--seeds", 1, 2, 3, "--learning-rates", RATES)
    run(tmp_path / "cmp", again, *more)
    assert again.verbs() == ["run", "eval"]


def test_unfinished_runs_on_the_engine_are_resumed_and_others_start_again(tmp_path: Path) -> None:
    arguments = (*BOTH, "--search-trials", 1)
    out = tmp_path / "cmp"
    write_run(out / "runs/p-rge-1/run", 3, "running")
    write_run(out / "runs/backprop-lora-fa-1/run", 3, "interrupted")
    settings = settings_for(out, *arguments)
    (out / "config.yaml").write_text(settings_to_yaml(settings))
    verbs = FakeVerbs()
    compare(settings, "prge compare", verbs)
    assert ("run", {"resume": str(out / "runs/p-rge-1/run")}) in verbs.calls
    assert verbs.verbs().count("baseline") == 3


def test_a_failing_method_does_not_affect_the_others(tmp_path: Path) -> None:
    verbs = FakeVerbs(broken=["baseline"])
    result = run(tmp_path / "cmp", verbs, *BOTH)
    assert result["methods"]["backprop-lora-fa"]["runs"] == []
    assert "baseline said this" in result["methods"]["backprop-lora-fa"]["failures"][0]
    # A method that can't be measured has no trials.
    assert verbs.verbs().count("baseline") == 1
    assert len(result["methods"]["p-rge"]["runs"]) == 2


def test_a_diverging_rate_loses_its_trial(tmp_path: Path) -> None:
    result = run(tmp_path / "cmp", FakeVerbs(diverging=0.02), *BOTH)
    method = result["methods"]["backprop-lora-fa"]
    assert method["learning_rate"] == 0.01
    assert method["search"][-1] == {"learning_rate": 0.03, "loss": None, "steps": 250}
    method = run(tmp_path / "all", FakeVerbs(diverging=1e-9), *BOTH)["methods"]["p-rge"]
    assert method["learning_rate"] is None
    assert "diverged" in method["failures"][0]


def test_a_budget_of_seconds_is_timed_first(tmp_path: Path) -> None:
    verbs = FakeVerbs()
    arguments = ("--methods", "p-rge", "--seeds", 1, "--search-trials", 1)
    result = run(tmp_path / "cmp", verbs, *arguments, "--budget", "seconds", "--budget-value", 4)
    # A fake step takes 0.1 s.
    assert result["methods"]["p-rge"]["runs"][0]["steps"] == 40
    assert "/measured/" in verbs.calls[1][1]["out"]
    assert "dev" not in verbs.calls[1][1]


def test_a_failed_export_ends_a_comparison_with_the_exports_message(tmp_path: Path) -> None:
    with raises(RunError, "verb-failed", containing="export said this"):
        run(tmp_path / "cmp", FakeVerbs(broken=["export"]), *BOTH)


def test_another_comparison_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "cmp", FakeVerbs(), *BOTH)
    with raises(RunError, "settings-changed", containing="rank was 8, is 4"):
        run(tmp_path / "cmp", FakeVerbs(), *BOTH, "--rank", 4)
    (tmp_path / "cmp/config.yaml").write_text("")
    with raises(RunError, "settings-changed"):
        run(tmp_path / "cmp", FakeVerbs(), *BOTH)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    with raises(RunError, "not-a-comparison", containing=str(tmp_path / "full")):
        run(tmp_path / "full", FakeVerbs(), *BOTH)
