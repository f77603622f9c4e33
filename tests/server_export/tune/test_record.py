"""The record of a tuning: settings that may change when it is resumed, and its duration."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from prge.errors import ConfigError, RunError
from server_export.tune.decisions import Decision
from server_export.tune.record import Record
from server_export.tune.settings import TuneSettings
from tests.refusals import raises


@pytest.fixture
def settings(tmp_path: Path) -> TuneSettings:
    return TuneSettings(data=tmp_path / "rows.jsonl", out=tmp_path / "out", model="model")


def kept_record(settings: TuneSettings, *files: str) -> Record:
    """Return a record that is kept, in a folder with some files."""
    for name in files:
        path = settings.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    settings.out.mkdir(exist_ok=True)
    record = Record(settings)
    names = ("quantize", "batch_size", "learning_rate")
    record.decide(*(Decision(name, 1, "so") for name in names))
    record.keep()
    return record


def decided(record: Record) -> list[str]:
    return [each.name for each in record.decisions]


def test_a_record_writes_nothing_before_it_is_kept(settings: TuneSettings) -> None:
    record = Record(settings)
    record.decide(Decision("quantize", "fp32", "small"))
    assert record.fact("fact", lambda: 3) == 3
    assert not settings.out.exists() and not record.is_kept


def test_before_the_first_stage_every_setting_may_change(settings: TuneSettings) -> None:
    kept_record(settings)
    record = Record(replace(settings, columns=("text=story",), rank=4))
    assert not record.is_kept and not decided(record)


def test_with_a_bundle_settings_of_runs_may_change(settings: TuneSettings) -> None:
    kept_record(settings, "bundle/manifest.json")
    record = Record(replace(settings, batch_size=4))
    assert record.is_kept and decided(record) == ["quantize"]
    assert decided(Record(replace(settings, batch_size=4))) == ["quantize"]
    assert "batch_size: 4" in (settings.out / "config.yaml").read_text()
    with raises(ConfigError, "settings-changed") as caught:
        Record(replace(settings, batch_size=2, rank=4, columns=("text=story",)))
    assert caught.value.problems == ["columns was [], is ['text=story']", "rank was None, is 4"]
    assert f"prge tune --resume {settings.out}" in caught.value.remedy


def test_settings_of_existing_runs_may_not_change(settings: TuneSettings) -> None:
    kept_record(settings, "search/0.01-8/journal.jsonl")
    assert decided(Record(replace(settings, learning_rate=0.1))) == ["quantize", "batch_size"]
    for changes in ({"steps": 7}, {"data": Path("/other")}, {"batch_size": 2}):
        with raises(ConfigError, "settings-changed", containing=next(iter(changes))):
            Record(replace(settings, learning_rate=0.1, **changes))


def test_the_remedy_names_an_existing_bundle(settings: TuneSettings) -> None:
    kept_record(settings, "bundle/manifest.json", "search/0.01-8/journal.jsonl")
    for changes in ({"steps": 7}, {"minutes": 3.0}):
        with raises(ConfigError, "settings-changed") as caught:
            Record(replace(settings, **changes))
        assert f"--bundle {settings.out / 'bundle'} instead of --model" in (caught.value.remedy or "")
    with raises(ConfigError, "settings-changed") as caught:
        Record(replace(settings, rank=4))
    assert "--bundle" not in (caught.value.remedy or "")


def test_settings_that_an_earlier_version_lacked_had_their_defaults(settings: TuneSettings) -> None:
    kept_record(settings, "search/0.01-8/journal.jsonl")
    path = settings.out / "tune.json"
    content = json.loads(path.read_text())
    del content["settings"]["weight_decay"], content["settings"]["loss_normalisation"]
    path.write_text(json.dumps(content))
    assert Record(settings).is_kept
    with raises(ConfigError, "settings-changed", containing="weight_decay was 0.0, is 0.1"):
        Record(replace(settings, weight_decay=0.1))


@pytest.mark.parametrize("status", ["completed", "diverged"])
def test_a_final_run_that_diverged_may_have_another_rate(settings: TuneSettings, status: str) -> None:
    kept_record(settings, "search/0.01-8/journal.jsonl", "run/journal.jsonl")
    (settings.out / "run" / "run.json").write_text(json.dumps({"run": {"status": status}}))
    changed = replace(settings, learning_rate=0.1)
    if status == "diverged":
        Record(changed)
        assert not (settings.out / "run").exists()
    else:
        with raises(ConfigError, "settings-changed", containing="learning_rate was None, is 0.1"):
            Record(changed)


def test_time_before_a_kill_counts_and_the_pause_does_not(settings: TuneSettings) -> None:
    kept_record(settings, "search/0.01-8/journal.jsonl")
    path = settings.out / "tune.json"
    content = json.loads(path.read_text())
    begun = time.time() - 5000
    path.write_text(json.dumps(content | {"began": begun, "seconds": 100.0}))
    for each in settings.out.rglob("*"):
        os.utime(each, (begun, begun))
    os.utime(settings.out / "search" / "0.01-8" / "journal.jsonl", (begun + 50, begun + 50))
    (settings.out / "run.lock").touch()  # by the resumed tuning
    assert Record(settings).seconds == pytest.approx(150, abs=5)


def test_paths_outside_of_the_folder_in_a_strangers_record_are_refused(
    settings: TuneSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.jinja").write_text("x")
    monkeypatch.chdir(tmp_path)
    settings = replace(settings, chat_template="mine.jinja")
    kept_record(settings)
    path = settings.out / "tune.json"
    content = json.loads(path.read_text())

    def record(template: str, heads: object = "search/0.01-8/journal.jsonl") -> Record:
        decisions = [{"name": "chat_template", "value": template, "why": "so"}]
        path.write_text(json.dumps({**content, "decisions": decisions, "found": {"heads": heads}}))
        return Record(settings)

    for template in ("plain", "mine.jinja", str(settings.resolved().chat_template)):
        assert record(template).value("chat_template") == template
    for template in ("/etc/passwd", "../mine.jinja", str(tmp_path / "out.jinja")):
        with raises(RunError, "path-outside", containing="chat_template"):
            record(template)
    for heads in ("/etc/passwd", "../journal.jsonl", "search/../../journal.jsonl"):
        with raises(RunError, "path-outside", containing="heads"):
            record("plain", heads)


def test_a_folder_with_a_link_to_the_outside_is_not_resumed(settings: TuneSettings, tmp_path: Path) -> None:
    from server_export.tune.stages import tune

    kept_record(settings)
    (tmp_path / "mine.txt").write_text("mine")
    (settings.out / "report.html").symlink_to(tmp_path / "mine.txt")
    with raises(RunError, "link-outside", containing="report.html"):
        tune(settings)
    assert (tmp_path / "mine.txt").read_text() == "mine"
