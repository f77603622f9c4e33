"""Pauses: work waits until its conditions are met, says why, and goes on by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from device_runner.session.conditions import Condition
from device_runner.session.sensors import Sensors
from prge.errors import ConfigError

# Between two looks at the sensors.
SECONDS = 5.0
_SLICE_SECONDS = 0.1
Say = Callable[[str], object]


class Held(Protocol):
    """Who is told of a pause, and may end it."""

    @property
    def stopped(self) -> bool:
        """Whether the wait is to end."""
        ...

    def say(self, text: str) -> None:
        """Tell the user, and the log."""
        ...

    def on_wait(self, why: str) -> None:
        """A pause begins, or waits for something else now."""
        ...

    def on_pause(self, seconds: float) -> None:
        """A pause of that length is over."""
        ...


class Gates:
    """What has to be met for work to go on; any thread may ask."""

    def __init__(
        self, conditions: Iterable[Condition], sensors: Sensors | None = None, seconds: float = SECONDS
    ) -> None:
        """Read every sensor that a condition needs.

        Args:
            conditions: all of them must be met.
            sensors: what to read.
            seconds: shortest time between two looks.

        Raises:
            ConfigError: one of them can't be read, so that its gate would never close.
        """
        self._conditions = tuple(conditions)
        self._sensors = sensors or Sensors()
        self._seconds = seconds
        self._lock = threading.Lock()
        self._next, self._since, self._why = 0.0, 0.0, ""
        self._unreadable: set[str] = set()
        readings = [(each.flag, each.read(self._sensors)) for each in self._conditions]
        problems = [f"{flag}: {reading.reason}" for flag, reading in readings if reading.value is None]
        if problems:
            raise ConfigError(
                "the device doesn't tell what these need:",
                problems,
                remedy="leave them out",
                code="condition-not-measurable",
            )

    def hold(self, watcher: Held) -> bool:
        """Wait until all conditions are met, and return whether the work is to stop."""
        begin, told = time.perf_counter(), ""
        while not watcher.stopped and (why := self.closed(watcher.say)):
            if _kind(why) != _kind(told):
                watcher.on_wait(told := why)
            time.sleep(min(_SLICE_SECONDS, self._seconds))
        if told:
            watcher.on_pause(time.perf_counter() - begin)
        return watcher.stopped

    def closed(self, say: Say) -> str:
        """Why work must wait now, empty if it need not; `say` is told when that begins, changes and ends."""
        with self._lock:
            now = time.monotonic()
            if not self._conditions or now < self._next:
                return self._why
            before, self._why = self._why, self._look(say)
            self._next = time.monotonic() + self._seconds
            if self._why and not before:
                self._since = now
            if self._why and _kind(self._why) != _kind(before):
                say(f"paused, {self._why}")
            if before and not self._why:
                say(f"going on after a pause of {now - self._since:.0f} s")
            return self._why

    def _look(self, say: Say) -> str:
        """The reason of the first condition that isn't met."""
        for each in self._conditions:
            reading = each.read(self._sensors)
            if reading.value is None:
                # Told once; what can't be read any more closes no gate.
                if each.sensor not in self._unreadable:
                    self._unreadable.add(each.sensor)
                    say(f"the {each.sensor} can't be read any more: {reading.reason}")
            elif why := each.unmet(reading.value, self._sensors, bool(self._why)):
                return why
        return ""


def _kind(why: str) -> str:
    return why.partition(":")[0]
