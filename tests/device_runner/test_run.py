"""`prge run`, `replay` and `eval`, with a numpy model instead of the engine."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner import evaluate as evaluate_verb
from device_runner import run as run_verb
from device_runner.replay import main as replay
from device_runner.report import main as report
from device_runner.run import run
from device_runner.session.settings import EvaluateSettings, RunSettings
from prge.cli.settings import parse_settings
from prge.errors import BundleError, ConfigError, DataError, DivergenceError, EngineError, PrgeError, RunError
from prge.formats.journal import Journal, encode_array
from prge.formats.run_folder import run_lock
from prge.training import settings as training_flags
from tests.bundles import read_manifest, rehash, write_manifest
from tests.device_runner.numpy_device import QUERIES, Device, Killed, write_films
from tests.refusals import raises
from tests.workshop import bits

STEPS, EXAMPLES = 12, 8


@pytest.fixture(params=[False, True], ids=["decoder", "encoder"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(request.param)
    device.replaces(monkeypatch, run_verb)
    return device


@pytest.fixture
def settings(device: Device, tmp_path: Path) -> RunSettings:
    """Return settings of a short run: classification for encoders, text for decoders."""
    write_films(tmp_path)
    return RunSettings(
        bundle=device.write_bundle(tmp_path / "bundle"),
        train=tmp_path / "train.jsonl",
        dev=tmp_path / "dev.jsonl",
        task=str(tmp_path / "task.yaml") if device.encoder else None,
        out=tmp_path / "run",
        steps=STEPS,
        batch_size=EXAMPLES,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        warmup_steps=0,
        eval_steps=4,
        save_steps=5,
        head_folds=4,
        select="loss",
        quiet=True,
    )


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _run_to_its_end(
    device: Device, settings: RunSettings, calls: Sequence[int], after: Callable[[], None] = lambda: None
) -> int:
    """Kill a run after these numbers of calls in turn, and resume it; returns how often it was killed."""
    for kills in itertools.count():
        device.calls_left = calls[kills % len(calls)]
        try:
            run(settings)
        except Killed:
            after()
            settings = replace(settings, resume=settings.out)
            continue
        device.calls_left = None
        return kills
    raise AssertionError


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_learns_and_its_journal_replays_to_the_same_bits(
    device: Device, settings: RunSettings, shared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(replace(settings, steps=60, share_directions=shared))
    evaluations = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "evaluation"]
    assert min(r["loss"] for r in evaluations) < 0.98 * evaluations[0]["loss"]
    device.calls_left = 0
    assert replay([str(settings.out), "--out", str(tmp_path / "replayed")]) == 0
    assert "the same bits" in capsys.readouterr().out


def test_a_run_reports_its_choices_before_and_after_next_to_the_right_ones(
    device: Device, settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.replaces(monkeypatch, evaluate_verb)
    task = str(tmp_path / "task.yaml")
    settings = replace(settings, task=task, steps=60, sample_rows=3, sample_every=0)
    run(settings)
    rows = _json_lines(settings.dev) if settings.dev else []
    lines = _json_lines(settings.out / "samples.jsonl")
    assert {line["step"] for line in lines} >= {0}
    summary = json.loads((settings.out / "run.json").read_text())["train"]["samples"]
    for samples in summary.values():
        assert [each["prompt"].strip() for each in samples] == [row["text"] for row in rows[:3]]
        assert [each["right"] for each in samples] == [("No", "Yes")[row["label"]] for row in rows[:3]]
        assert all(each["text"] in ("No", "Yes") for each in samples)
    # The same scores as an evaluation of the same adapter.
    predictions = tmp_path / "predictions.jsonl"
    arguments = [
        "--bundle", settings.bundle, "--adapter", settings.out, "--data", settings.dev, "--task", task,
    ]  # fmt: skip
    assert evaluate_verb.main([*map(str, arguments), "--limit", "3", "--predictions", str(predictions)]) == 0
    assert [each["text"].strip() for each in _json_lines(predictions)] == [
        each["text"] for each in summary["after"]
    ]
    assert report([str(settings.out), "--out", str(tmp_path / "report.html")]) == 0
    assert "Reference:" in (tmp_path / "report.html").read_text()


def test_samples_of_rows_without_candidates_are_refused(settings: RunSettings) -> None:
    with raises(ConfigError, "candidates-missing", containing="--sample-rows"):
        run(replace(settings, dev=None, select="metric", eval_steps=0, sample_rows=3))


def test_the_journal_has_resolved_settings(settings: RunSettings) -> None:
    run(settings)
    with Journal(settings.out / "journal.jsonl", writable=False) as journal:
        start = journal.first("start")
        assert start is not None
        assert (start["settings"]["estimator"], start["settings"]["queries"]) == ("tangent", QUERIES)
        first = journal.step(0)
        assert first is not None and np.shape(first["projected_gradients"]) == (QUERIES, EXAMPLES)
    stored = parse_settings(RunSettings, ["--resume", str(settings.out)], "prge run")
    assert (stored.estimator, stored.queries) == ("tangent", QUERIES)


def test_metrics_count_rows_and_report_the_largest_tangent(settings: RunSettings) -> None:
    run(settings)
    steps = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "step"]
    assert [r["forward_passes"] for r in steps] == [n * EXAMPLES * (1 + QUERIES) for n in range(1, STEPS + 1)]
    assert all(r["largest_tangent"] > 0 and r["projected_gradient_std"] > 0 for r in steps)
    summary = json.loads((settings.out / "run.json").read_text())
    assert summary["train"]["largest_tangent"] == max(r["largest_tangent"] for r in steps)


def _best_loss(settings: RunSettings) -> dict[str, Any]:
    evaluations = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "evaluation"]
    return min(evaluations, key=lambda record: float(record["loss"]))


def test_a_run_ends_with_scores_before_and_after_and_the_next_commands(
    settings: RunSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    run(replace(settings, quiet=False))
    lines = capsys.readouterr().err.splitlines()
    best = _best_loss(settings)
    table = {line.split()[0]: line.split() for line in lines[lines.index("next:") - 5 : lines.index("next:")]}
    assert table["before"][1] == "0"
    assert table["best"][1:3] == [str(best["step"]), f"{best['loss']:.4g}"]
    assert [name for name, cells in table.items() if cells[-1] == "final/"] in (["best"], ["before"])
    assert table["adapter:"] == ["adapter:", str(settings.out / "final")]
    assert f"--bundle {settings.bundle} --adapter {settings.out}" in lines[lines.index("next:") + 1]
    assert any(
        line.startswith(f"training: tangent, {STEPS} steps of 8 examples (2.4 epochs)") for line in lines
    )


@pytest.mark.parametrize("position", ["config.yaml", "journal.jsonl"])
def test_a_run_of_an_earlier_version_is_refused(settings: RunSettings, position: str) -> None:
    """The run's unsigned config.yaml or its journal has settings that this version lacks."""
    run(settings)
    path = settings.out / position
    if position == "config.yaml":
        path.write_text(f"guided: true\n{path.read_text()}")
    else:
        first, *rest = path.read_bytes().splitlines(keepends=True)
        record = json.loads(first)["record"]
        record["settings"]["guided"] = True
        path.write_bytes(b"".join([_signed(record).encode(), *rest]))
    before = {each: each.read_bytes() for each in settings.out.rglob("*") if each.is_file()}
    arguments = [
        "--resume", str(settings.out), "--bundle", str(settings.bundle), "--train", str(settings.train),
    ]  # fmt: skip
    arguments += ["--dev", str(settings.dev), *(["--task", settings.task] if settings.task else [])]
    with raises(ConfigError, "settings-unusable", "run-of-other-version", containing="guided"):
        run_verb.main(arguments)
    assert {each: each.read_bytes() for each in settings.out.rglob("*") if each.is_file()} == before


