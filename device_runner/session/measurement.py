"""Runs a verb in a process of its own and measures what it takes of this machine, for `prge android bench`.

    python -m device_runner.session.measurement CACHE FILE CELSIUS MINUTES VERB WORDS...

The verb starts once the machine is no hotter than CELSIUS; after MINUTES the measurement fails. When the verb
has ended, FILE gets its exit code, seconds, memory, readings of sensors before and after, and energy. Packed
weights are kept in CACHE instead of the user's cache.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from device_runner.session.sensors import Energy, Sensors
from prge.cli.main import main as verb
from prge.errors import DeviceError
from prge.system.atomic import write_file
from prge.system.parents import end_with_parent
from prge.system.processes import watch_memory

LOOK_SECONDS, _POLL_SECONDS = 1.0, 0.01


def main(argv: Sequence[str]) -> int:
    """Run the verb; return its exit code, or 128 + the number of the signal that ended it."""
    cache, path, celsius, minutes, *words = argv
    if reason := _wait_until_cool(Sensors(), float(celsius), 60 * float(minutes)):
        print(f"error: {reason}", file=sys.stderr)
        return DeviceError.exit_code
    measured = measure(Path(cache), words)
    write_file(Path(path), (json.dumps(measured, indent=1) + "\n").encode())
    return int(measured["code"])


def _wait_until_cool(sensors: Sensors, celsius: float, seconds: float) -> str:
    """Wait until the machine is cool; return why it can't be measured, or an empty string.

    A machine without a thermometer counts as cool.
    """
    until = time.monotonic() + seconds
    while (temperature := sensors.temperature().value) is not None and temperature > celsius:
        if time.monotonic() >= until:
            return (
                f"too hot: {temperature:.1f} degrees Celsius after {seconds / 60:g} minutes, not {celsius:g}"
            )
        time.sleep(min(LOOK_SECONDS, max(0.01, until - time.monotonic())))
    return ""


def measure(cache: Path, words: Sequence[str]) -> dict[str, Any]:
    """Run a verb and return its exit code and what it took."""
    sensors = Sensors()
    before, energy, begin = sensors.record(), Energy(sensors), time.monotonic()
    child = _start(cache, words)
    with suppress(ValueError):  # not in a main thread
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, signal.SIGTERM))
    with watch_memory(child, _POLL_SECONDS) as peak:
        while (status := _wait_briefly(child)) is None:
            energy.sample()
    code = os.waitstatus_to_exitcode(status)
    return {
        "code": code if code >= 0 else 128 - code,
        "seconds": time.monotonic() - begin,
        **asdict(peak),
        "sensors": {"start": before, "end": sensors.record()},
        "joules": energy.record(),
    }


def _start(cache: Path, words: Sequence[str]) -> int:
    """Start a child that runs the verb: a fork, because a phone can't start Python by its path."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        end_with_parent(parent)
        os.environ["XDG_CACHE_HOME"] = str(cache)
        code = verb([*words])
    finally:
        os._exit(code)


def _wait_briefly(child: int) -> int | None:
    """Wait a moment for a child to end; return its status or None."""
    until = time.monotonic() + LOOK_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(_POLL_SECONDS)
    return None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
