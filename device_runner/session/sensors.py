"""Sensors of a phone: temperature, battery, frequency and use, or the reason why a value is unknown."""

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
# Shortest time to measure the use of processors.
_MOMENT = 0.5
# Linux reports microamperes; a smaller current of a phone at work must be in another unit.
_MIN_MICROAMPERES = 5_000.0
_COULOMBS = 3.6e-3  # of a microampere-hour


@dataclass(frozen=True)
class SensorReading:
    """A value with its source, or None with the reason."""

    value: float | bool | None
    source: str = ""
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """Return the reading as run.json holds it."""
        if self.value is None:
            return {"value": None, "reason": self.reason}
        return {"value": self.value, "source": self.source}


class Sensors:
    """Sensors of this machine; each call reads them anew."""

    def __init__(
        self,
        system: Path = SYSTEM,
        processes: Path = PROCESSES,
        own_seconds: Callable[[], float] | None = None,
    ) -> None:
        """Use the files under these folders.

        Args:
            system: folder of devices, /sys.
            processes: folder of statistics, /proc.
            own_seconds: returns the processor time of this program so far; default: of this process alone.
        """
        self._own_seconds = own_seconds
        self._battery = system / "class" / "power_supply"
        self._thermal = system / "class" / "thermal"
        self._processors = system / "devices" / "system" / "cpu"
        self._statistics = processes / "stat"
        self._last_use: tuple[float, float] | None = None

    def temperature(self) -> SensorReading:
        """Read the hottest thermal zone in degrees Celsius, or the battery's temperature if there is none."""
        temperatures: list[tuple[float, str]] = []
        for path in sorted(self._thermal.glob("thermal_zone*/temp")):
            value = _number(path)
            # Zones report thousandths of a degree; some vendors report whole degrees.
            celsius = None if value is None else value / 1000 if abs(value) >= 1000 else value
            if celsius is not None and _COOLEST < celsius < _HOTTEST and celsius != 0:
                temperatures.append((celsius, str(path)))
        if temperatures:
            return SensorReading(*max(temperatures))
        reading = self._of_battery("temp", "temperature")
        if reading.value is None:
            return SensorReading(None, reason=f"no thermal zone can be read; {reading.reason}")
        return SensorReading(float(reading.value) / 10, reading.source)

    def battery_percent(self) -> SensorReading:
        """Read the charge of the battery in percent."""
        return self._of_battery("capacity", "level")

    def charging(self) -> SensorReading:
        """Read whether the battery is charging, or full at a charger."""
        for path in sorted(self._battery.glob("*/status")):
            if not _is_battery(path.parent):
                continue
            text = _text(path)
            if text is not None and text != "Unknown":
                return SensorReading(text in ("Charging", "Full"), str(path))
        numbers = _parse_battery_dump(r"^ *status: *(\d+)", r"^ *(?:AC|USB|Wireless|Dock) powered: *true")
        if isinstance(numbers, str):
            return SensorReading(None, reason=f"no battery under {self._battery}; {numbers}")
        status, powered = numbers
        return SensorReading(status in (2, 5) or powered is not None, "dumpsys battery")

    def frequency(self) -> SensorReading:
        """Read the highest current frequency of the cores in hertz."""
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
        """Read the use of the device by others.

        On Android this is whether the screen is on; elsewhere the number of cores that other programs have
        used since the last reading, or over a moment.
        """
        if shutil.which("dumpsys") is not None:
            text, reason = _dump("power")
            match = re.search(r"^ *mWakefulness=(\w+)", text, re.MULTILINE)
            if match is None:
                return SensorReading(None, reason=reason or "dumpsys power has no mWakefulness")
            return SensorReading(match[1] not in ("Asleep", "Dozing"), "dumpsys power")
        previous = self._last_use
        if previous is None or time.monotonic() - previous[0] < _MOMENT:
            previous = self._foreign_seconds()
            time.sleep(_MOMENT)
        self._last_use = now = self._foreign_seconds()
        if previous is None or now is None:
            return SensorReading(None, reason=f"{self._statistics} can't be read")
        return SensorReading(max(0.0, (now[1] - previous[1]) / (now[0] - previous[0])), str(self._statistics))

    def minute_of_day(self) -> SensorReading:
        """Read the minutes since midnight, local time."""
        now = time.localtime()
        return SensorReading(now.tm_hour * 60 + now.tm_min, "the clock")

    def _foreign_seconds(self) -> tuple[float, float] | None:
        """Return the time, and the seconds that processors have worked so far for other programs."""
        words = (_text(self._statistics) or "").partition("\n")[0].split()
        try:
            user, nice, system, _, _, interrupts, soft = map(int, words[1:8])
        except ValueError:
            return None
        worked = (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), worked - (self._own_seconds or time.process_time)()

    def charge(self) -> SensorReading:
        """Read the battery's charge counter in coulombs."""
        reading = self._of_battery("charge_counter", "Charge counter")
        if reading.value is None:
            reading = self._of_battery("charge_now", "Charge counter")
        value = reading.value
        return reading if value is None else SensorReading(float(value) * _COULOMBS, reading.source)

    def volts(self) -> SensorReading:
        """Read the battery's voltage in volts; Linux reports microvolts, Android millivolts."""
        reading = self._of_battery("voltage_now", "voltage")
        if reading.value is None:
            return reading
        is_linux = reading.source.startswith("/")
        return SensorReading(float(reading.value) / (1e6 if is_linux else 1e3), reading.source)

    def watts(self) -> SensorReading:
        """Read the power that flows from or into the battery, in watts."""
        for path in sorted(self._battery.glob("*/current_now")):
            current = _number(path) if _is_battery(path.parent) else None
            volts = _number(path.with_name("voltage_now"))
            if current is None or volts is None:
                continue
            if abs(current) < _MIN_MICROAMPERES:
                return SensorReading(
                    None, reason=f"{path} is {current:g}, which is too small for microamperes"
                )
            return SensorReading(abs(current) * volts / 1e12, str(path))
        return SensorReading(
            None, reason=f"no current_now and voltage_now of a battery under {self._battery}"
        )

    def record(self) -> dict[str, Any]:
        """Return all readings as run.json holds them."""
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
        numbers = _parse_battery_dump(rf"^ *{dumped}: *(-?\d+)")
        if isinstance(numbers, str):
            return SensorReading(None, reason=f"no battery under {self._battery}; {numbers}")
        return SensorReading(numbers[0], "dumpsys battery")