def test_a_foreign_run_reads_no_local_file(settings: RunSettings, tmp_path: Path) -> None:
    """The run's settings name rows of this machine; once the user has named the rows, the run continues."""
    private = tmp_path / "home/private.jsonl"
    private.parent.mkdir()
    shutil.copy(settings.train[0] if isinstance(settings.train, tuple) else settings.train, private)
    run(replace(settings, train=private))
    there = ("bundle", "train.jsonl", "dev.jsonl", "task.yaml")
    stranger = tmp_path / "stranger"
    shutil.copytree(settings.out, stranger)
    for name in there:
        if (tmp_path / name).exists():
            (tmp_path / name).rename(stranger / name)
    config = stranger / "config.yaml"
    # All other paths are copied with the run.
    changed = (
        config.read_text()
        .replace(f"{tmp_path}/", f"{stranger}/")
        .replace(f"{stranger}/home", f"{tmp_path}/home")
    )
    config.write_text(changed)
    before = {path: path.read_bytes() for path in stranger.rglob("*") if path.is_file()}
    with raises(ConfigError, "path-outside") as caught:
        run_verb.main(["--resume", str(stranger)])
    assert caught.value.problems == [f"train: '{private}'"]
    assert f"--train {private}" in caught.value.remedy
    assert {path: path.read_bytes() for path in stranger.rglob("*") if path.is_file()} == before
    assert run_verb.main(["--resume", str(stranger), "--train", str(private)]) == 0
    # The run belongs to the user now, in any folder.
    shutil.copytree(stranger, tmp_path / "moved")
    assert run_verb.main(["--resume", str(tmp_path / "moved")]) == 0


