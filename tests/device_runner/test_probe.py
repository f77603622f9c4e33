"""`prge probe`, with models in numpy for the engine: exact ones, and ones that round."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner import probe as probe_verb
from device_runner import run as run_verb
from device_runner.probe import ProbeSettings, Reading, Report, probe
from device_runner.run import run
from device_runner.session.noise import Agreement, compare
from device_runner.session.settings import RunSettings
from prge.cli import main
from prge.errors import ConfigError, EngineError
from tests.device_runner.numpy_device import BATCH, QUERIES, Device, write_films

SMALL, LARGE = 1e-3, 1e-1


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Probe a device, with some settings changed."""
    write_films(tmp_path)

    def run_probe(device: Device, scheme: str = "fp32", **changes: Any) -> Report:
        device.replaces(monkeypatch, probe_verb, run_verb)
        bundle = tmp_path / "bundle"
        if not bundle.exists():
            device.write_bundle(bundle, scheme)
        task = str(tmp_path / "task.yaml") if device.encoder else None
        settings = ProbeSettings(bundle, tmp_path / "train.jsonl", task=task, epsilons=(SMALL, LARGE))
        return probe(replace(settings, **changes))

    return run_probe


def agreements(report: Report) -> dict[tuple[str, float], Agreement]:
    return {(reading.estimator, reading.epsilon): reading.agreement for reading in report.readings}


@pytest.mark.parametrize("encoder", [False, True], ids=["decoder", "encoder"])
def test_small_differences_of_an_exact_model_are_its_tangents(measure: Any, encoder: bool) -> None:
    report = measure(Device(encoder), batches=5)
    found = agreements(report)
    assert found["antithetic", SMALL].r > 0.9999
    assert found["antithetic", SMALL].slope == pytest.approx(1, abs=0.005)
    assert found["fzoo", SMALL].r > 0.99
    assert found["fzoo", LARGE].r < found["fzoo", SMALL].r
    assert (report.best.estimator, report.best.epsilon) == ("antithetic", SMALL)
    assert (report.batches, report.examples, report.queries) == (5, 5 * BATCH, QUERIES)


def test_rounding_is_found_to_drown_small_steps(measure: Any) -> None:
    found = agreements(measure(Device(grid=0.1), batches=8))
    assert found["antithetic", SMALL].r < 0.5 < 0.8 < found["antithetic", LARGE].r
    assert found["antithetic", SMALL].signal_to_noise < 1 < found["antithetic", LARGE].signal_to_noise


def test_rows_of_a_scalar(measure: Any) -> None:
    report = measure(Device())
    rows = {reading.estimator: reading.rows_per_scalar for reading in report.readings}
    assert rows == {"antithetic": 2 * BATCH, "fzoo": BATCH * (1 + QUERIES) / QUERIES}
    assert report.tangent_rows_per_scalar == BATCH * (1 + QUERIES) / QUERIES


def test_the_head_of_an_encoder_is_its_adapters_or_fitted(measure: Any, tmp_path: Path) -> None:
    device = Device(encoder=True)
    fitted = measure(device)
    task, train = str(tmp_path / "task.yaml"), tmp_path / "train.jsonl"
    settings = RunSettings(tmp_path / "bundle", train, tmp_path / "run", task=task, steps=1, quiet=True)
    run(replace(settings, learning_rate=1e-9, head_folds=0))
    # The same head, since a run fits it on the same rows.
    found = measure(device, adapter=tmp_path / "run")
    for key, agreement in agreements(found).items():
        assert agreement.r == pytest.approx(agreements(fitted)[key].r, abs=1e-3)


def test_derivatives_that_are_not_finite(measure: Any) -> None:
    device = Device()
    model = device.model

    def broken(batch_size: int, copies: int = 1) -> Any:
        engine = model(batch_size, copies)
        engine.lora_a[:] = np.nan
        return engine

    device.model = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="not finite"):
        measure(device)


def test_one_scalar_cant_be_correlated(measure: Any) -> None:
    with pytest.raises(ConfigError, match="--batches is 1"):
        measure(Device(), batches=1, queries=1)


def test_compare() -> None:
    random = np.random.default_rng(0)
    reference, noise = random.normal(size=(2, 4, 5000))
    same = compare(2 * reference, reference)
    assert (same.r, same.slope) == (pytest.approx(1), pytest.approx(2))
    assert same.signal_to_noise == pytest.approx(1e6)
    noisy = compare(reference + noise / 2, reference)
    assert noisy.signal_to_noise == pytest.approx(4, rel=0.05)
    assert compare(-reference, reference).signal_to_noise == 0
    # The mean of true scalars is zero: a constant is noise too.
    assert compare(reference + 2, reference).r == pytest.approx(1 / 5**0.5, abs=0.02)
    for nothing in (0 * reference, np.full_like(reference, np.nan), np.full_like(reference, np.inf)):
        assert compare(nothing, reference) == Agreement(0, 0)
        assert compare(reference, nothing) == Agreement(0, 0)