class Energy:
    """Energy drawn from the battery from now on, by its charge counter and by its sampled power.

    It includes everything that the machine does, the screen too.
    """

    def __init__(self, sensors: Sensors) -> None:
        self._sensors = sensors
        self._joules = 0.0
        self._reason = ""
        self._time = time.monotonic()
        self._watts = self._read_watts()
        self._source = "" if self._watts is None else sensors.watts().source
        self._first = sensors.charge(), sensors.volts()
        self._was_charged = bool(sensors.charging().value)

    def sample(self) -> None:
        """Sample the power; call this about once per second."""
        previous_time, previous_watts = self._time, self._watts
        self._time, self._watts = time.monotonic(), self._read_watts()
        if previous_watts is not None and self._watts is not None:
            self._joules += (previous_watts + self._watts) / 2 * (self._time - previous_time)

    def record(self) -> dict[str, Any]:
        """Return the joules `by_charge` and `by_power`, each as a reading."""
        self.sample()
        if self._was_charged or self._sensors.charging().value:
            charged = SensorReading(None, reason="the battery was being charged")
            return dict.fromkeys(("by_charge", "by_power"), charged.record())
        power = SensorReading(None, reason=self._reason)
        if not self._reason:
            power = SensorReading(self._joules, self._source)
        return {"by_charge": self._by_charge().record(), "by_power": power.record()}

    def _read_watts(self) -> float | None:
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
        coulombs = float(charge.value or 0) - float(last.value or 0)
        if coulombs <= 0:
            return SensorReading(
                None,
                reason=f"{charge.source} has not fallen: the time is too short or the counter too coarse",
            )
        return SensorReading(
            coulombs * (float(volts.value or 0) + float(last_volts.value or 0)) / 2, charge.source
        )


def _parse_battery_dump(first: str, *more: str) -> list[float | None] | str:
    """Return numbers that patterns match in the output of Android's battery service, or an error."""
    text, reason = _dump("battery")
    matches = [re.search(pattern, text, re.MULTILINE) for pattern in (first, *more)]
    if matches[0] is None:
        return reason or "dumpsys battery lacks this value"
    return [None if match is None else float(match.group(1)) if match.groups() else 1.0 for match in matches]


def _dump(service: str) -> tuple[str, str]:
    """Return the output of one of Android's services, and the reason if there is none."""
    command = shutil.which("dumpsys")
    if command is None:
        return "", "there is no dumpsys"
    try:
        process = subprocess.run(
            [command, service], capture_output=True, text=True, timeout=_DUMP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"dumpsys can't be run: {error}"
    return process.stdout, ""


def _is_battery(folder: Path) -> bool:
    """Return whether a power supply is the machine's battery, not a charger or a peripheral's battery."""
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
