"""`prge run`, `replay` and `eval` on tangent bundles, with a model in numpy for the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner import evaluate as evaluate_verb
from device_runner import run as run_verb
from device_runner.programs import Programs
from device_runner.replay import main as replay
from device_runner.run import run, with_stored_settings
from device_runner.run_settings import RunSettings
from prge.bundle import ADAPTER, MANIFEST, PROGRAM, TOKENIZER, Bundle, file_sha256, open_bundle
from prge.contract import FORMAT
from prge.engine import Array
from prge.errors import ConfigError
from prge.journal import Journal
from prge.settings import parse_settings
from tests.bundles import write_manifest
from tests.device_runner.tiny_tokenizers import byte_level_backend, encoder_backend
from tests.numpy_engine import NumpyEngine, NumpyTangentEngine
from tests.templates import write_template

QUERIES, BATCH, STEPS = 3, 4, 12


class Killed(BaseException):
    """Stands for the end of the process."""


class Device:
    """Stands for the engine: loads models in numpy, and ends the process after some calls."""

    def __init__(self, encoder: bool) -> None:
        backend = encoder_backend() if encoder else byte_level_backend()
        self.backend = backend
        self.vocabulary = backend.get_vocab_size()
        self.encoder = encoder
        self.loads: list[str] = []
        self.calls_left: int | None = None

    def model(self, batch_size: int) -> NumpyEngine:
        """The same weights for any number of rows."""
        size = {"vocabulary": self.vocabulary, "sequence_length": 16, "positions": 8}
        return NumpyEngine(1, batch_size, encoder=self.encoder, **size)

    def load(self, method: str) -> NumpyEngine | NumpyTangentEngine:
        self.loads.append(method)
        engine = self.model(7) if method == "score" else self.model(BATCH).tangent(QUERIES)
        forward = engine.forward

        def counted(inputs: Mapping[str, Array]) -> dict[str, Array]:
            if self.calls_left is not None:
                self.calls_left -= 1
                if self.calls_left < 0:
                    raise Killed
            return {name: array.astype(np.float32) for name, array in forward(inputs).items()}

        engine.forward = counted  # type: ignore[method-assign]
        return engine

    def write_bundle(self, folder: Path) -> Path:
        """A bundle of this model; its program is only a name."""
        step, score = self.model(BATCH).tangent(QUERIES).contract, self.model(7).contract
        write_template(folder / ADAPTER, step.modules)
        (folder / TOKENIZER).mkdir()
        self.backend.save(str(folder / TOKENIZER / "tokenizer.json"))
        (folder / PROGRAM).write_bytes(b"numpy")
        files = [path for path in folder.rglob("*") if path.is_file()]
        manifest = {
            "format": FORMAT,
            "contract": step.to_json(),
            "score": score.to_json(),
            "queries": QUERIES,
            "model": {"name_or_path": "numpy"},
            "tokenizer": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            "files": {
                str(path.relative_to(folder)): {"sha256": file_sha256(path), "bytes": path.stat().st_size}
                for path in files
            },
        }
        write_manifest(folder, manifest)
        return folder


@pytest.fixture(params=[False, True], ids=["decoder", "encoder"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(request.param)

    def open_programs(bundle: Bundle, threads: int | None = None, keep: bool = False) -> Programs:
        return Programs(bundle, device.load, keep)

    monkeypatch.setattr(run_verb, "open_programs", open_programs)
    return device


@pytest.fixture
def settings(device: Device, tmp_path: Path) -> RunSettings:
    """A short run; an encoder's is a classification, a decoder's learns texts."""
    random = np.random.default_rng(0)
    words = ["good", "bad", "great", "terrible", "film", "dog", "cat", "town"]
    drawn = random.integers(0, 8, (60, 3)).tolist()
    # The middle word tells the label, in nine rows of ten.
    labels = [int(middle % 2 != (random.random() < 0.1)) for _, middle, _ in drawn]
    rows = [
        {"text": " ".join(words[word] for word in row), "label": label}
        for row, label in zip(drawn, labels, strict=True)
    ]
    for name, part in (("train", rows[:40]), ("dev", rows[40:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "task.yaml").write_text(
        'name: films\ntemplate: "{text}"\nlabel_words: {0: " No", 1: " Yes"}\ncolumns: {label: label}\n'
        "metric: accuracy\n"
    )
    return RunSettings(
        bundle=device.write_bundle(tmp_path / "bundle"),
        train=tmp_path / "train.jsonl",
        dev=tmp_path / "dev.jsonl",
        task=str(tmp_path / "task.yaml") if device.encoder else None,
        out=tmp_path / "run",
        steps=STEPS,
        calls=2,
        learning_rate=0.02,
        evaluate_every=4,
        checkpoint_every=5,
        head_folds=4,
        select="loss",
        quiet=True,
    )


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("shared", [False, True])
def test_it_learns_and_its_journal_makes_the_same_bits_again(
    device: Device, settings: RunSettings, shared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(replace(settings, steps=60, share_directions=shared))
    evaluations = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "evaluation"]
    assert min(r["loss"] for r in evaluations) < 0.98 * evaluations[0]["loss"]
    device.load = None  # type: ignore[assignment, method-assign]
    assert replay([str(settings.out), "--out", str(tmp_path / "replayed")]) == 0
    assert "the same bits" in capsys.readouterr().out


def test_the_journal_says_what_the_bundle_settled(device: Device, settings: RunSettings) -> None:
    run(settings)
    with Journal(settings.out / "journal.jsonl", writable=False) as journal:
        start = journal.first("start")
        assert start is not None
        assert (start["settings"]["estimator"], start["settings"]["queries"]) == ("tangent", QUERIES)
        first = journal.step(0)
        assert first is not None and np.shape(first["scalars"]) == (QUERIES, 2 * BATCH)
    stored = parse_settings(RunSettings, with_stored_settings(["--resume", str(settings.out)]), "prge run")
    assert (stored.estimator, stored.queries) == ("tangent", QUERIES)


def test_metrics_count_rows_and_tell_the_largest_tangent(device: Device, settings: RunSettings) -> None:
    run(settings)
    steps = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "step"]
    assert [r["rows"] for r in steps] == [n * 2 * BATCH * (1 + QUERIES) for n in range(1, STEPS + 1)]
    assert all(r["largest_tangent"] > 0 and r["scalar_deviation"] > 0 for r in steps)
    summary = json.loads((settings.out / "run.json").read_text())
    assert summary["train"]["largest_tangent"] == max(r["largest_tangent"] for r in steps)


def test_one_program_is_loaded_at_a_time(device: Device, settings: RunSettings) -> None:
    run(settings)
    assert device.loads == ["score", "forward"] * 3 + ["score"]


def test_programs_are_kept_if_asked_and_change_nothing_else(
    device: Device, settings: RunSettings, tmp_path: Path
) -> None:
    run(settings)
    device.loads.clear()
    run(replace(settings, keep_programs=True, out=tmp_path / "kept"))
    assert sorted(device.loads) == ["forward", "score"]
    assert (tmp_path / "kept/journal.jsonl").read_bytes() == (settings.out / "journal.jsonl").read_bytes()


def test_killed_after_any_calls_and_resumed_it_ends_in_the_same_bits(
    device: Device, settings: RunSettings, tmp_path: Path
) -> None:
    run(settings)
    killed = replace(settings, out=tmp_path / "killed")
    resumes = 0
    while True:
        device.calls_left = 3 + resumes % 8
        resume = killed.out if (killed.out / "config.yaml").is_file() else None
        try:
            run(replace(killed, resume=resume))
            break
        except Killed:
            resumes += 1
    assert resumes > 3
    for name in ("journal.jsonl", "final/adapter_model.safetensors"):
        assert (killed.out / name).read_bytes() == (settings.out / name).read_bytes()


def test_a_run_isnt_resumed_with_other_directions(device: Device, settings: RunSettings) -> None:
    run(settings)
    with pytest.raises(ConfigError, match="share_directions was False, is True"):
        run(replace(settings, resume=settings.out, share_directions=True))


def test_differences_need_another_bundle(settings: RunSettings) -> None:
    with pytest.raises(ConfigError, match="export with --estimator antithetic"):
        run(replace(settings, estimator="antithetic"))
    assert not settings.out.exists()


def test_evaluation_loads_the_program_for_scoring_alone(
    device: Device, settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(settings)
    device.loads.clear()

    class Engine:
        @staticmethod
        def load(bundle: Bundle, threads: int | None, method: str) -> NumpyEngine | NumpyTangentEngine:
            return device.load(method)

    monkeypatch.setattr(evaluate_verb, "ExecutorchEngine", Engine)
    assert settings.dev is not None
    found = evaluate_verb.run(
        evaluate_verb.EvaluateSettings(settings.bundle, settings.dev, settings.task, adapter=settings.out)
    )
    assert device.loads == ["score"]
    evaluations = [r for r in _json_lines(settings.out / "metrics.jsonl") if r["event"] == "evaluation"]
    assert found["loss"] == pytest.approx(min(r["loss"] for r in evaluations), rel=1e-6)


def test_the_bundle_of_these_tests_is_whole(settings: RunSettings) -> None:
    bundle = open_bundle(settings.bundle)
    assert bundle.contract.is_tangent and not bundle.score_contract.is_tangent
    assert (settings.bundle / MANIFEST).is_file()
