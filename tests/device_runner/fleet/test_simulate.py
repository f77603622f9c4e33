"""Tests that a simulated fleet equals the fleet of its devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_runner.fleet import local_round as local
from device_runner.fleet import server as opening
from device_runner.fleet import simulate
from device_runner.fleet.coordinator import Coordinator, RoundReport
from device_runner.fleet.simulate import SimulateSettings, Simulation
from prge.cli.settings import read_settings
from prge.errors import RunError
from tests.device_runner.numpy_device import Device, Killed, write_films
from tests.refusals import raises

MakeArguments = Callable[..., list[str]]


@pytest.fixture
def make_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeArguments:
    """Return a command line for a fleet of eight devices; flags may be overridden."""
    device = Device(has_backward=True)
    device.replaces(monkeypatch, local, opening)
    write_films(tmp_path)
    flags = {
        "bundle": device.write_bundle(tmp_path / "bundle"),
        "train": tmp_path / "train.jsonl",
        "dev": tmp_path / "dev.jsonl",
        "test": tmp_path / "dev.jsonl",
        "task": tmp_path / "task.yaml",
        "out": tmp_path / "fleet",
        "devices": 8,
        "per_round": 4,
        "rounds": 6,
        "local_steps": 2,
        "learning_rate": 0.02,
        "json": tmp_path / "figures.json",
    }

    def make(**changes: Any) -> list[str]:
        settings = {**flags, **changes}
        return [
            word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))
        ]

    return make


def _figures(make_arguments: MakeArguments, **changes: Any) -> dict[str, Any]:
    arguments = make_arguments(**changes)
    assert simulate.main(arguments) == 0
    figures: dict[str, Any] = json.loads(Path(arguments[arguments.index("--json") + 1]).read_text())
    return figures


@pytest.mark.parametrize("changes", [{}, {"estimator": "exact"}, {"partition": "dirichlet:0.3"}])
def test_a_simulation_counts_its_bytes_and_is_reproducible(
    make_arguments: MakeArguments, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _figures(make_arguments, **changes)
    assert f"up     {first['bytes_up']:,} bytes" in capsys.readouterr().out
    assert len(first["curve"]) == 6
    assert first["bytes_up"] == sum(entry["bytes_up"] for entry in first["curve"])
    assert first["rows"]["fewest"] >= 1
    assert first["before"]["loss"] == pytest.approx(first["curve"][0]["evaluation"]["loss"], rel=0.5)
    again = _figures(make_arguments, **changes, out=tmp_path / "again", name="films")
    assert [entry["loss"] for entry in again["curve"]] == [entry["loss"] for entry in first["curve"]]


def test_devices_stop_when_their_privacy_budget_is_spent(
    make_arguments: MakeArguments, tmp_path: Path
) -> None:
    plan = {"share_directions": "true", "max_grad_norm": 1, "noise": 2, "queries": 8, "rounds": 40}
    figures = _figures(make_arguments, **plan, most_privacy_epsilon=5)
    assert 3 < figures["privacy_epsilon"] <= 5
    assert len(figures["curve"]) < 40


@pytest.mark.parametrize("changes", [{}, {"estimator": "exact"}, {"combine": "trimmed"}])
def test_a_killed_simulation_resumes_with_the_same_figures(
    make_arguments: MakeArguments, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _figures(make_arguments, **changes, out=tmp_path / "whole", name="films")
    run_round = Simulation.run_round

    def killed(simulation: Simulation, fleet: Coordinator) -> RoundReport:
        if fleet.round == 3:
            raise Killed
        return run_round(simulation, fleet)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Simulation, "run_round", killed)
        simulate.main(make_arguments(**changes, name="films"))
    with raises(RunError, "rows-differ"):
        simulate.main(make_arguments(**changes, name="films", devices=9))
    figures = _figures(make_arguments, **changes, name="films")
    for name in ("after", "bytes_up"):
        assert figures[name] == whole[name]
    assert [entry["loss"] for entry in figures["curve"]] == [entry["loss"] for entry in whole["curve"]]


def test_the_settings_of_the_study_are_those_of_the_verb() -> None:
    path = Path(__file__).parents[3] / "scripts" / "studies" / "fleet-sst2.yaml"
    assert read_settings(SimulateSettings, path, "prge fleet simulate").devices == 100
