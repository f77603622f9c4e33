"""Energy drawn from a battery, by its counter and its power, or why it is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_runner.session import sensors
from device_runner.session.sensors import Energy, Sensors


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sensors, "time", clock)
    return clock


@pytest.fixture
def battery(tmp_path: Path) -> Path:
    folder = tmp_path / "class/power_supply/battery"
    folder.mkdir(parents=True)
    write(folder, type="Battery", status="Discharging", charge_counter=3_000_000)
    write(folder, current_now=-500_000, voltage_now=4_000_000)
    return folder


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def test_power_is_summed_over_time_and_the_counter_is_read_at_both_ends(
    tmp_path: Path, battery: Path, clock: Clock
) -> None:
    energy = Energy(Sensors(tmp_path))
    clock.now = 10.0
    write(battery, current_now=-1_000_000)
    energy.sample()
    clock.now = 20.0
    # 10,000 microampere-hours are 36 coulombs; the voltage is the mean of both readings.
    write(battery, charge_counter=2_990_000, voltage_now=3_800_000)
    result = energy.record()
    assert result["by_power"]["value"] == pytest.approx(10 * 3 + 10 * (4 + 3.8) / 2)
    assert result["by_charge"]["value"] == pytest.approx(36 * 3.9)
    assert result["by_power"]["source"].endswith("current_now")
    assert result["by_charge"]["source"].endswith("charge_counter")


def test_unknown_energy_is_null_with_a_reason(tmp_path: Path, battery: Path, clock: Clock) -> None:
    energy = Energy(Sensors(tmp_path))
    still = energy.record()["by_charge"]
    assert still["value"] is None and "has not fallen" in still["reason"]
    write(battery, current_now=-500)
    assert "too small for microamperes" in str(Energy(Sensors(tmp_path)).record()["by_power"]["reason"])
    write(battery, status="Charging")
    charged = energy.record()
    assert {each["reason"] for each in charged.values()} == {"the battery was being charged"}
    none = Energy(Sensors(tmp_path / "nothing")).record()
    assert all(each["value"] is None and each["reason"] for each in none.values())


def test_android_reports_millivolts_and_a_counter(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "dumpsys"
    tool.write_text("#!/bin/sh\nprintf '  Charge counter: 2000000\\n  status: 3\\n  voltage: 4100\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    phone = Sensors(tmp_path / "nothing")
    assert phone.volts().value == pytest.approx(4.1)
    assert phone.charge().value == pytest.approx(7200)
    energy = Energy(phone)
    tool.write_text(tool.read_text().replace("2000000", "1990000"))
    assert energy.record()["by_charge"] == {"value": pytest.approx(36 * 4.1), "source": "dumpsys battery"}