def test_a_link_out_of_a_run_that_is_resumed_is_refused(settings: RunSettings, tmp_path: Path) -> None:
    run(settings)
    (tmp_path / "elsewhere").mkdir()
    (settings.out / "checkpoints/step-999999").symlink_to(tmp_path / "elsewhere")
    with raises(RunError, "link-outside", containing="step-999999"):
        run_verb.main(["--resume", str(settings.out)])


def test_the_score_before_training_costs_one_evaluation_which_a_resumed_run_keeps(
    device: Device, settings: RunSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []
    for at in ([], [0], [0, 6]):
        device.calls_left = 1000
        out = settings.out.with_name(f"run-{len(at)}")
        run(replace(settings, out=out, eval_steps=0, eval_at=at))
        calls.append(1000 - device.calls_left)
    assert calls[1] - calls[0] == calls[2] - calls[1] > 0
    device.calls_left = calls[1] - 10
    with pytest.raises(Killed):
        run(settings)
    device.calls_left = None
    run(replace(settings, resume=settings.out, quiet=False))
    table = capsys.readouterr().err
    assert "\nbefore                   0" in table
    assert sum(r["type"] == "evaluation" and r["step"] == 0 for r in _journal(settings)) == 1


def _journal(settings: RunSettings) -> list[dict[str, Any]]:
    with Journal(settings.out / "journal.jsonl", writable=False) as journal:
        return journal.records


def test_the_summary_describes_the_rows_and_the_result(settings: RunSettings) -> None:
    run(settings)
    summary = json.loads((settings.out / "run.json").read_text())
    data = summary["train"]["data"]
    assert (data["train"]["rows"], data["dev"]["rows"]) == (40, 20)
    assert data["train"]["dropped_target_tokens"] == 0
    assert summary["train"]["best"]["step"] == summary["train"]["final_step"] == _best_loss(settings)["step"]
    assert summary["train"]["before"]["step"] == 0
    assert summary["run"]["estimators"] == [{"since": 0, "estimator": "tangent"}]


def test_a_report_is_written_however_a_run_ended(
    device: Device, settings: RunSettings, tmp_path: Path
) -> None:
    device.calls_left = 10
    with pytest.raises(Killed):
        run(settings)
    page = tmp_path / "report.html"
    assert report([str(settings.out), "--out", str(page)]) == 0
    assert f"prge run --resume {settings.out}" in page.read_text()
    device.calls_left = None
    run(replace(settings, resume=settings.out))
    assert report([str(settings.out), "--out", str(page)]) == 0
    assert f"It took all of its steps. {STEPS} of {STEPS} steps" in page.read_text()
    assert f"prge publish {settings.out}" in page.read_text()


@pytest.mark.parametrize("save_steps", [0, 5])
def test_a_run_killed_after_any_calls_resumes_with_the_same_bits_and_counts(
    device: Device, settings: RunSettings, save_steps: int, tmp_path: Path
) -> None:
    settings = replace(settings, save_steps=save_steps, eval_steps=3)
    run(settings)
    killed = replace(settings, out=tmp_path / "killed")

    def lose_a_line() -> None:
        """Drop the last line of the metrics, as a kill between the journal and the metrics does."""
        metrics = killed.out / "metrics.jsonl"
        metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))

    assert _run_to_its_end(device, killed, range(2, 7), lose_a_line) > 3

    def left(folder: Path) -> dict[str, Any]:
        counts = [(r["event"], r["step"], r["forward_passes"]) for r in _json_lines(folder / "metrics.jsonl")]
        summary = json.loads((folder / "run.json").read_text())
        files = [folder / "journal.jsonl", folder / "final/adapter_model.safetensors"]
        return {
            "bits": {
                path.relative_to(folder).as_posix(): path.read_bytes()
                for path in (*files, *(folder / "checkpoints").rglob("*.*"))
            },
            "counts": counts,
            "steps": summary["train"]["steps"],
            "forward_passes": summary["train"]["forward_passes"],
        }

    assert left(killed.out) == left(settings.out)


