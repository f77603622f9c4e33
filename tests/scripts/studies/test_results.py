"""The study's rows, plans and page; `prge compare` itself is replaced by recorded results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import results
import style
from result_page import BEGIN, END, METHODS, VERDICTS, cell, claims, write_page
from result_rows import SPLITS, STYLE, TASKS, flat_rows, make_splits, split_rows, write_task
from results import COMPARED, RATES, Plan, collect, compare, is_complete, make_plans, not_run, settings_of

from prge.cli.settings import parse_settings
from prge.cli.subprocesses import write_verb_config
from server_export.evidence.compare.settings import CompareSettings
from tests.comparisons import make_method, make_result, make_run

MAIN = Plan("sst2", "int4")
SPEED = {"inner_speedup": 1.2, "outer_speedup": 1.1, "parallel_speedup": 1.4, "engine_seconds": 1.5}


def arguments(out: Path, **more: Any) -> argparse.Namespace:
    flags = {"out": out, "data": out / "data", "model": "org/model", "methods": ["p-rge", "exact"]}
    return argparse.Namespace(**{**flags, "passes": 1000, "trials": 3, "threads": 1, **more})


def stored(tmp_path: Path, **methods: Any) -> dict[str, Any]:
    """Return a result of a comparison whose runs have accuracies of development rows, and more methods."""
    result = make_result(tmp_path)
    result["methods"].update(methods)
    for method in result["methods"].values():
        for point in (point for run in method["runs"] for point in run["curve"]):
            point["accuracy"] = 1 - point["loss"] / 2
    return result


def write_result(out: Path, plan: Plan, result: Mapping[str, Any]) -> Path:
    folder = plan.folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study's folder with SST-2, the style and its answers, and the speed of one shape."""
    out = tmp_path / "study"
    mezo = make_method(True, [make_run(seed, 0.95, 0.01, 32) for seed in (1, 2)])
    write_result(out, MAIN, stored(tmp_path, **{"p-rge-q1": mezo}))
    folder = write_result(out, Plan(STYLE, "int4"), stored(tmp_path))
    scores = {"base": 0.0, "p-rge-1": 0.5, "p-rge-2": 0.7}
    answers = {name: {"style": score, "right": 0.25} for name, score in scores.items()}
    write_result(out, Plan("sst2", "int4", is_memory=True), stored(tmp_path))
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    (out / "speed").mkdir()
    schemes = {"fp32": SPEED, "8da4w": {**SPEED, "outer_speedup": 0.9}}
    (out / "speed" / "1x64.json").write_text(json.dumps({"schemes": schemes}), encoding="utf-8")
    return out


def test_no_group_is_in_training_and_development_rows() -> None:
    rows = [{"text": f"text {number // 5}", "label": number % 2} for number in range(100)]
    splits = split_rows(rows, [{"text": "other", "label": 0}] * 9, "text", (50, 500, 3))
    texts = {split: {row["text"] for row in splits[split]} for split in SPLITS}
    assert [len(splits[split]) for split in SPLITS] == [50, 25, 3]
    assert not texts["train"] & texts["dev"]
    assert splits == split_rows(rows, [{"text": "other", "label": 0}] * 9, "text", (50, 500, 3))


def test_independent_rows_are_split_one_by_one() -> None:
    splits = split_rows([{"n": number} for number in range(8)], [{"n": 9}], "", (9, 9, 9))
    assert sorted(row["n"] for split in SPLITS for row in splits[split]) == [*range(8), 9]
    assert [len(splits[split]) for split in SPLITS] == [6, 2, 1]


