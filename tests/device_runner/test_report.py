"""`prge report`: one page for runs of any type and outcome, with all content of rows escaped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from device_runner.report import main
from prge.errors import ConfigError, RunError
from prge.formats.run_folder import run_lock
from tests.device_runner.reporting.run_folders import learn_from_reward, write_run
from tests.pages import Page, check_widths
from tests.refusals import raises

EVIL = "</p><script>alert(1)</script><img src=x onerror=alert(1)> \u202e & \"quoted\" 'single'"


def report(*runs: Path) -> str:
    out = runs[0].parent / "report.html"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def table(page: Page, header: str) -> list[list[str]]:
    return next(rows for rows in page.tables if rows[0][0] == header)


def facts(page: Page) -> dict[str, str]:
    return {row[0]: row[1] for rows in page.tables if rows[0] == ["fact", "value"] for row in rows[1:]}


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    for block, values in changes.items():
        content[block] |= values
    path.write_text(json.dumps(content))


def test_a_report_begins_with_the_result(tmp_path: Path) -> None:
    text = report(write_run(tmp_path / "first"))
    page = Page(text)
    assert page.headings[0] == "Run first"
    assert "It took all of its steps. 40 of 40 steps in 20 s." in text
    assert (
        "Perplexity on development rows: 60 before, 41.5 at best, after step 20, which is in final/." in text
    )
    assert table(page, "development rows") == [
        ["development rows", "in final/", "step", "loss", "perplexity"],
        ["before", "–", "0", "6", "60"],
        ["best", "yes", "20", "4.15", "41.5"],
        ["last", "–", "40", "4.425", "44.25"],
    ]


def test_a_report_shows_samples_costs_data_and_settings(tmp_path: Path) -> None:
    text = report(write_run(tmp_path / "run"))
    page = Page(text)
    assert text.index(" upon a time 0<") < text.index(" upon a time 20<")
    assert (
        facts(page).items()
        >= {
            "peak memory of the process": "123 MB",
            "speed": "100 training tokens per second",
            "frozen weights": "8da4w",
            "estimator": "exact",
            "model content": "ab" * 32,
            "adapter": str(tmp_path / "run" / "final"),
        }.items()
    )
    assert "backpropagation" in text
    assert table(page, "part")[1] == ["training", "rows.jsonl", "30", "31", "900", "870", "64", "12"]
    assert "training rows: ends cut off, not trained on: 2" in text
    changed = {row[0]: row[1:] for row in table(page, "setting")[1:]}
    assert changed["learning_rate"] == ["0.01", "0.003"]
    assert "seed" not in changed


def test_a_run_that_learns_from_a_reward_shows_rewards_instead_of_losses(tmp_path: Path) -> None:
    text = report(learn_from_reward(write_run(tmp_path / "run")))
    page = Page(text)
    assert "Reward on development rows: 0 before, 0.8 at best, after step 40." in text
    assert table(page, "development rows") == [
        ["development rows", "in final/", "step", "reward", "share solved"],
        ["before", "–", "0", "0", "0"],
        ["best", "–", "40", "0.8", "0.4"],
    ]
    assert facts(page)["speed"] == "320 tokens of completions per second"
    captions = ("Mean reward.", "Share of completions", "Mean length", "Divergence from the adapter")
    assert all(caption in text for caption in captions) and text.count("<svg ") == 4
    assert "Loss." not in text


def test_rewards_and_losses_of_several_runs_are_not_mixed(tmp_path: Path) -> None:
    text = report(write_run(tmp_path / "texts"), learn_from_reward(write_run(tmp_path / "reward")))
    assert "Loss of training rows, smoothed." in text and "Reward of training steps, smoothed." in text


def test_the_next_commands_are_for_this_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "my run")
    text = report(run)
    # Its bundle is on another machine.
    assert f"prge eval --bundle BUNDLE --adapter &#39;{run}&#39; --data TEST_ROWS" in text
    assert "prge generate" in text and "prge publish" in text
    edit(run / "run.json", run={"roles": ["backward"]})
    assert "prge generate" not in report(run)


def test_the_page_contains_its_curves_as_svg(tmp_path: Path) -> None:
    text = report(write_run(tmp_path / "run"))
    assert text.count("<svg ") == 2
    assert "perplexity against steps" in text and "accuracy" not in text
    assert all(
        f"{scheme}://" not in text.replace("http://www.w3.org/2000/svg", "") for scheme in ("http", "https")
    )
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


@pytest.mark.parametrize(
    "ending", ["killed", "interrupted", "diverged", "no summary", "before its first step"]
)
def test_a_run_without_a_result_has_a_report_too(tmp_path: Path, ending: str) -> None:
    status = ending if ending in ("interrupted", "diverged") else "running"
    run = write_run(tmp_path / "run", status, steps=30)
    if ending == "no summary":
        (run / "run.json").unlink()
    if ending == "before its first step":
        for name in ("metrics.jsonl", "samples.jsonl"):
            (run / name).unlink()
    text = report(run)
    expected = {"interrupted": "It was interrupted", "diverged": "It diverged"}.get(ending, "It was killed")
    assert expected in text
    assert f"prge run --resume {run}" in text
    assert "prge publish" not in text


def test_a_resumed_run_is_reported_as_resumed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "running", steps=30)
    with run_lock(run):
        text = report(run)
    assert "It is running. 30 of 40 steps" in text and "--resume" not in text


def test_decisions_of_a_tuning_are_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "What was chosen" not in report(run)
    decisions = [{"name": "learning rate", "value": 0.003, "why": "best of 4"}, "no decision"]
    (tmp_path / "tune.json").write_text(json.dumps({"decisions": decisions}))
    assert table(Page(report(run)), "decision")[1:] == [["learning rate", "0.003", "best of 4"]]
    (run / "tune.json").write_text("[")
    text = report(run)
    assert "tune.json can&#39;t be read: not JSON" in text and "best of 4" in text


def test_an_estimator_that_was_changed_during_the_run_is_reported_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    stretches = [{"since": 0, "estimator": "tangent"}, {"since": 30, "estimator": "exact"}]
    edit(run / "run.json", run={"estimators": stretches})
    text = report(run)
    assert facts(Page(text))["estimator"] == "tangent, then exact"
    assert text.index("Tangents: forward passes only") < text.index("Exact gradients: ")


def test_untrusted_texts_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run <b>", data={"train": {"notes": {EVIL: 1}}}, rows=EVIL)
    edit(run / "run.json", run={"model": {"name_or_path": EVIL}, "status": EVIL}, meta={"platform": EVIL})
    with (run / "samples.jsonl").open("a") as stream:
        for prompt in (EVIL, [{"role": EVIL, "content": EVIL}], {"odd": [EVIL]}):
            stream.write(json.dumps({"step": 0, "prompt": prompt, "text": EVIL}) + "\n")
    (run / "config.yaml").write_text(json.dumps({EVIL: EVIL, "train": EVIL, "bundle": EVIL, "steps": EVIL}))
    (run / "tune.json").write_text(json.dumps({"decisions": [{"name": EVIL, "value": [EVIL], "why": EVIL}]}))
    page = Page(report(run))
    assert page.names & {"script", "img", "b", "iframe", "link", "object"} == set()
    assert page.links == []


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "tune.json"])
@pytest.mark.parametrize("content", ["", "[1]", "{", '{"run": 3, "train": [], "decisions": 7}', "\xff"])
def test_a_damaged_file_only_removes_its_own_part_of_the_report(
    tmp_path: Path, name: str, content: str
) -> None:
    run = write_run(tmp_path / "run")
    (run / name).write_text(content, encoding="latin-1")
    assert "60 before, 41.5 at best" in report(run)


def test_several_runs_are_compared_and_then_described_one_by_one(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("first", "second")]
    text = report(*runs)
    page = Page(text)
    assert page.headings[:3] == ["2 runs", "Run first", "Run second"]
    assert [row[0] for row in table(page, "run")[1:]] == ["first", "second"]
    # Two charts of each run, then loss and perplexity of both against steps, rows and seconds.
    assert text.count("<svg ") == 10
    for axis in ("steps", "forward passes", "seconds"):
        assert f"training loss against {axis}" in text and f"perplexity against {axis}" in text


def test_curves_are_written_as_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "curves.svg"
    assert main([str(write_run(tmp_path / name)) for name in ("a", "b")] + ["--out", str(out)]) == 0
    tree = ElementTree.parse(out).getroot()
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}polyline"))) > 6
    assert {"a", "b"} <= {each.text for each in tree.iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.parametrize(
    "records",
    [
        [
            {
                "event": "evaluation",
                "step": 0,
                "forward_passes": 8,
                "seconds": 1.0,
                "loss": 0.7,
                "accuracy": 0.5,
            }
        ],
        [{"event": "step", "step": 0, "forward_passes": 8, "seconds": 1.0, "loss": 0.7}],
        [
            {"event": "step", "step": n, "forward_passes": n, "seconds": n, "loss": (None, 2.0)[n]}
            for n in (0, 1)
        ],
        [{"event": "step", "step": 0, "loss": 0.7}],
    ],
    ids=["evaluation only", "one step", "loss not finite", "no rows or seconds"],
)
def test_sparse_records(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    runs = [tmp_path / name for name in ("sparse", "empty")]
    for run, content in zip(runs, (records, []), strict=True):
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in content))
    assert "<svg " in report(*runs)
    with raises(RunError, "nothing-measured", containing=str(runs[1])):
        main([str(runs[1]), "--out", str(tmp_path / "curves.svg")])


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(RunError, "write-failed", containing=str(tmp_path / "file")):
        main([str(write_run(tmp_path / "run")), "--out", str(tmp_path / "file" / "report.html")])


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert report(run) == report(run)


def test_neither_the_page_nor_a_table_scrolls_sideways(tmp_path: Path) -> None:
    run = write_run(tmp_path / ("a-long-name-of-a-folder" * 5))
    check_widths(report(run, write_run(tmp_path / "other", "running")), tmp_path)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with raises(RunError, "not-a-run", containing=str(tmp_path)):
        main([str(tmp_path)])
    with raises(ConfigError, "settings-unusable", containing="report.pdf"):
        main([str(tmp_path), "--out", "report.pdf"])