READINGS = (
    Reading("antithetic", 0.1, Agreement(1.0, 1.0), 8.0),
    Reading("antithetic", 0.01, Agreement(0.8, 1.0), 8.0),
)
REPORT = Report("8da4w", 4, 16, 4, READINGS, 5.0)


def test_the_recommendation_names_the_best_differences_too() -> None:
    worse = replace(REPORT, readings=REPORT.readings[1:])
    text = worse.recommendation()
    assert text.startswith("Take the tangents")
    assert "antithetic at epsilon 0.01 has the most signal: signal to noise 1.78, r 0.800" in text


def test_table() -> None:
    lines = REPORT.text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("estimator"))
    assert [line.split() for line in lines[start : start + 4]] == [
        ["estimator", "epsilon", "r", "slope", "signal/noise", "rows/scalar"],
        ["tangent", "-", "exact", "-", "-", "5"],
        ["antithetic", "0.1", "1.000", "1.000", ">1e+06", "8"],
        ["antithetic", "0.01", "0.800", "1.000", "1.78", "8"],
    ]
    assert len({len(line) for line in lines[start : start + 4]}) == 1


def test_command_line_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Device()
    device.replaces(monkeypatch, probe_verb)
    write_films(tmp_path)
    bundle = device.write_bundle(tmp_path / "bundle", "8da8w")
    words = [bundle, "--data", tmp_path / "train.jsonl", "--epsilons", "1e-3", "0.05", "--batches", 2]
    assert main(["probe", *map(str, words), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert capsys.readouterr().out.rstrip().endswith(found["recommendation"])
    assert [reading["epsilon"] for reading in found["readings"]] == [1e-3, 0.05, 1e-3, 0.05]
    assert found["best"] in found["readings"] and found["quantization"] == "8da8w"


def test_a_bundle_without_tangents_has_nothing_to_compare_with(measure: Any) -> None:
    with pytest.raises(ConfigError, match=r"no exact derivatives(.|\n)*export with the role tangent"):
        measure(Device(has_tangents=False))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--epsilons", "0", "1e-2"], "--epsilons is 0"),
        (["--epsilons", "-1"], "--epsilons is -1"),
        (["--epsilons"], "--epsilons needs a value"),
        (["--epsilons", "small"], "--epsilons must be"),
        (["--batches", "0"], "--batches is 0"),
        (["--limit", "0"], "limit is 0"),
        (["--threads", "0"], "--threads is 0"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--adapter", "nowhere"], "nowhere"),
        (["--task", "nowhere"], "nowhere"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    write_films(tmp_path)
    bundle = Device().write_bundle(tmp_path / "bundle")
    assert main(["probe", str(bundle), "--data", str(tmp_path / "train.jsonl"), *words]) == 2
    message = capsys.readouterr().err
    assert part in message and message.startswith("prge probe: error: ")


def test_a_class_without_rows(measure: Any, tmp_path: Path) -> None:
    rows = [line for line in (tmp_path / "train.jsonl").read_text().splitlines() if '"label": 0' in line]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    with pytest.raises(ConfigError, match="can't be fitted"):
        measure(Device(encoder=True))


# A new run on quantized activations says how noisy its differences are.


@pytest.fixture
def log_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The log of a run of a device's bundle, which is resumed once it has ended."""

    def begin(device: Device, scheme: str = "8da4w", **changes: Any) -> str:
        write_films(tmp_path)
        device.replaces(monkeypatch, run_verb)
        bundle, out = device.write_bundle(tmp_path / "bundle", scheme), tmp_path / "run"
        settings = RunSettings(bundle, tmp_path / "train.jsonl", out, steps=2, quiet=True, **changes)
        run(settings)
        run(replace(settings, resume=out))
        return (out / "log.txt").read_text()

    return begin


@pytest.mark.parametrize("changes", [{}, {"estimator": "fzoo"}], ids=str)
def test_noise_is_told_once(log_of: Callable[..., str], changes: dict[str, Any]) -> None:
    log = log_of(Device(has_tangents=False, grid=0.05), epsilon=SMALL, **changes)
    (line,) = (line for line in log.splitlines() if "int8 activations" in line)
    assert "differences at epsilon 0.001 and 0.00141 agree with r = " in line
    assert line.endswith("exact tangents have no such noise: --estimator tangent")


def test_differences_without_noise_need_no_other_program(log_of: Callable[..., str]) -> None:
    assert "agree with r = 1.00\n" in log_of(Device(has_tangents=False), epsilon=SMALL)


@pytest.mark.parametrize(("has_tangents", "scheme"), [(False, "fp32"), (True, "8da4w")])
def test_nothing_is_told_where_there_is_no_noise(
    log_of: Callable[..., str], has_tangents: bool, scheme: str
) -> None:
    assert "int8" not in log_of(Device(has_tangents=has_tangents), scheme)


def test_a_run_goes_on_where_noise_cant_be_measured(
    log_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("no memory")

    monkeypatch.setattr(run_verb, "noise_note", broken)
    log = log_of(Device(has_tangents=False))
    assert "the noise of differences was not measured: no memory" in log
