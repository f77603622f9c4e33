"""What a phone tells of itself: temperature, battery, frequency, use; or null and why it can't be told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSTEM, PROCESSES = Path("/sys"), Path("/proc")
_DUMP_SECONDS = 10.0
_COOLEST, _HOTTEST = -40.0, 150.0
# The shortest time over which the use of processors is told.
_MOMENT = 0.5
# Linux gives microamperes; a battery that gives fewer to a phone that computes has another unit.
_LEAST_MICROAMPERES = 5_000.0
_COULOMBS = 3.6e-3  # of a microampere-hour


@dataclass(frozen=True)
class SensorReading:
    """A value with where it comes from, or None with the reason."""

    value: float | bool | None
    source: str = ""
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """As run.json holds it."""
        if self.value is None:
            return {"value": None, "reason": self.reason}
        return {"value": self.value, "source": self.source}


class Sensors:
    """Readings of this machine, taken anew by each call."""

    def __init__(
        self,
        system: Path = SYSTEM,
        processes: Path = PROCESSES,
        own_seconds: Callable[[], float] | None = None,
    ) -> None:
        """Read what lies under these folders.

        Args:
            system: of devices.
            processes: of statistics.
            own_seconds: processor time that this program has taken so far; default: this process alone.
        """
        self._own_seconds = own_seconds
        self._battery = system / "class" / "power_supply"
        self._thermal = system / "class" / "thermal"
        self._processors = system / "devices" / "system" / "cpu"
        self._statistics = processes / "stat"
        self._looked: tuple[float, float] | None = None

    def temperature(self) -> SensorReading:
        """Hottest thermal zone in degrees Celsius; where none can be read, the battery's temperature."""
        seen: list[tuple[float, str]] = []
        for path in sorted(self._thermal.glob("thermal_zone*/temp")):
            value = _number(path)
            # Zones give thousandths of a degree; some vendors whole degrees.
            celsius = None if value is None else value / 1000 if abs(value) >= 1000 else value
            if celsius is not None and _COOLEST < celsius < _HOTTEST and celsius != 0:
                seen.append((celsius, str(path)))
        if seen:
            return SensorReading(*max(seen))
        reading = self._of_battery("temp", "temperature")
        if reading.value is None:
            return SensorReading(None, reason=f"no thermal zone can be read; {reading.reason}")
        return SensorReading(float(reading.value) / 10, reading.source)

    def battery_percent(self) -> SensorReading:
        """Charge of the battery."""
        return self._of_battery("capacity", "level")

    def charging(self) -> SensorReading:
        """Whether the battery is charged or full at a charger."""
        for path in sorted(self._battery.glob("*/status")):
            if not _is_battery(path.parent):
                continue
            text = _text(path)
            if text is not None and text != "Unknown":
                return SensorReading(text in ("Charging", "Full"), str(path))
        told = _of_dump(r"^ *status: *(\d+)", r"^ *(?:AC|USB|Wireless|Dock) powered: *true")
        if isinstance(told, str):
            return SensorReading(None, reason=f"no battery under {self._battery}; {told}")
        status, powered = told
        return SensorReading(status in (2, 5) or powered is not None, "dumpsys battery")

    def frequency(self) -> SensorReading:
        """Highest present frequency of the cores in hertz."""
        values = [
            (value * 1000, str(path))
            for path in sorted(self._processors.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
            if (value := _number(path)) is not None
        ]
        if values:
            return SensorReading(*max(values))
        return SensorReading(
            None, reason=f"no cpu*/cpufreq/scaling_cur_freq can be read in {self._processors}"
        )

    def use(self) -> SensorReading:
        """Of Android: whether the screen is on; else the cores that other programs take since the last look,
        or for a moment."""
        if shutil.which("dumpsys") is not None:
            text, why = _dump("power")
            match = re.search(r"^ *mWakefulness=(\w+)", text, re.MULTILINE)
            if match is None:
                return SensorReading(None, reason=why or "dumpsys power doesn't tell")
            return SensorReading(match[1] not in ("Asleep", "Dozing"), "dumpsys power")
        before = self._looked
        if before is None or time.monotonic() - before[0] < _MOMENT:
            before = self._others()
            time.sleep(_MOMENT)
        self._looked = now = self._others()
        if before is None or now is None:
            return SensorReading(None, reason=f"{self._statistics} can't be read")
        return SensorReading(max(0.0, (now[1] - before[1]) / (now[0] - before[0])), str(self._statistics))

    def minute_of_day(self) -> SensorReading:
        """Minutes since midnight of the local time."""
        now = time.localtime()
        return SensorReading(now.tm_hour * 60 + now.tm_min, "the clock")

    def _others(self) -> tuple[float, float] | None:
        """The time, and seconds that processors have worked so far for others than this program."""
        words = (_text(self._statistics) or "").partition("\n")[0].split()
        try:
            user, nice, system, _, _, interrupts, soft = map(int, words[1:8])
        except ValueError:
            return None
        worked = (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), worked - (self._own_seconds or time.process_time)()

    def charge(self) -> SensorReading:
        """Charge that the battery's counter tells, in coulombs."""
        reading = self._of_battery("charge_counter", "Charge counter")
        if reading.value is None:
            reading = self._of_battery("charge_now", "Charge counter")
        value = reading.value
        return reading if value is None else SensorReading(float(value) * _COULOMBS, reading.source)

    def volts(self) -> SensorReading:
        """Voltage of the battery: in microvolts as Linux tells it, in millivolts as Android does."""
        reading = self._of_battery("voltage_now", "voltage")
        if reading.value is None:
            return reading
        is_linux = reading.source.startswith("/")
        return SensorReading(float(reading.value) / (1e6 if is_linux else 1e3), reading.source)

    def watts(self) -> SensorReading:
        """Power that flows from the battery, or into it."""
        for path in sorted(self._battery.glob("*/current_now")):
            current = _number(path) if _is_battery(path.parent) else None
            volts = _number(path.with_name("voltage_now"))
            if current is None or volts is None:
                continue
            if abs(current) < _LEAST_MICROAMPERES:
                return SensorReading(None, reason=f"{path} has {current:g}, which are no likely microamperes")
            return SensorReading(abs(current) * volts / 1e12, str(path))
        return SensorReading(
            None, reason=f"no current_now and voltage_now of a battery under {self._battery}"
        )

    def record(self) -> dict[str, Any]:
        """All readings, as run.json holds them."""
        readings: dict[str, Callable[[], SensorReading]] = {
            "temperature_celsius": self.temperature,
            "battery_percent": self.battery_percent,
            "charging": self.charging,
            "cpu_hertz": self.frequency,
        }
        return {name: read().record() for name, read in readings.items()}

    def _of_battery(self, file: str, dumped: str) -> SensorReading:
        for path in sorted(self._battery.glob(f"*/{file}")):
            value = _number(path) if _is_battery(path.parent) else None
            if value is not None:
                return SensorReading(value, str(path))
        told = _of_dump(rf"^ *{dumped}: *(-?\d+)")
        if isinstance(told, str):
            return SensorReading(None, reason=f"no battery under {self._battery}; {told}")
        return SensorReading(told[0], "dumpsys battery")


class Energy:
    """Energy that the battery gives from now on, by two ways: its charge counter, and its power as looked at.

    All that the machine does takes of it, the screen too.
    """

    def __init__(self, sensors: Sensors) -> None:
        self._sensors = sensors
        self._joules = 0.0
        self._reason = ""
        self._time = time.monotonic()
        self._watts = self._looked()
        self._source = "" if self._watts is None else sensors.watts().source
        self._first = sensors.charge(), sensors.volts()
        self._was_charged = bool(sensors.charging().value)

    def sample(self) -> None:
        """Look at the power; call it every second or so."""
        then, before = self._time, self._watts
        self._time, self._watts = time.monotonic(), self._looked()
        if before is not None and self._watts is not None:
            self._joules += (before + self._watts) / 2 * (self._time - then)

    def record(self) -> dict[str, Any]:
        """Joules `by_charge` and `by_power`, each a reading."""
        self.sample()
        if self._was_charged or self._sensors.charging().value:
            charged = SensorReading(None, reason="the battery was being charged")
            return dict.fromkeys(("by_charge", "by_power"), charged.record())
        power = SensorReading(None, reason=self._reason)
        if not self._reason:
            power = SensorReading(self._joules, self._source)
        return {"by_charge": self._by_charge().record(), "by_power": power.record()}

    def _looked(self) -> float | None:
        reading = self._sensors.watts()
        if reading.value is None:
            self._reason = reading.reason
            return None
        return float(reading.value)

    def _by_charge(self) -> SensorReading:
        (charge, volts), last, last_volts = self._first, self._sensors.charge(), self._sensors.volts()
        for reading in (charge, volts, last, last_volts):
            if reading.value is None:
                return reading
        given = float(charge.value or 0) - float(last.value or 0)
        if given <= 0:
            return SensorReading(
                None, reason=f"{charge.source} has not fallen: too short, or the counter too coarse"
            )
        return SensorReading(
            given * (float(volts.value or 0) + float(last_volts.value or 0)) / 2, charge.source
        )


def _of_dump(first: str, *more: str) -> list[float | None] | str:
    """Numbers that patterns find in what Android's battery service tells, or why it tells nothing."""
    text, why = _dump("battery")
    matches = [re.search(pattern, text, re.MULTILINE) for pattern in (first, *more)]
    if matches[0] is None:
        return why or "dumpsys battery doesn't tell"
    return [None if match is None else float(match.group(1)) if match.groups() else 1.0 for match in matches]


def _dump(service: str) -> tuple[str, str]:
    """What one of Android's services tells, and why it tells nothing."""
    command = shutil.which("dumpsys")
    if command is None:
        return "", "there is no dumpsys"
    try:
        done = subprocess.run(
            [command, service], capture_output=True, text=True, timeout=_DUMP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"dumpsys can't be run: {error}"
    return done.stdout, ""


def _is_battery(folder: Path) -> bool:
    """Whether a power supply is the machine's battery, and not a charger or a mouse's."""
    return _text(folder / "type") == "Battery" and _text(folder / "scope") != "Device"


def _number(path: Path) -> float | None:
    text = _text(path)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
