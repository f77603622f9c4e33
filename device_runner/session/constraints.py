"""Constraints on the state of a device that work waits for: parsed from flags, checked with sensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from device_runner.session.sensors import SensorReading, Sensors
from prge.cli.bounds import BOUNDS
from prge.errors import format_value

COOL = 42.0
COOLER_BY = 3.0
# Cores that other programs may use on an idle machine without a screen.
_OTHER_CORES = 0.5
_FORMS = (
    "charging, cool or cool:CELSIUS, battery:PERCENT, idle, hours such as 22:00-07:00, or several of these "
    "with commas"
)
_DAY = 24 * 60
_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")


@dataclass(frozen=True)
class Constraint(ABC):
    """A constraint; `flag` is how the user wrote it, `sensor` the name of what it reads."""

    sensor: ClassVar[str]
    flag: str

    @abstractmethod
    def read(self, sensors: Sensors) -> SensorReading:
        """Read the sensor."""

    @abstractmethod
    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """Return why work must wait, as `reason: details`; empty if the constraint is met.

        Args:
            value: value of the reading.
            sensors: sensors for other values.
            paused: whether work is paused already; limits then have a margin, so that work doesn't start and
                stop all the time.
        """


class Charging(Constraint):
    """Requires that the battery is charging, or full at a charger."""

    sensor = "charger"

    def read(self, sensors: Sensors) -> SensorReading:
        """See Constraint."""
        return sensors.charging()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Constraint."""
        return "" if value else "not charging: it waits for a charger"


@dataclass(frozen=True)
class Cool(Constraint):
    """Requires a temperature in degrees Celsius up to a limit; after a pause, clearly below the limit."""

    sensor = "temperature"
    limit: float = COOL

    def read(self, sensors: Sensors) -> SensorReading:
        """See Constraint."""
        return sensors.temperature()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Constraint."""
        limit = self.limit - (COOLER_BY if paused else 0.0)
        return "" if value <= limit else f"too hot: {value:.1f} degrees Celsius, the limit is {limit:g}"


@dataclass(frozen=True)
class Battery(Constraint):
    """Requires a charge in percent of at least a limit, or a charging battery."""

    sensor = "battery"
    least: float

    def read(self, sensors: Sensors) -> SensorReading:
        """See Constraint."""
        return sensors.battery_percent()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Constraint."""
        if value >= self.least or sensors.charging().value:
            return ""
        return f"too little charge: {value:g} %, the limit is {self.least:g} %"


class Idle(Constraint):
    """Requires that nobody uses the device: a phone's screen is off, or other programs use few cores."""

    sensor = "use of the device"

    def read(self, sensors: Sensors) -> SensorReading:
        """See Constraint."""
        return sensors.use()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Constraint."""
        if isinstance(value, bool):
            return "in use: the screen is on" if value else ""
        limit = _OTHER_CORES / 2 if paused else _OTHER_CORES
        if value <= limit:
            return ""
        return f"in use: other programs use {value:.1f} cores, the limit is {limit:g}"


@dataclass(frozen=True)
class Hours(Constraint):
    """Requires a local time in a daily window from minute `begin` to `end`, which may cross midnight.

    The end is exclusive; a window that ends where it begins is the whole day.
    """

    sensor = "clock"
    begin: int
    end: int

    @staticmethod
    def parse(text: str, flag: str) -> Hours | None:
        """Parse hours such as 22:00-07:00 or 22-7; return None for any other text."""
        match = _HOURS.fullmatch(text)
        if match is None:
            return None
        begin, end = (int(match[n]) * 60 + int(match[n + 1] or 0) for n in (1, 3))
        minutes = [int(each) for each in (match[2], match[4]) if each]
        if begin >= _DAY or end > _DAY or any(each > 59 for each in minutes):
            return None
        return Hours(flag, begin, end % _DAY)

    def has(self, minute: int) -> bool:
        """Return whether a minute of the day is in the window."""
        length = (self.end - self.begin) % _DAY or _DAY
        return (minute - self.begin) % _DAY < length

    def read(self, sensors: Sensors) -> SensorReading:
        """See Constraint."""
        return sensors.minute_of_day()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Constraint."""
        if self.has(int(value)):
            return ""
        now, begin, end = map(_format_minute, (int(value), self.begin, self.end))
        return f"not the time: it is {now}, it waits for {begin}-{end}"


def parse_when(text: str) -> list[Constraint]:
    """Parse a `--when` into constraints, all of which must be met.

    Raises:
        ValueError: a word is no constraint, or two words are constraints of one type; the message names it.
    """
    constraints = [_parse_word(word.strip()) for word in text.split(",")] if text else []
    for number, each in enumerate(constraints):
        if any(type(other) is type(each) for other in constraints[:number]):
            raise ValueError(
                f"--when has {each.flag.rpartition(' ')[2]} and another word of its type: give one"
            )
    return constraints


def _parse_word(word: str) -> Constraint:
    flag = f"--when {word}"
    if hours := Hours.parse(word, flag):
        return hours
    plain = {"charging": Charging, "cool": Cool, "idle": Idle}
    if word in plain:
        return plain[word](flag)
    name, _, number = word.partition(":")
    constraint = _parse_with_limit(name, number, flag)
    if constraint is None:
        raise ValueError(f"--when has {format_value(word)}, must be {_FORMS}")
    return constraint


def _parse_with_limit(name: str, number: str, flag: str) -> Constraint | None:
    """Return a constraint with a limit; None for an unknown name or an invalid number."""
    bounds: Mapping[str, str] = {"cool": "pause_above_celsius", "battery": "pause_below_battery"}
    try:
        limit = float(number)
    except ValueError:
        return None
    if name not in bounds or BOUNDS[bounds[name]].problem(limit):
        return None
    return Cool(flag, limit) if name == "cool" else Battery(flag, limit)


def _format_minute(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"