def _signed(record: dict[str, Any]) -> str:
    content = json.dumps(record, separators=(",", ":"))
    return f'{{"crc32":"{zlib.crc32(content.encode()):08x}","record":{content}}}\n'


IMPOSSIBLE_CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("start", {"settings": []}),
    ("start", {"bundle": None}),
    ("step", {"projected_gradients": []}),
    ("step", {"projected_gradients": "1"}),
    ("step", {"projected_gradients": [[1e400]]}),
    ("step", {"loss": None}),
    ("step", {"learning_rate": "1"}),
    ("evaluation", {"value": "best"}),
    ("head", {"classes": 10**12}),
    ("head", {"values": "?"}),
    ("head", {"folds": 3}),
]


@pytest.mark.parametrize(
    ("device", "record_type", "changes"),
    [
        (is_encoder, record_type, changes)
        for record_type, changes in IMPOSSIBLE_CHANGES
        for is_encoder in (False, True)
        if is_encoder or record_type != "head"
    ],
    indirect=["device"],
)
@pytest.mark.timeout(20)
def test_a_journal_with_impossible_records_is_an_error(
    settings: RunSettings, record_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    run(settings)
    shutil.rmtree(settings.out / "checkpoints")
    records = [line["record"] for line in _json_lines(settings.out / "journal.jsonl")]
    number = next(n for n, record in enumerate(records) if record["type"] == record_type)
    records[number] = json.loads(json.dumps({**records[number], **changes}))
    (settings.out / "journal.jsonl").write_text("".join(map(_signed, records)))
    with raises(PrgeError, "journal-damaged", "settings-changed"):
        run(replace(settings, resume=settings.out))
    if record_type != "start":
        with raises(RunError, "journal-damaged"):
            replay([str(settings.out), "--out", str(tmp_path / "replayed")])


@pytest.mark.parametrize("device", [True], indirect=True, ids=["encoder"])
def test_a_replay_compares_the_head_too(
    settings: RunSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(replace(settings, steps=1, learning_rate=1e-30))
    lines = (settings.out / "journal.jsonl").read_text().splitlines(keepends=True)
    assert replay([str(settings.out), "--out", str(tmp_path / "whole")]) == 0
    (settings.out / "journal.jsonl").write_text(lines[0])
    assert replay([str(settings.out), "--out", str(tmp_path / "cut")]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_impossible_figures_are_an_error(settings: RunSettings) -> None:
    run(settings)
    records = [line["record"] for line in _json_lines(settings.out / "journal.jsonl")]
    for record in records:
        if record["type"] == "evaluation":
            record["loss"] = "low"
    (settings.out / "journal.jsonl").write_text("".join(map(_signed, records)))
    with raises(RunError, "journal-damaged"):
        run(replace(settings, resume=settings.out))


def test_a_folder_whose_name_begins_with_a_dash_is_resumed(
    settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(replace(settings, out=Path("-x")))
    for arguments in (["--resume", "./-x"], ["--resume=-x"]):
        stored = parse_settings(RunSettings, arguments, "prge run")
        assert (stored.out, stored.steps) == (Path("-x"), STEPS)
        run(stored)


def test_on_request_a_run_continues_with_another_estimator(
    device: Device, settings: RunSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal records the step of the change, so the run resumes and replays to the same bits."""
    device.calls_left = 8
    with pytest.raises(Killed):
        run(settings)
    device.calls_left = 10**9
    changed = replace(settings, resume=settings.out, share_directions=True, learning_rate=0.01)
    with raises(ConfigError, "settings-changed", containing="learning_rate") as caught:
        run(changed)
    assert "share_directions" in str(caught.value)
    assert "--change-estimator" in str(caught.value.remedy)
    killed = replace(changed, out=tmp_path / "killed", resume=tmp_path / "killed")
    shutil.copytree(settings.out, killed.out)
    run(replace(changed, change_estimator=True))
    device.calls_left = 2
    with pytest.raises(Killed):
        run(replace(killed, change_estimator=True))
    assert _run_to_its_end(device, killed, range(2, 7))
    assert bits(killed.out) == bits(settings.out)
    with Journal(settings.out / "journal.jsonl", writable=False) as journal:
        (change,) = [record for record in journal.records if record["type"] == "change"]
    assert 0 < change["step"] < STEPS and change["settings"]["share_directions"] is True
    stored = parse_settings(RunSettings, ["--resume", str(settings.out)], "prge run")
    assert stored.share_directions and not stored.change_estimator
    assert replay([str(settings.out), "--out", str(tmp_path / "replayed")]) == 0
    assert "the same bits" in capsys.readouterr().out


def test_with_another_estimator_everything_else_stays(settings: RunSettings) -> None:
    run(settings)
    with raises(ConfigError, "settings-changed", containing="seed") as caught:
        run(replace(settings, resume=settings.out, share_directions=True, seed=7, change_estimator=True))
    assert "share_directions" not in str(caught.value)


def test_epochs_are_steps_and_a_resumed_run_has_the_same_bits(
    device: Device, settings: RunSettings, tmp_path: Path
) -> None:
    """With 40 rows and 8 rows per step, one and a half epochs are 8 steps."""
    run(replace(settings, steps=8))
    epochs = replace(settings, steps=RunSettings.steps, epochs=1.5, out=tmp_path / "epochs")
    device.calls_left = 6
    with pytest.raises(Killed):
        run(epochs)
    device.calls_left = None
    stored = parse_settings(RunSettings, ["--resume", str(epochs.out)], "prge run")
    assert (stored.steps, stored.epochs) == (8, None)
    with raises(ConfigError, "settings-changed", containing="steps"):
        run(replace(stored, epochs=2.0))
    run(replace(stored, epochs=1.5))
    assert bits(epochs.out) == bits(settings.out)
    assert "1.5 epochs: 8 steps" in (epochs.out / "log.txt").read_text()


def test_steps_computed_from_epochs_must_fit_the_other_settings(settings: RunSettings) -> None:
    with raises(ConfigError, "settings-unusable", containing="--warmup-steps"):
        run(replace(settings, steps=RunSettings.steps, epochs=1.0, warmup_steps=9))
    assert not (settings.out / "journal.jsonl").exists()


def test_a_run_reports_which_columns_it_read(settings: RunSettings, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"text"', '"review"'))
    with raises(DataError, "form-unknown", "column-missing", containing="review, label"):
        run(settings)
    run(replace(settings, columns=["text=review"]))
    log = (settings.out / "log.txt").read_text()
    assert log.count("columns: text from review") == 2


def test_scores_of_cut_rows_are_marked(
    device: Device, settings: RunSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The note stands next to the score in the log, in metrics.jsonl, and in both forms of `prge eval`."""
    assert settings.dev is not None
    text_field, rest = ("text", {"label": 1}) if device.encoder else ("prompt", {"completion": " bad"})
    short, long = {text_field: "good film", **rest}, {text_field: "good film " * 20, **rest}
    settings.train.write_text(f"{json.dumps(short)}\n{json.dumps(short)}\n" * 4)
    if device.encoder:
        settings.train.write_text(f"{json.dumps(short)}\n{json.dumps({**short, 'label': 0})}\n" * 4)
    settings.dev.write_text(f"{json.dumps(long)}\n{json.dumps(short)}\n")
    # Two different rows are too few to hold any out.
    run(replace(settings, head_folds=0))
    evaluations = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "evaluation"]
    assert {r["cut_examples"] for r in evaluations} == {1}
    assert "cut examples 1" in (settings.out / "log.txt").read_text()
    device.replaces(monkeypatch, evaluate_verb)
    arguments = [f"--bundle={settings.bundle}", f"--data={settings.dev}", f"--adapter={settings.out}"]
    arguments += [f"--task={settings.task}"] if settings.task else []
    capsys.readouterr()
    assert evaluate_verb.main([*arguments, f"--json={settings.out / 'eval.json'}"]) == 0
    assert "1 of 2 examples were truncated: these figures are not for whole rows" in capsys.readouterr().out
    assert json.loads((settings.out / "eval.json").read_text())["cut_examples"] == 1


def _list_template(bundle: Path, source: str) -> None:
    """Give a bundle a chat template that its manifest lists."""
    path = bundle / "tokenizer/chat_template.jinja"
    path.write_text(source)
    manifest = read_manifest(bundle)
    manifest["files"]["tokenizer/chat_template.jinja"] = {}
    write_manifest(bundle, manifest)
    rehash(bundle)


@pytest.mark.parametrize("device", [False], indirect=True, ids=["decoder"])
def test_a_run_isnt_resumed_with_another_chat_template(settings: RunSettings, tmp_path: Path) -> None:
    """The template determines the training text, so it is part of the run's identity."""
    turns = [{"role": "user", "content": "a film"}, {"role": "assistant", "content": "a good film"}]
    rows = "".join(json.dumps({"messages": turns}) + "\n" for _ in range(8))
    (tmp_path / "chat.jsonl").write_text(rows)
    chat = replace(settings, train=tmp_path / "chat.jsonl", dev=None)
    with raises(DataError, "chat-template-missing"):
        run(chat)
    _list_template(settings.bundle, "{% for m in messages %}{{ m.content }}|{% endfor %}")
    run(chat)
    run(replace(chat, resume=chat.out))
    _list_template(settings.bundle, "{% for m in messages %}{{ m.content }}#{% endfor %}")
    with raises(ConfigError, "settings-changed", containing="bundle"):
        run(replace(chat, resume=chat.out))
    (settings.bundle / "tokenizer/chat_template.jinja").write_text("{{ messages }}")
    with raises(BundleError, "bundle-file-size", containing="chat_template.jinja"):
        run(replace(chat, resume=chat.out))


def _today(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """Set the current day."""

    class Today(date):
        @classmethod
        def today(cls) -> Today:
            return cls.fromisoformat(day)

    monkeypatch.setattr(training_flags, "date", Today)
    monkeypatch.setattr("prge.data.tokenization.chat.date", Today)


@pytest.mark.parametrize("device", [False], indirect=True, ids=["decoder"])
def test_a_resumed_run_keeps_the_date_of_its_start(
    device: Device,
    settings: RunSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The chat template writes the date; a run that is resumed on another day has the same tokens."""
    device.replaces(monkeypatch, evaluate_verb)
    _list_template(
        settings.bundle, "{% for m in messages %}{{ m.content }}{{ strftime_now(' %d') }}|{% endfor %}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "good film"}]
    rows = "".join(json.dumps({"messages": turns}) + "\n" for _ in range(8))
    (tmp_path / "chat.jsonl").write_text(rows)
    chat = replace(settings, train=tmp_path / "chat.jsonl", dev=tmp_path / "chat.jsonl")
    _today(monkeypatch, "2026-11-27")
    run(chat)
    device.calls_left = 12
    killed = replace(chat, out=tmp_path / "killed")
    with pytest.raises(Killed):
        run(killed)
    device.calls_left = None
    _today(monkeypatch, "2026-12-03")
    run(parse_settings(RunSettings, ["--resume", str(killed.out)], "prge run"))
    assert bits(killed.out) == bits(chat.out)
    assert "date: '2026-11-27'" in (chat.out / "config.yaml").read_text()
    with raises(ConfigError, "settings-changed", containing="2026-12-03"):
        run(replace(killed, resume=killed.out, date="2026-12-03"))
    arguments = [f"--bundle={settings.bundle}", f"--data={chat.dev}", f"--adapter={chat.out}"]
    losses = {}
    for date_flag in ("", "--date=2026-11-27", "--date=2026-12-03"):
        evaluate_verb.main([*arguments, f"--json={tmp_path / 'eval.json'}", *filter(None, [date_flag])])
        losses[date_flag] = json.loads((tmp_path / "eval.json").read_text())["loss"]
    assert losses[""] == losses["--date=2026-11-27"] != losses["--date=2026-12-03"]
    other = replace(chat, out=tmp_path / "other")
    run(other)
    assert bits(other.out) != bits(chat.out)


@pytest.mark.parametrize("device", [True], indirect=True, ids=["encoder"])
def test_a_run_isnt_resumed_with_another_task_or_rows(settings: RunSettings) -> None:
    run(settings)
    path = Path(str(settings.task))
    path.write_text(path.read_text().replace('"{text}"', '"{text}!"'))
    other = replace(settings, resume=settings.out, train=settings.dev, steps=99)
    with raises(ConfigError, "settings-changed", containing="task") as caught:
        run(other)
    assert all(part in str(caught.value) for part in ("train", "steps", "99"))


def test_one_process_holds_a_run_folder(settings: RunSettings) -> None:
    with run_lock(settings.out), raises(RunError, "run-in-use", containing=str(os.getpid())):
        run(settings)


def test_an_evaluation_has_the_scores_of_the_run(
    device: Device, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings)
    device.replaces(monkeypatch, evaluate_verb)
    assert settings.dev is not None
    result = evaluate_verb.run(
        EvaluateSettings(settings.bundle, settings.dev, task=settings.task, adapter=settings.out)
    )
    evaluations = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "evaluation"]
    assert result["loss"] == pytest.approx(min(r["loss"] for r in evaluations), rel=1e-6)


# Exact steps


@pytest.fixture
def exact(device: Device, settings: RunSettings, tmp_path: Path) -> RunSettings:
    """Return settings of a short run of a bundle with the role backward."""
    device.has_backward = True
    bundle = device.write_bundle(tmp_path / "exact")
    return replace(settings, bundle=bundle, estimator="exact", save_steps=100)


@pytest.mark.parametrize(("every", "kept"), [(100, 4), (3, 3), (0, 4)])
def test_a_journal_of_ten_thousand_exact_steps_is_below_three_checkpoints(
    exact: RunSettings, monkeypatch: pytest.MonkeyPatch, every: int, kept: int
) -> None:
    """The size is extrapolated from these records to Qwen2.5-3B with rank 16 on queries and values."""
    append, counts = Journal.append, []

    def counted(journal: Journal, record: dict[str, Any]) -> dict[str, Any]:
        append(journal, record)
        counts.append(sum("gradient" in each for each in journal.records))
        return record

    monkeypatch.setattr(Journal, "append", counted)
    run(replace(exact, save_steps=every))
    assert max(counts) == kept
    lines = (exact.out / "journal.jsonl").read_bytes().splitlines(keepends=True)
    plain = [len(line) for line in lines if b'"type":"step"' in line]
    assert len(plain) == STEPS and b'"gradient"' not in b"".join(lines)
    evaluation = max(len(line) for line in lines if b'"type":"evaluation"' in line)

    rank, layers, width = 16, 36, 2048
    lora_a, lora_b = rank * layers * 2 * width, rank * layers * (width + 256)
    gradient = len(encode_array(np.zeros(lora_b, np.float32)))
    # The numbers of step and rows have a few digits more than here.
    steps = 10_000 * (max(plain) + 4 + 6 * EXAMPLES)
    journal = steps + 100 * evaluation + kept * gradient
    # Adam's two moments, in addition to `lora_a` and `lora_b`.
    checkpoint = 4 * (lora_a + 3 * lora_b)
    assert journal < 2 * checkpoint


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3])
def test_a_gradient_that_is_not_finite_is_no_step(
    device: Device, exact: RunSettings, tmp_path: Path, bad: float, max_grad_norm: float
) -> None:
    """The run ends with the previous state, and resumes from there to the same bits."""
    exact = replace(exact, max_grad_norm=max_grad_norm)
    run(replace(exact, out=tmp_path / "whole"))
    device.calls_left = 8
    with pytest.raises(Killed):
        run(exact)
    device.calls_left, device.broken = None, bad
    with Journal(exact.out / "journal.jsonl", writable=False) as journal:
        steps = journal.steps
    assert steps > 0
    with np.errstate(invalid="ignore"), raises(DivergenceError, "loss-not-finite"):
        run(replace(exact, resume=exact.out))
    with Journal(exact.out / "journal.jsonl", writable=False) as journal:
        assert journal.steps == steps
    assert json.loads((exact.out / "run.json").read_text())["run"]["status"] == "diverged"
    newest = max((exact.out / "checkpoints").iterdir())
    assert newest.name == f"step-{steps:06d}"
    device.broken = None
    run(replace(exact, resume=exact.out))
    assert bits(exact.out) == bits(tmp_path / "whole")


def test_a_run_without_a_working_engine_does_not_begin(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the problem is fixed, the same command starts it."""

    def refuse(*_: object, **__: object) -> None:
        raise EngineError("no block may stay loaded")

    with monkeypatch.context() as patch, pytest.raises(EngineError):
        patch.setattr(run_verb, "open_engine", refuse)
        run(settings)
    assert not settings.out.exists()
    run(settings)


def test_a_run_that_is_refused_leaves_nothing(settings: RunSettings, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("no rows\n")
    out = tmp_path / "new/run"
    refused: list[dict[str, Any]] = [
        {"train": tmp_path / "bad.jsonl"},
        {"dev": tmp_path / "nowhere.jsonl"},
        {"task": "nowhere.yaml"},
        {"adapter": tmp_path},
        {"bundle": tmp_path},
        {"sample_prompts": tmp_path / "nowhere.txt"},
        {"memory": 1},
        {"columns": ["text=nothing"]},
        {"estimator": "exact", "engine": "torch", "trunk_cache_bytes": 1},
    ]
    for change in refused:
        with pytest.raises(PrgeError):
            run(replace(settings, out=out, **change))
        assert not out.parent.exists(), change


def test_decay_and_normalisation_are_part_of_a_run(
    device: Device, settings: RunSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed or replayed run has the same bits; with other values the run can't be resumed."""
    changes: dict[str, Any] = {"weight_decay": 0.1}
    if not device.encoder:
        changes["loss_normalisation"] = "token"
    changed = replace(settings, **changes)
    run(changed)
    run(replace(settings, out=tmp_path / "plain"))
    assert bits(tmp_path / "plain")[1] != bits(settings.out)[1]
    killed = replace(changed, out=tmp_path / "killed")
    assert _run_to_its_end(device, killed, range(2, 7)) > 3
    assert bits(killed.out) == bits(settings.out)
    assert replay([str(settings.out), "--out", str(tmp_path / "replayed")]) == 0
    assert "the same bits" in capsys.readouterr().out
    for name in changes:
        with raises(ConfigError, "settings-changed", containing=name):
            run(replace(changed, resume=settings.out, **{name: getattr(settings, name)}))


def test_the_normalisation_by_tokens_is_for_completions(device: Device, settings: RunSettings) -> None:
    if device.encoder:  # a loss over classes has no tokens
        with raises(ConfigError, "setting-of-other-objective", containing="--loss-normalisation"):
            run(replace(settings, loss_normalisation="token"))


def test_a_run_whose_steps_had_other_examples_is_not_resumed(settings: RunSettings) -> None:
    """Earlier versions counted the sequences of a call; their missing settings have default values."""
    run(settings)
    path = settings.out / "journal.jsonl"
    with Journal(path, writable=False) as journal:
        records = journal.records
    for name in ("weight_decay", "loss_normalisation"):
        del records[0]["settings"][name]

    def write() -> None:
        path.unlink()
        with Journal(path) as journal:
            for record in records:
                journal.append(record)

    write()
    run(replace(settings, resume=settings.out))
    for record in records:
        if record["type"] == "step":
            record["rows"] = record["rows"][:2]
    write()
    with raises(ConfigError, "batch-of-other-version", containing=str(EXAMPLES)):
        run(replace(settings, resume=settings.out))