def test_published_rows_become_those_of_the_task() -> None:
    assert [flat_rows("rte", {"label": label})[0]["label"] for label in ("entailment", "not_entailment")] == [
        0,
        1,
    ]
    assert (
        flat_rows("wsc", {"text": "t", "target": {"span1_text": "a"}, "label": True})[0]["span1_text"] == "a"
    )
    answers = [{"text": "yes", "label": 1}, {"text": "no", "label": 0}]
    passage = {"text": "p", "questions": [{"question": "q", "answers": answers}]}
    rows = flat_rows("multirc", {"passage": passage})
    assert [(row["paragraph"], row["question"], row["answer"], row["label"]) for row in rows] == [
        ("p", "q", "yes", 1),
        ("p", "q", "no", 0),
    ]


def test_files_of_a_data_set_become_rows_once(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "copa"
    folder.mkdir(parents=True)
    row = {"premise": "p", "question": "cause", "choice1": "a", "choice2": "b", "label": 0, "idx": 7}
    for name in TASKS["copa"].files:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for _ in range(8)), encoding="utf-8")
    written = write_task("copa", tmp_path / "data", tmp_path / "rows")
    lines = (written / "dev.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 and "idx" not in json.loads(lines[0])
    (folder / "train.jsonl").unlink()
    assert write_task("copa", tmp_path / "data", tmp_path / "rows") == written


def test_texts_keep_their_order(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(sum(TASKS["wikitext"].counts))]
    (tmp_path / "wikitext_1000.json").write_text(json.dumps(texts), encoding="utf-8")
    splits = make_splits("wikitext", tmp_path)
    assert [row["text"] for split in SPLITS for row in splits[split]] == texts


def test_a_rule_scores_answers() -> None:
    rows = make_splits(STYLE, Path())["test"][:2]
    texts = [rows[0]["completion"], ' "Oh my, a hat!" said the cow. And that was that.']
    assert style.shares(texts, rows) == {"style": 1.0, "right": 0.5}
    assert style.shares(["Hello", "Oh my"], rows) == {"style": 0.0, "right": 0.0}


def test_the_whole_study_is_named_until_it_was_run() -> None:
    plans = make_plans()
    assert len({plan.name for plan in plans}) == len(plans)
    assert {plan.base for plan in plans if plan.layers == "all-linear"} == {"int4"}
    (nothing,) = not_run({})
    assert nothing.startswith("No method has a seed: SST-2, int4, query-value; RTE, int4, query-value; ")
    assert nothing.count(";") == sum(not plan.is_memory for plan in plans) - 1
    seeds = {name: [42, 1337, 2025] for name in METHODS}
    seeds |= {"exact": [42], "backprop-lora": []}
    methods = {name: {"seeds": each} for name, each in seeds.items()}
    some, rest = not_run({MAIN.name: {"methods": methods}})
    assert some == (
        "SST-2, int4, query-value. Missing seeds: 2 of 3 for exact gradients. 3 of 3 for PyTorch, LoRA."
    )
    assert rest.startswith("No method has a seed: RTE")


def test_a_comparison_is_complete_with_all_runs(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    assert is_complete(result, ["p-rge"], (1, 2, 3)) and not is_complete(result, ["p-rge"], (1, 4))
    assert is_complete(result, ["exact"], (1, 2)), "a method that failed isn't repeated"
    assert not is_complete(result, ["fzoo"], (1,)) and not is_complete({}, ["p-rge"], (1,))


def test_a_comparison_goes_on_with_earlier_methods_and_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = stored(tmp_path)
    write_result(tmp_path / "study", MAIN, result)
    commands: list[tuple[object, ...]] = []

    def run(*words: object, **options: Any) -> int:
        commands.append(words)
        return 0

    monkeypatch.setattr(results, "exit_code_of", run)
    monkeypatch.setattr(results, "write_task", lambda name, data, folder: tmp_path)
    assert compare(arguments(tmp_path / "study", methods=["p-rge"]), MAIN, (1, 2))
    assert not commands
    assert not compare(arguments(tmp_path / "study", methods=["fzoo"]), MAIN, (1, 4))
    settings = parse_settings(CompareSettings, [str(word) for word in commands[0][1:]], "prge compare")
    assert settings.methods == ["backprop-lora-fa", "p-rge", "tangent", "exact", "fzoo"]
    assert settings.seeds == [1, 2, 3, 4]
    assert (settings.quantize, settings.budget_value, settings.search_trials) == ("8da4w", 1000, 3)


def test_every_compared_method_has_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "write_task", lambda name, data, folder: tmp_path)
    settings = settings_of(arguments(tmp_path / "study", trials=1), Plan("rte", "int4"))
    assert (settings["search_trials"], settings["learning_rates"]) == (1, RATES)
    assert [*RATES] == [*COMPARED]
    assert "learning_rates" not in settings_of(arguments(tmp_path), Plan("rte", "int4", is_memory=True))


@pytest.mark.parametrize("plan", make_plans(), ids=lambda plan: plan.name)
def test_every_comparison_has_settings_of_the_verb(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "write_task", lambda name, data, folder: tmp_path)
    settings = {**settings_of(arguments(tmp_path / "study"), plan), "methods": plan.methods(METHODS)}
    words = write_verb_config("compare", settings, tmp_path / "compare.yaml")
    assert parse_settings(CompareSettings, words[1:], "prge compare").methods == plan.methods(METHODS)


def test_figures_are_means_and_ranges_over_seeds(study: Path) -> None:
    figures = collect(study)
    p_rge = figures["comparisons"][MAIN.name]["methods"]["p-rge"]
    assert p_rge["seeds"] == [1, 2, 3] and p_rge["test_accuracy"]["seeds"] == 3
    assert p_rge["step_seconds"]["mean"] == pytest.approx(0.01)
    last = p_rge["curve"][-1]
    assert (last["forward_passes"], last["seconds"]) == (1280, pytest.approx(0.4))
    assert last["accuracy"]["lowest"] < last["accuracy"]["mean"] < last["accuracy"]["highest"]
    scores = figures["comparisons"]["style-int4-query-value"]["answers"]["p-rge"]
    assert scores["style"] == {"mean": pytest.approx(0.6), "lowest": 0.5, "highest": 0.7}


def test_machines_share_a_study(study: Path, tmp_path: Path) -> None:
    figures, file = collect(study), tmp_path / "results.json"
    file.write_text(json.dumps(figures), encoding="utf-8")
    write_result(tmp_path / "other", Plan("copa", "int4"), stored(tmp_path))
    both = collect(tmp_path / "other", file)
    assert [*both["comparisons"]] == [
        "memory-sst2-int4-query-value", MAIN.name, "copa-int4-query-value", "style-int4-query-value",
    ]  # fmt: skip
    write_result(
        tmp_path / "third", MAIN, stored(tmp_path, fzoo=make_method(True, [make_run(9, 0.9, 0.01, 32)]))
    )
    file.write_text(json.dumps(both), encoding="utf-8")
    joined = collect(tmp_path / "third", file)["comparisons"][MAIN.name]["methods"]
    assert {"p-rge-q1", "fzoo"} <= joined.keys() and joined["p-rge"]["seeds"] == [1, 2, 3]
    assert both["speed"] == figures["speed"] and both["not_run"] != figures["not_run"]
    assert both["comparisons"][MAIN.name]["methods"]["p-rge"]["seeds"] == [1, 2, 3]


def test_answers_of_several_machines_are_joined(study: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(collect(study)), encoding="utf-8")
    folder = write_result(tmp_path / "other", Plan(STYLE, "int4"), stored(tmp_path))
    answers = {"base": {"style": 0.0, "right": 0.25}, "p-rge-3": {"style": 0.9, "right": 0.25}}
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    joined = collect(tmp_path / "other", file)["comparisons"]["style-int4-query-value"]["answers"]
    assert joined["p-rge"]["style"] == {"mean": pytest.approx(0.7), "lowest": 0.5, "highest": 0.9}


def test_runs_of_another_budget_are_not_joined(study: Path, tmp_path: Path) -> None:
    file, result = tmp_path / "results.json", stored(tmp_path)
    file.write_text(json.dumps(collect(study)), encoding="utf-8")
    result["settings"]["budget_value"] = 80.0
    write_result(tmp_path / "other", MAIN, result)
    with pytest.raises(SystemExit, match=r"budget_value is 80\.0 in --out and .* in --json"):
        collect(tmp_path / "other", file)


def test_runs_with_another_rate_replace_earlier_ones(study: Path, tmp_path: Path) -> None:
    file, result = tmp_path / "results.json", stored(tmp_path)
    file.write_text(json.dumps(collect(study)), encoding="utf-8")
    result["methods"]["p-rge"]["learning_rate"] *= 2
    del result["methods"]["p-rge"]["runs"][1:]
    write_result(tmp_path / "other", MAIN, result)
    joined = collect(tmp_path / "other", file)["comparisons"][MAIN.name]["methods"]
    assert (joined["p-rge"]["seeds"], joined["tangent"]["seeds"]) == ([1], [1, 2, 3])


def test_verdicts_follow_from_figures(study: Path) -> None:
    holds, in_part, fails, unknown = VERDICTS
    judged = claims(collect(study))
    assert [verdict for _, _, verdict in judged] == [holds, in_part, holds, holds, unknown, unknown, unknown]
    slow = {"comparisons": {}, "speed": {"1x64": {"int4": {name: 1.0 for name in SPEED}}}}
    assert {verdict for _, _, verdict in claims(slow)[:3]} == {fails}
    assert claims(slow)[0][1] == "1.00 times; so in 0 of 1 cases"


def test_cells_of_missing_figures() -> None:
    values = {"mean": 0.5, "lowest": 0.25, "highest": 0.75, "censored": 0, "bounded": 0}
    assert cell(values, 100) == "50 [25, 75]"
    assert cell({**values, "lowest": 0.5, "highest": 0.5, "bounded": 1}) == "< 0.5"
    assert cell({**values, "mean": None, "censored": 1}) == "[0.25, 0.75], 1 seeds not"
    assert cell({"lowest": None}, 1, "not reached") == "not reached" and cell(None) == "–"


def test_the_page_keeps_what_is_outside_the_marks(study: Path) -> None:
    page = study / "page.md"
    page.write_text(f"# Results\n\n{BEGIN}\noutdated\n{END}\n\n## Rest\n", encoding="utf-8")
    for _ in range(2):
        write_page(collect(study), page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Results\n\n{BEGIN}\n\nAccuracies on 400 test rows of SST-2, int4 weights")
    assert text.endswith(f"{END}\n\n## Rest\n") and "outdated" not in text
    assert "2 or 3 seeds" in text and "| int4 | query-value | P-RGE, 4 queries | 3 | 0.01 |" in text
    assert "No method has a seed: RTE, int4, query-value; " in text
    assert "| 1x64 | int4 | 1.2 | 0.9 | 1.4 | 1.5 |" in text
    memory = text.partition("## SST-2: memory of a few steps")[2].partition("##")[0]
    assert (
        "| int4 | query-value | PyTorch, LoRA-FA | 3 | 0.01 | 0.02 | 30 |" in memory and "tests" not in memory
    )
    for axis in ("forward_passes", "seconds", "memory"):
        assert f"(figures/results-{axis}.svg)" in text
        assert (study / "figures" / f"results-{axis}.svg").read_text(encoding="utf-8").startswith("<svg")


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Results\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no lines"):
        write_page(collect(tmp_path), page)
    assert page.read_text(encoding="utf-8") == "# Results\n"


def test_a_study_without_results_says_so(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    write_page(collect(tmp_path), page)
    assert "No method has a seed: SST-2, int4, query-value; " in page.read_text(encoding="utf-8")
