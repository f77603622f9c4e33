"""What a device must be like for work to go on: what users write, as conditions that ask sensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from device_runner.session.sensors import SensorReading, Sensors
from prge.cli.bounds import BOUNDS
from prge.errors import shown

COOL = 42.0
COOLER_BY = 3.0
# Of a machine without a screen: cores that others may take, so that it is nobody's at the moment.
_OTHERS = 0.5
_FORMS = (
    "charging, cool or cool:CELSIUS, battery:PERCENT, idle, hours such as 22:00-07:00, or several of these "
    "with commas"
)
_DAY = 24 * 60
_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")


@dataclass(frozen=True)
class Condition(ABC):
    """One of them; `flag` is how the user wrote it, `sensor` what its reading is of."""

    sensor: ClassVar[str]
    flag: str

    @abstractmethod
    def read(self, sensors: Sensors) -> SensorReading:
        """What decides it."""

    @abstractmethod
    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """Why to wait, as `kind: more of it`; empty if there is no need.

        Args:
            value: of the reading.
            sensors: for what else it takes.
            paused: whether it waits already; without a distance it would go on and off at a limit.
        """


class Charging(Condition):
    """The battery is charged, or full at a charger."""

    sensor = "charger"

    def read(self, sensors: Sensors) -> SensorReading:
        """See Condition."""
        return sensors.charging()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Condition."""
        return "" if value else "not charging: it waits for a charger"


@dataclass(frozen=True)
class Cool(Condition):
    """The device is no hotter than a limit in degrees Celsius; once it was, clearly cooler."""

    sensor = "temperature"
    limit: float = COOL

    def read(self, sensors: Sensors) -> SensorReading:
        """See Condition."""
        return sensors.temperature()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Condition."""
        limit = self.limit - (COOLER_BY if paused else 0.0)
        return "" if value <= limit else f"too hot: {value:.1f} degrees Celsius, the limit is {limit:g}"


@dataclass(frozen=True)
class Battery(Condition):
    """The battery holds so many percent, or is charged."""

    sensor = "battery"
    least: float

    def read(self, sensors: Sensors) -> SensorReading:
        """See Condition."""
        return sensors.battery_percent()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Condition."""
        if value >= self.least or sensors.charging().value:
            return ""
        return f"too little charge: {value:g} %, the limit is {self.least:g} %"


class Idle(Condition):
    """Nobody uses the device: a phone's screen is off; of another machine, other programs take few cores."""

    sensor = "use of the device"

    def read(self, sensors: Sensors) -> SensorReading:
        """See Condition."""
        return sensors.use()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Condition."""
        if isinstance(value, bool):
            return "in use: the screen is on" if value else ""
        limit = _OTHERS / 2 if paused else _OTHERS
        if value <= limit:
            return ""
        return f"in use: other programs take {value:.1f} cores, the limit is {limit:g}"


@dataclass(frozen=True)
class Hours(Condition):
    """The local time is in a window of the day, `begin` and `end` in minutes, which may cross midnight.

    The end isn't in it; a window that ends where it begins is the whole day.
    """

    sensor = "clock"
    begin: int
    end: int

    @staticmethod
    def parse(text: str, flag: str) -> Hours | None:
        """Hours such as 22:00-07:00 or 22-7; None for a text that is none."""
        match = _HOURS.fullmatch(text)
        if match is None:
            return None
        begin, end = (int(match[n]) * 60 + int(match[n + 1] or 0) for n in (1, 3))
        minutes = [int(each) for each in (match[2], match[4]) if each]
        if begin >= _DAY or end > _DAY or any(each > 59 for each in minutes):
            return None
        return Hours(flag, begin, end % _DAY)

    def has(self, minute: int) -> bool:
        """Whether a minute of the day is in the window."""
        length = (self.end - self.begin) % _DAY or _DAY
        return (minute - self.begin) % _DAY < length

    def read(self, sensors: Sensors) -> SensorReading:
        """See Condition."""
        return sensors.minute_of_day()

    def unmet(self, value: float | bool, sensors: Sensors, paused: bool) -> str:
        """See Condition."""
        if self.has(int(value)):
            return ""
        now, begin, end = map(_clock, (int(value), self.begin, self.end))
        return f"not the time: it is {now}, it waits for {begin}-{end}"


def parse_when(text: str) -> list[Condition]:
    """The conditions of a `--when`; all of them must be met.

    Raises:
        ValueError: a word is none, or two are of one kind; says which.
    """
    found = [_parsed(word.strip()) for word in text.split(",")] if text else []
    for number, each in enumerate(found):
        if any(type(other) is type(each) for other in found[:number]):
            raise ValueError(f"--when has two words of the kind {each.flag.rpartition(' ')[2]}: give one")
    return found


def _parsed(word: str) -> Condition:
    flag = f"--when {word}"
    if hours := Hours.parse(word, flag):
        return hours
    plain = {"charging": Charging, "cool": Cool, "idle": Idle}
    if word in plain:
        return plain[word](flag)
    name, _, number = word.partition(":")
    made = _numbered(name, number, flag)
    if made is None:
        raise ValueError(f"--when has {shown(word)}, must be {_FORMS}")
    return made


def _numbered(name: str, number: str, flag: str) -> Condition | None:
    """A condition with a limit; None for a name or a number that is none."""
    bounds: Mapping[str, str] = {"cool": "pause_above_celsius", "battery": "pause_below_battery"}
    try:
        limit = float(number)
    except ValueError:
        return None
    if name not in bounds or BOUNDS[bounds[name]].problem(limit):
        return None
    return Cool(flag, limit) if name == "cool" else Battery(flag, limit)


def _clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"
