"""Pauses: work waits until its constraints are met, reports why, and then continues by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from device_runner.session.constraints import Constraint
from device_runner.session.sensors import Sensors
from prge.errors import ConfigError

# Time between two readings of the sensors.
SECONDS = 5.0
_SLICE_SECONDS = 0.1
Log = Callable[[str], object]


class PauseObserver(Protocol):
    """Observer of a pause, which can also end it."""

    @property
    def stopped(self) -> bool:
        """Whether the wait must end."""
        ...

    def note(self, text: str) -> None:
        """Print a text for the user, and log it."""
        ...

    def on_wait(self, why: str) -> None:
        """Handle the beginning of a pause, or a change of its reason."""
        ...

    def on_pause(self, seconds: float) -> None:
        """Handle the end of a pause of this length."""
        ...


class Pauses:
    """The constraints that pause work; any thread may use it."""

    def __init__(
        self, constraints: Iterable[Constraint], sensors: Sensors | None = None, seconds: float = SECONDS
    ) -> None:
        """Read every sensor that a constraint needs.

        Args:
            constraints: constraints, all of which must be met.
            sensors: sensors to read.
            seconds: shortest time between two readings.

        Raises:
            ConfigError: a sensor can't be read, so that its constraint would never pause work.
        """
        self._constraints = tuple(constraints)
        self._sensors = sensors or Sensors()
        self._seconds = seconds
        self._lock = threading.Lock()
        self._next, self._since, self._why = 0.0, 0.0, ""
        self._unreadable: set[str] = set()
        readings = [(each.flag, each.read(self._sensors)) for each in self._constraints]
        problems = [f"{flag}: {reading.reason}" for flag, reading in readings if reading.value is None]
        if problems:
            raise ConfigError(
                "The device lacks sensors for these constraints:",
                problems,
                remedy="Leave them out.",
                code="condition-not-measurable",
            )

    def wait(self, observer: PauseObserver) -> bool:
        """Wait until all constraints are met; return whether the work must stop."""
        begin, reason = time.perf_counter(), ""
        while not observer.stopped and (current := self.reason_to_wait(observer.note)):
            if _reason_type(current) != _reason_type(reason):
                observer.on_wait(reason := current)
            time.sleep(min(_SLICE_SECONDS, self._seconds))
        if reason:
            observer.on_pause(time.perf_counter() - begin)
        return observer.stopped

    def reason_to_wait(self, log: Log) -> str:
        """Return why work must wait now, or an empty string.

        `log` gets a message when a pause begins, changes and ends.
        """
        with self._lock:
            now = time.monotonic()
            if not self._constraints or now < self._next:
                return self._why
            previous, self._why = self._why, self._first_unmet(log)
            self._next = time.monotonic() + self._seconds
            if self._why and not previous:
                self._since = now
            if self._why and _reason_type(self._why) != _reason_type(previous):
                log(f"paused, {self._why}")
            if previous and not self._why:
                log(f"resuming after a pause of {now - self._since:.0f} s")
            return self._why

    def _first_unmet(self, log: Log) -> str:
        """Return the reason of the first constraint that isn't met."""
        for each in self._constraints:
            reading = each.read(self._sensors)
            if reading.value is None:
                # Reported once; a sensor that can't be read any more pauses nothing.
                if each.sensor not in self._unreadable:
                    self._unreadable.add(each.sensor)
                    log(f"the {each.sensor} can no longer be read: {reading.reason}")
            elif why := each.unmet(reading.value, self._sensors, bool(self._why)):
                return why
        return ""


def _reason_type(why: str) -> str:
    return why.partition(":")[0]
