"""The registry, rows of a step, and the command lines of every method."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_runner.evaluate import EvaluateSettings
from device_runner.session.settings import RunSettings
from prge.learning.estimators.table import ESTIMATORS
from prge.verbs.settings import parse_settings
from server_export.evidence.baselines.settings import BaselineSettings
from server_export.evidence.compare.methods import (
    METHODS,
    Plan,
    chosen_methods,
    export_flags,
    run_words,
    words_of,
)
from server_export.evidence.compare.methods import (
    test_words as words_of_test,
)
from server_export.settings import ExportConfig
from tests.comparisons import settings_for

ROWS = {split: Path(f"{split}.jsonl") for split in ("train", "dev", "test")}


def test_names_and_sides() -> None:
    assert all(name == method.name for name, method in METHODS.items())
    forward = {name for name, method in METHODS.items() if method.forward_only}
    assert forward == {
        "p-rge", "p-rge-q1", "p-rge-q2", "p-rge-q16", "tangent", "tangent-q16", "mezo-lora-fa", "fzoo",
        "mezo",
    }  # fmt: skip


def test_queries_times_examples_are_the_same_for_all() -> None:
    assert {method.queries * method.examples(16) for method in METHODS.values()} == {16}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("p-rge", 32), ("p-rge-q16", 32), ("mezo-lora-fa", 32), ("fzoo", 32), ("tangent", 20),
        ("exact", 48), ("backprop-lora-fa", 48), ("mezo", 32),
    ],
)  # fmt: skip
def test_rows_of_a_step(name: str, rows: int) -> None:
    assert METHODS[name].rows(16) == rows


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.family == "engine"])
def test_engine_methods_have_command_lines_that_parse(name: str, tmp_path: Path) -> None:
    settings, method = settings_for(tmp_path / "out", "--sequence-length", 16), METHODS[name]
    words = words_of({**export_flags(method, settings), "out": tmp_path / "bundle"})
    config = parse_settings(ExportConfig, words, "prge export")
    assert config.sequence_length == 16
    assert method.estimator and ESTIMATORS[method.estimator].role in config.roles
    plan = Plan(10, 1.25e-3, 3, (0, 2, 7, 10))
    verb, *words = run_words(method, settings, plan, tmp_path / "bundle", ROWS, tmp_path / "run")
    run = parse_settings(RunSettings, words, "prge run")
    assert (verb, run.estimator, run.learning_rate, run.steps) == ("run", method.estimator, 1.25e-3, 10)
    assert (run.batch_size, run.copies) == (method.examples(16), method.copies)
    assert run.queries == (None if name.startswith("exact") else method.directions or method.queries)
    assert run.select == "loss"
    assert (run.evaluate_at, run.evaluate_every, run.checkpoint_every) == ([0, 2, 7, 10], 0, 7)
    verb, *words = words_of_test(
        settings, tmp_path / "bundle", ROWS["test"], tmp_path / "run", tmp_path / "t"
    )
    assert parse_settings(EvaluateSettings, words, "prge eval").data == ROWS["test"]


def test_a_run_that_is_only_timed_is_neither_evaluated_on_its_way_nor_kept(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out")
    for name, kind in (("tangent", RunSettings), ("mezo", BaselineSettings)):
        words = run_words(METHODS[name], settings, Plan(8, 1e-3, 3), tmp_path / "b", ROWS, tmp_path / "run")
        run = parse_settings(kind, words[1:], "prge run")
        assert (run.dev, run.evaluate_at, run.evaluate_every, run.checkpoint_every) == (None, [], 0, 0)


def test_top_blocks_are_adapted_wherever_the_others_are(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    settings = settings_for(tmp_path / "out", "--adapter", start, "--target-modules", "layer.2.value")
    flags = export_flags(METHODS["exact-top2"], settings)
    assert flags["adapt-layers"] == "top:2"
    assert "adapter" not in flags
    assert "target-modules" not in flags
    assert export_flags(METHODS["exact"], settings)["adapter"] == start
    plain = settings_for(tmp_path / "out", "--target-modules", "value")
    assert export_flags(METHODS["exact-top2"], plain)["target-modules"] == ["value"]


def test_all_methods_but_those_with_flags_of_their_own_share_a_bundle(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "out")
    method = METHODS["backprop-lora"]
    shared = export_flags(method, settings)
    assert "roles" not in shared
    assert {name for name, one in METHODS.items() if export_flags(one, settings) != shared} == {"exact-top2"}
    plan = Plan(10, 1e-3, 3, (0, 5, 10))
    words = run_words(method, settings, plan, tmp_path / "bundle", ROWS, tmp_path / "run")
    assert words[0] == "baseline"
    assert words[words.index("--method") + 1] == "backprop-lora"
    assert words[words.index("--batch-size") + 1] == "16"
    assert words[words.index("--optimizer") + 1] == "adam"
    assert "--test" not in words
    plan = Plan(10, 1e-3, 3, (0, 5, 10), with_test=True)
    assert "--test" in run_words(method, settings, plan, tmp_path / "bundle", ROWS, tmp_path / "run")


@pytest.mark.parametrize("name", [name for name, one in METHODS.items() if one.family == "pytorch"])
def test_pytorch_methods_have_command_lines_that_parse(name: str, tmp_path: Path) -> None:
    plan = Plan(10, 1e-3, 3, (0, 5, 10), with_test=True)
    settings = settings_for(tmp_path / "out")
    words = run_words(METHODS[name], settings, plan, tmp_path / "bundle", ROWS, tmp_path / "run")
    assert parse_settings(BaselineSettings, words[1:], "prge baseline").method == name


def test_methods_are_taken_once_in_their_order() -> None:
    assert [method.name for method in chosen_methods(["tangent", "p-rge", "tangent"], 16)] == [
        "tangent",
        "p-rge",
    ]
