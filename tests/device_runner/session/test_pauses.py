"""A run pauses while the phone is too hot or not charging, logs the reason, and continues by itself."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from device_runner.session.pauses import Pauses
from device_runner.session.sensors import Sensors
from device_runner.session.settings import RunSettings
from prge.errors import ConfigError
from tests.refusals import raises


class MessageObserver:
    """Collects messages."""

    def __init__(self) -> None:
        self.stopped = False
        self.texts: list[str] = []
        self.paused = 0.0
        self.waited: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    def on_wait(self, why: str) -> None:
        self.waited.append(why)

    def on_pause(self, seconds: float) -> None:
        self.paused += seconds


def write(system: Path, name: str, content: object) -> None:
    path = system / "class" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Return a phone's kernel files: 40 degrees, 80 percent, no charger, a mouse with its own battery."""
    write(tmp_path, "thermal/thermal_zone0/temp", 31000)
    write(tmp_path, "thermal/thermal_zone1/temp", 40000)
    write(tmp_path, "thermal/thermal_zone2/temp", -273000)
    write(tmp_path, "power_supply/battery/type", "Battery")
    write(tmp_path, "power_supply/battery/capacity", 80)
    write(tmp_path, "power_supply/battery/status", "Discharging")
    write(tmp_path, "power_supply/a-mouse/type", "Battery")
    write(tmp_path, "power_supply/a-mouse/scope", "Device")
    write(tmp_path, "power_supply/a-mouse/capacity", 5)
    frequency = tmp_path / "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
    frequency.parent.mkdir(parents=True)
    frequency.write_text("1800000\n")
    return tmp_path


def make_pauses(system: Path, **changes: Any) -> Pauses:
    settings = RunSettings(bundle=Path("b"), train=Path("t"), out=Path("o"), **changes)
    return Pauses(settings.constraints(), Sensors(system, system), seconds=0.02)


def check_that_it_waits_for(pauses: Pauses, observer: MessageObserver, change: Any) -> None:
    """Check that the work waits until `change` is called a moment later."""
    thread = threading.Timer(0.2, change)
    thread.start()
    begin = time.monotonic()
    pauses.wait(observer)
    assert time.monotonic() - begin > 0.15
    thread.join()


def test_sensors_are_read(system: Path) -> None:
    record = Sensors(system).record()
    assert {name: entry["value"] for name, entry in record.items()} == {
        "temperature_celsius": 40.0, "battery_percent": 80.0, "charging": False, "cpu_hertz": 1.8e9,
    }  # fmt: skip
    assert record["temperature_celsius"]["source"].endswith("thermal_zone1/temp")


def test_sensors_that_cannot_be_read_are_null_with_a_reason(tmp_path: Path) -> None:
    record = Sensors(tmp_path).record()
    assert record and all(entry["value"] is None and entry["reason"] for entry in record.values())
    json.dumps(record)


def test_conditions_that_hold_cause_no_pause(system: Path) -> None:
    observer = MessageObserver()
    assert not make_pauses(system, pause_above_celsius=45, pause_below_battery=20).wait(observer)
    assert not make_pauses(system).wait(observer)
    assert not observer.texts and observer.paused == 0


def test_a_hot_phone_pauses_until_it_is_clearly_cooler(system: Path) -> None:
    observer = MessageObserver()
    pauses = make_pauses(system, pause_above_celsius=39)
    write(system, "thermal/thermal_zone0/temp", 38000)

    def cool() -> None:
        write(system, "thermal/thermal_zone1/temp", 38500)
        time.sleep(0.1)
        assert len(observer.texts) == 1
        for zone in (0, 1):
            write(system, f"thermal/thermal_zone{zone}/temp", 35900)

    check_that_it_waits_for(pauses, observer, cool)
    assert observer.texts[0] == "paused, too hot: 40.0 degrees Celsius, the limit is 39"
    assert observer.waited == ["too hot: 40.0 degrees Celsius, the limit is 39"]
    assert "resuming after a pause" in observer.texts[1] and observer.paused > 0.15


def test_a_low_charge_is_a_reason_to_pause(system: Path) -> None:
    observer = MessageObserver()
    write(system, "power_supply/battery/capacity", 19)
    check_that_it_waits_for(
        make_pauses(system, pause_below_battery=20),
        observer,
        lambda: write(system, "power_supply/battery/status", "Charging"),
    )
    assert observer.texts[0] == "paused, too little charge: 19 %, the limit is 20 %"


def test_a_missing_charger_is_a_reason_to_pause(system: Path) -> None:
    observer = MessageObserver()
    pauses = make_pauses(system, only_charging=True)
    check_that_it_waits_for(pauses, observer, lambda: write(system, "power_supply/battery/status", "Full"))
    assert observer.texts[0] == "paused, not charging: it waits for a charger"


def test_a_pause_ends_with_the_run(system: Path) -> None:
    observer = MessageObserver()
    check_that_it_waits_for(
        make_pauses(system, only_charging=True), observer, lambda: setattr(observer, "stopped", True)
    )
    assert observer.texts == ["paused, not charging: it waits for a charger"]


def test_a_condition_that_is_not_measurable_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "condition-not-measurable", containing="--only-charging"):
        make_pauses(tmp_path, only_charging=True)


def test_a_sensor_that_is_lost_is_reported_once(system: Path) -> None:
    observer = MessageObserver()
    pauses = make_pauses(system, only_charging=True)
    (system / "class/power_supply/battery/status").unlink()
    for _ in range(2):
        time.sleep(0.03)
        assert not pauses.wait(observer)
    assert len(observer.texts) == 1 and "the charger can no longer be read" in observer.texts[0]
