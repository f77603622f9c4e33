"""Runs on preferences, with a numpy model instead of the engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from device_runner import evaluate as evaluate_verb
from device_runner import run as run_verb
from device_runner.fleet.local_round import open_local
from device_runner.replay import main as replay
from device_runner.report import main as report
from device_runner.run import run
from device_runner.session.settings import RunSettings
from prge.errors import ConfigError, DataError
from prge.objectives.preferences import ObjectiveName
from tests.device_runner.numpy_device import Device, Killed
from tests.refusals import raises
from tests.tiers import second_tier
from tests.workshop import bits, write_rows

WORDS = ["film", "cat", "good", "bad", "Yes", "No"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(has_backward=True)
    device.replaces(monkeypatch, run_verb)
    device.replaces(monkeypatch, evaluate_verb)
    return device


def pair(number: int) -> dict[str, Any]:
    """Return a pair, of which the second of two words determines which answer is preferred."""
    first, second = WORDS[number % 3], WORDS[2 + number % 2]
    chosen, rejected = (" Yes film", " No") if number % 2 else (" No", " Yes film")
    return {"prompt": f"{first} {second}", "chosen": chosen, "rejected": rejected}


def rating(number: int) -> dict[str, Any]:
    row, is_liked = pair(number), number % 3 > 0
    return {
        "prompt": row["prompt"],
        "completion": row["chosen" if is_liked else "rejected"],
        "label": is_liked,
    }


@pytest.fixture
def settings(device: Device, tmp_path: Path) -> RunSettings:
    """Return settings of a short run on pairs."""
    return RunSettings(
        bundle=device.write_bundle(tmp_path / "bundle"),
        train=write_rows(tmp_path / "train.jsonl", [pair(number) for number in range(24)]),
        dev=write_rows(tmp_path / "dev.jsonl", [pair(number) for number in range(24, 36)]),
        out=tmp_path / "run",
        steps=12,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        warmup_steps=0,
        eval_steps=4,
        save_steps=5,
        quiet=True,
    )


def output(out: Path) -> str:
    return (out / "log.txt").read_text()


def evaluations(out: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "evaluation"]


CASES = [
    (objective, estimator)
    for objective in ("auto", "ipo", "simpo", "orpo", "kto")
    for estimator in ("exact", "tangent", "antithetic")
]


@pytest.mark.parametrize(("objective", "estimator"), [CASES[0], *second_tier(*CASES[1:])])
def test_a_run_learns_preferences_and_replays(
    settings: RunSettings, objective: ObjectiveName, estimator: Any, tmp_path: Path
) -> None:
    options = {"objective": objective, "estimator": estimator, "keep_gradients": estimator == "exact"}
    run(replace(settings, steps=40, **options))
    first, *_, last = evaluations(settings.out)
    assert last["loss"] < first["loss"]
    assert last["margin"] > first["margin"]
    assert (first["chosen_change"], first["rejected_change"]) == (0, 0)
    assert last["pairs_right"] >= first["pairs_right"]
    assert replay([str(settings.out), "--out", str(tmp_path / "replayed")]) == 0
    assert report([str(settings.out), "--out", str(tmp_path / "report.html")]) == 0
    assert "pairs right" in (tmp_path / "report.html").read_text()


def test_a_killed_and_resumed_run_ends_with_the_same_bits(device: Device, settings: RunSettings) -> None:
    run(settings)
    for kept in (True, False):
        out = settings.out.with_name(f"killed {kept}")
        again = replace(settings, out=out)
        for calls in (1, 6, 9):
            device.calls_left = calls
            with pytest.raises(Killed):
                run(again)
            again = replace(again, resume=out)
            if not kept:
                (out / "reference.json").unlink(missing_ok=True)
        device.calls_left = None
        run(again)
        assert bits(out) == bits(settings.out)


def test_the_reference_is_computed_once_and_again_if_it_is_incomplete(
    device: Device, settings: RunSettings, tmp_path: Path
) -> None:
    path = settings.out / "reference.json"
    run(replace(settings, steps=8))
    whole = path.read_bytes()
    assert output(settings.out).count("reference: 36 rows scored with the start adapter") == 1

    def resumed(content: bytes) -> bool:
        """Return whether the reference was computed again from this content."""
        path.write_bytes(content)
        before = output(settings.out).count("was damaged, or belonged to another run")
        run(replace(settings, steps=8, resume=settings.out))
        assert path.read_bytes() == whole
        return output(settings.out).count("was damaged, or belonged to another run") > before

    assert not resumed(whole)
    document = json.loads(whole)
    changed = json.loads(whole)
    changed["scores"][3][1] += 1e-12
    for damaged in (
        whole[:-9],
        b"\xff",
        b"[]",
        json.dumps({**document, "of": "another"}).encode(),
        json.dumps(changed).encode(),
        json.dumps({**document, "scores": document["scores"][1:]}).encode(),
    ):
        assert resumed(damaged)
    # The reference of another bundle is valid, but must not be used.
    other = replace(settings, bundle=Device().write_bundle(tmp_path / "other"))
    run(replace(other, out=tmp_path / "second"))
    assert resumed((tmp_path / "second/reference.json").read_bytes())


def test_a_step_after_all_pairs_are_right_is_not_better(settings: RunSettings) -> None:
    run(replace(settings, steps=120, beta=2.0, learning_rate=0.05))
    result = evaluations(settings.out)
    best = max(result, key=lambda each: each["value"])
    assert result[-1]["loss"] < best["loss"]
    assert best["step"] < result[-1]["step"]
    assert best["value"] <= -0.1
    assert best["pairs_right"] == 1


def test_harm_to_chosen_answers_is_reported(settings: RunSettings, tmp_path: Path) -> None:
    # If two answers start alike, lowering the rejected one also lowers the chosen one.
    rows = [{"prompt": "film", "chosen": " Yes good good", "rejected": " Yes good"} for _ in range(8)]
    changed = replace(
        settings,
        train=write_rows(tmp_path / "train.jsonl", rows),
        dev=write_rows(tmp_path / "dev.jsonl", rows),
        learning_rate=0.3,
        steps=40,
        beta=0.01,
    )
    run(changed)
    last = evaluations(changed.out)[-1]
    assert last["rejected_change"] < last["chosen_change"] < 0
    assert "the run only lowers what is rejected, and harms what is chosen" in output(changed.out)


def test_ratings_are_learnt_by_kto(settings: RunSettings, tmp_path: Path) -> None:
    rows = [rating(number) for number in range(36)]
    train, dev = write_rows(tmp_path / "t.jsonl", rows[:24]), write_rows(tmp_path / "d.jsonl", rows[24:])
    run(replace(settings, train=train, dev=dev, steps=60))
    first, *_, last = evaluations(settings.out)
    assert (first["pairs_right"], first["loss"]) == (0.5, 0.5)
    assert last["loss"] < 0.5
    assert last["pairs_right"] > 0.5
    start = json.loads((settings.out / "journal.jsonl").read_text().splitlines()[0])
    assert "kto" in json.dumps(start)


def test_an_adapter_is_scored_against_the_bundles_own(settings: RunSettings, tmp_path: Path) -> None:
    run(replace(settings, steps=60))
    arguments = ["--bundle", settings.bundle, "--data", settings.dev, "--adapter", settings.out, "--json"]
    assert evaluate_verb.main([*map(str, arguments), str(tmp_path / "scores.json")]) == 0
    result = json.loads((tmp_path / "scores.json").read_text())
    best = max(evaluations(settings.out), key=lambda each: each["value"])
    for name in ("loss", "pairs_right", "margin", "chosen_change", "rejected_change"):
        assert result[name] == pytest.approx(best[name], rel=1e-6, abs=1e-9), name


def test_a_run_resumes_with_its_objective_alone(settings: RunSettings) -> None:
    run(replace(settings, steps=4))
    for name, value in (("objective", "ipo"), ("beta", 0.5)):
        with raises(ConfigError, "settings-changed", containing=name):
            run(replace(settings, steps=4, resume=settings.out, **{name: value}))


def test_a_run_of_an_earlier_version_resumes(settings: RunSettings) -> None:
    texts = replace(settings, train=settings.train.with_name("texts.jsonl"), dev=None)
    write_rows(texts.train, [{"text": f"{word} cat film"} for word in WORDS])
    run(replace(texts, steps=4))
    from prge.formats.journal import Journal

    path = settings.out / "journal.jsonl"
    with Journal(path) as journal:
        records = [{**record} for record in journal.records]
    shutil.copy(path, path.with_name("now.jsonl"))
    path.unlink()
    for name in ("objective", "beta", "label_smoothing", "gamma"):
        del records[0]["settings"][name]
    del records[0]["objective"]
    with Journal(path) as journal:
        for record in records:
            journal.append(record)
    run(replace(texts, steps=4, resume=settings.out))
    with raises(ConfigError, "settings-changed", containing="objective"):
        run(replace(texts, steps=4, resume=settings.out, objective="completion"))


@pytest.mark.parametrize(
    ("changed", "code", "value"),
    [
        ({"beta": 0.0}, "settings-unusable", "--beta"),
        ({"beta": -1.0}, "settings-unusable", "-1.0"),
        ({"label_smoothing": 0.5}, "settings-unusable", "--label-smoothing"),
        ({"gamma": 2.0}, "setting-of-other-objective", "--gamma"),
        ({"objective": "completion", "beta": 1.0}, "setting-of-other-objective", "--beta"),
        (
            {"max_example_grad_norm": 1.0, "batch_size": 1, "estimator": None},
            "clipping-several-sequences",
            "--max-example-grad-norm",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(
    settings: RunSettings, changed: dict[str, Any], code: str, value: str
) -> None:
    with raises(ConfigError, code, containing=value):
        run(replace(settings, **changed))
    assert not (settings.out / "journal.jsonl").exists()


def test_the_development_rows_are_of_the_same_type(settings: RunSettings, tmp_path: Path) -> None:
    dev = write_rows(tmp_path / "d.jsonl", [rating(number) for number in range(4)])
    with raises(DataError, "objective-does-not-fit", containing="dpo"):
        run(replace(settings, dev=dev))
    with raises(ConfigError, "candidates-missing", containing="--sample-rows"):
        run(replace(settings, sample_rows=2))


def test_a_fleet_refuses_preferences(settings: RunSettings) -> None:
    from device_runner.fleet.agreement import Plan
    from prge.formats.bundle import open_bundle

    with raises(ConfigError, "rows-of-preferences"):
        open_local(Plan(), open_bundle(settings.bundle), settings)
