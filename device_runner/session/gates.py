"""Pauses of a run: too hot, too little charge, no charger; it goes on by itself when that is over."""

from __future__ import annotations

import time
from typing import Protocol

from device_runner.session.sensors import Reading, Sensors
from device_runner.session.settings import RunSettings
from prge.errors import ConfigError

COOLER_BY = 3.0
_SLICE_SECONDS = 0.1


class Held(Protocol):
    """Who is told of a pause, and may end it."""

    @property
    def stopped(self) -> bool:
        """Whether the wait is to end."""
        ...

    def say(self, text: str) -> None:
        """Tell the user, and the log."""
        ...

    def on_pause(self, seconds: float) -> None:
        """A pause of that length is over."""
        ...


class Gates:
    """What has to be fulfilled before each step."""

    def __init__(self, settings: RunSettings, sensors: Sensors | None = None, seconds: float = 5.0) -> None:
        """Read every sensor that a gate needs.

        Args:
            settings: which gates there are.
            sensors: what to read.
            seconds: shortest time between two looks.

        Raises:
            ConfigError: one of them can't be read, so that its gate would never close.
        """
        self._hottest = settings.pause_above_celsius
        self._least = settings.pause_below_battery
        self._only_charging = settings.only_charging
        self._sensors = sensors or Sensors()
        self._seconds = seconds
        self._next = 0.0
        self._unreadable: set[str] = set()
        needed: dict[str, Reading] = {}
        if self._hottest is not None:
            needed["--pause-above-celsius"] = self._sensors.temperature()
        if self._least is not None:
            needed["--pause-below-battery"] = self._sensors.battery_percent()
        if self._only_charging:
            needed["--only-charging"] = self._sensors.charging()
        problems = [f"{flag}: {reading.reason}" for flag, reading in needed.items() if reading.value is None]
        if problems:
            raise ConfigError("the device doesn't tell what these need:", problems, remedy="leave them out")
        self._any = bool(needed)

    def hold(self, watcher: Held) -> bool:
        """Wait until all gates are open, and return whether the run is to stop."""
        if not self._any or time.monotonic() < self._next:
            return watcher.stopped
        begin = time.perf_counter()
        told = ""
        while not watcher.stopped and (reason := self._reason(watcher, bool(told))):
            kind = reason.partition(":")[0]
            if kind != told:
                watcher.say(f"paused, {reason}")
                told = kind
            until = time.monotonic() + self._seconds
            while not watcher.stopped and time.monotonic() < until:
                time.sleep(min(_SLICE_SECONDS, self._seconds))
        self._next = time.monotonic() + self._seconds
        if told:
            seconds = time.perf_counter() - begin
            watcher.on_pause(seconds)
            if not watcher.stopped:
                watcher.say(f"going on after a pause of {seconds:.0f} s")
        return watcher.stopped

    def _reason(self, watcher: Held, paused: bool) -> str:
        """Why the run must wait now; empty if it need not."""
        if self._hottest is not None:
            # Without a distance it would go on and off at the limit.
            limit = self._hottest - (COOLER_BY if paused else 0.0)
            celsius = self._value("temperature", self._sensors.temperature(), watcher)
            if celsius is not None and celsius > limit:
                return f"too hot: {celsius:.1f} degrees Celsius, the limit is {limit:g}"
        if self._only_charging:
            charging = self._value("charger", self._sensors.charging(), watcher)
            if charging is not None and not charging:
                return "not charging: it waits for a charger"
        if self._least is not None:
            percent = self._value("battery", self._sensors.battery_percent(), watcher)
            if percent is not None and percent < self._least and not self._sensors.charging().value:
                return f"too little charge: {percent:g} %, the limit is {self._least:g} %"
        return ""

    def _value(self, name: str, reading: Reading, watcher: Held) -> float | None:
        """A reading; one that can't be had any more is told once and closes no gate."""
        if reading.value is None:
            if name not in self._unreadable:
                self._unreadable.add(name)
                watcher.say(f"the {name} can't be read any more: {reading.reason}")
            return None
        return float(reading.value)
