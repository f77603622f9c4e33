"""A verb in a process of its own, and what it takes of this machine: for `prge android bench`.

    python -m device_runner.session.measuring CACHE FILE CELSIUS MINUTES VERB WORDS...

The verb begins when the machine is as cool as CELSIUS, or never after MINUTES. FILE gets, once it has ended,
its exit code, seconds, memory, readings of sensors at both ends, and energy. Packed weights lie in CACHE: the
user's own knows nothing of them.
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
from prge.cli import main as verb
from prge.errors import DeviceError
from prge.host.atomic import write_file
from prge.host.parents import end_with_parent
from prge.host.processes import watched

LOOK_SECONDS, _POLL_SECONDS = 1.0, 0.01


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns its exit code, that of a signal as a shell does."""
    cache, path, celsius, minutes, *words = argv
    if told := _too_hot(Sensors(), float(celsius), 60 * float(minutes)):
        print(f"error: {told}", file=sys.stderr)
        return DeviceError.exit_code
    measured = measure(Path(cache), words)
    write_file(Path(path), (json.dumps(measured, indent=1) + "\n").encode())
    return int(measured["code"])


def _too_hot(sensors: Sensors, celsius: float, seconds: float) -> str:
    """Wait until the machine is cool; why it can't be measured, or nothing. One that doesn't tell can."""
    until = time.monotonic() + seconds
    while (found := sensors.temperature().value) is not None and found > celsius:
        if time.monotonic() >= until:
            return f"too hot: {found:.1f} degrees Celsius after {seconds / 60:g} minutes, not {celsius:g}"
        time.sleep(min(LOOK_SECONDS, max(0.01, until - time.monotonic())))
    return ""


def measure(cache: Path, words: Sequence[str]) -> dict[str, Any]:
    """What a verb took."""
    sensors = Sensors()
    before, energy, begin = sensors.record(), Energy(sensors), time.monotonic()
    child = _started(cache, words)
    with suppress(ValueError):  # not in a main thread
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, signal.SIGTERM))
    with watched(child, _POLL_SECONDS) as peak:
        while (status := _ended(child)) is None:
            energy.sample()
    code = os.waitstatus_to_exitcode(status)
    return {
        "code": code if code >= 0 else 128 - code,
        "seconds": time.monotonic() - begin,
        **asdict(peak),
        "sensors": {"start": before, "end": sensors.record()},
        "joules": energy.record(),
    }


def _started(cache: Path, words: Sequence[str]) -> int:
    """A child that runs the verb: a fork, since a phone starts no Python by its path."""
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


def _ended(child: int) -> int | None:
    """The status of a child that has ended, waited for a while."""
    until = time.monotonic() + LOOK_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(_POLL_SECONDS)
    return None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
