"""Noise of finite differences: against derivatives, and as a new run reports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device_runner import run as run_verb
from device_runner.run import run
from device_runner.session.gradient_noise import GradientAgreement, difference_rules, measure_agreement
from device_runner.session.settings import RunSettings
from prge.errors import EngineError
from prge.formats.bundle import open_bundle
from prge.training.estimators.differences import Differences
from prge.training.estimators.directions import DirectionSampler
from prge.training.estimators.exact import Exact
from prge.training.estimators.protocol import Step
from tests.device_runner.numpy_device import QUERIES, Device, write_films
from tests.rows import random_completions
from tests.templates import random_adapter

SMALL, LARGE = 1e-3, 1e-1


@pytest.fixture
def agreements(tmp_path: Path) -> Callable[[Device], dict[tuple[str, float], GradientAgreement]]:
    """Return the agreement of finite differences with derivatives, by estimator and epsilon."""

    def measured(device: Device) -> dict[tuple[str, float], GradientAgreement]:
        bundle = open_bundle(device.write_bundle(tmp_path / "bundle"))
        engine = device.open_engine(bundle, "backward").engine
        exact = Device(has_backward=True).open_engine(bundle, "backward").engine
        adapter, rows = random_adapter(bundle.chain.modules, size=0.01), random_completions(32)
        steps = [Step(adapter, rows[4 * number :][:4], 1, number) for number in range(8)]
        along = []
        for step in steps:
            gradient = Exact().measure(exact, step).gradient
            assert gradient is not None
            directions = DirectionSampler(1, step.number, adapter.size)
            along.append([float(directions(query) @ gradient) for query in range(QUERIES)])
        result = {}
        for epsilon in (SMALL, LARGE):
            for name, rule in difference_rules(QUERIES, epsilon).items():
                projected_gradients = [
                    Differences(rule).measure(engine, step).projected_gradients for step in steps
                ]
                result[name, epsilon] = measure_agreement(np.array(projected_gradients), np.array(along))
        return result

    return measured


def test_small_differences_of_an_exact_model_are_its_derivatives(agreements: Any) -> None:
    result = agreements(Device(has_backward=True))
    assert result["antithetic", SMALL].r > 0.9999
    assert result["antithetic", SMALL].scale == pytest.approx(1, abs=0.005)
    assert result["fzoo", SMALL].r > 0.99
    assert result["fzoo", LARGE].r < result["fzoo", SMALL].r


def test_rounding_drowns_small_steps(agreements: Any) -> None:
    result = agreements(Device(has_backward=True, grid=0.1))
    assert result["antithetic", SMALL].r < 0.5 < 0.8 < result["antithetic", LARGE].r


def test_agreement_is_measured_by_correlation_and_scale() -> None:
    random = np.random.default_rng(0)
    reference, noise = random.normal(size=(2, 4, 5000))
    same = measure_agreement(2 * reference, reference)
    assert (same.r, same.scale) == (pytest.approx(1), pytest.approx(2))
    noisy = measure_agreement(reference + noise / 2, reference)
    assert noisy.r**2 == pytest.approx(0.8, rel=0.01)
    assert measure_agreement(-reference, reference).r == pytest.approx(-1)
    # The mean of true projected gradients is zero, so a constant is noise too.
    assert measure_agreement(reference + 2, reference).r == pytest.approx(1 / 5**0.5, abs=0.02)
    for nothing in (0 * reference, np.full_like(reference, np.nan), np.full_like(reference, np.inf)):
        assert measure_agreement(nothing, reference) == GradientAgreement(0, 0)
        assert measure_agreement(reference, nothing) == GradientAgreement(0, 0)


# A new run on quantized activations reports the noise of its differences.


@pytest.fixture
def log_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the log of a run of a device's bundle, which is resumed after it has ended."""

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
def test_noise_is_reported_once(log_of: Callable[..., str], changes: dict[str, Any]) -> None:
    log = log_of(Device(has_jvp=False, grid=0.05), epsilon=SMALL, **changes)
    (line,) = (line for line in log.splitlines() if "int8 activations" in line)
    assert "differences at epsilon 0.001 and 0.00141 agree with r = " in line
    assert line.endswith("a larger --epsilon has less of this noise, --estimator tangent has none")


def test_differences_without_noise_need_no_other_program(log_of: Callable[..., str]) -> None:
    assert "agree with r = 1.00\n" in log_of(Device(has_jvp=False), epsilon=SMALL)


@pytest.mark.parametrize(("has_jvp", "scheme"), [(False, "fp32"), (True, "8da4w")])
def test_nothing_is_reported_where_there_is_no_noise(
    log_of: Callable[..., str], has_jvp: bool, scheme: str
) -> None:
    assert "int8" not in log_of(Device(has_jvp=has_jvp), scheme)


def test_a_run_continues_where_noise_cant_be_measured(
    log_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise EngineError("no memory", code="engine-failed")

    monkeypatch.setattr(run_verb, "noise_note", broken)
    log = log_of(Device(has_jvp=False))
    assert "the noise of differences was not measured: no memory" in log
