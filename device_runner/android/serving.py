"""`prge android serve`: a server on a phone, detached, which this computer reaches by adb.

It listens at the phone's own loopback, that all apps reach, too; therefore it has a key.

    jobs/NAME/   settings.yaml, key (of adb's user alone), console.txt, port, restarts
    runs/NAME/   feedback.jsonl, adapters.jsonl, rounds/, where feedback is kept or learnt from
"""

from __future__ import annotations

import secrets
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device_runner.android.adb import quote
from device_runner.android.bringing import send_adapter, send_bundle, send_tuning
from device_runner.android.device import (
    DeviceSettings,
    Job,
    Phone,
    check_name,
    files_there,
    send_rows,
    send_settings,
)
from device_runner.serving.flags import ServingFlags
from device_runner.serving.history import FEEDBACK
from device_runner.session.speaking import BASE, adapter_source
from prge.errors import INTERRUPTED, ConfigError, DeviceError, PrgeError
from prge.files.run_folder import JOURNAL
from prge.files.tuned import tuning_at
from prge.verbs.settings import part_of, yaml_of

KEY = "key"
READY = "listening at"
# For a model to be loaded.
_READY_SECONDS = 600.0
_LAST_LINES = 15
# Exit codes of a server that was ended, or couldn't begin.
_OWN_ENDS = (0, PrgeError.exit_code, INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class ReachFlags(DeviceSettings):
    """Which device, and how its server is reached."""

    name: str = "server"
    """Of the job on the device, for `prge android status`, `stop`, `logs` and `pull`."""
    computer_port: int | None = None
    """Port of this computer's loopback that leads to the server's; 0: a free one. Default: the same."""
    open: bool = False
    """Open the server's page in this computer's browser."""


@dataclass(frozen=True)
class AndroidServeSettings(ServingFlags, ReachFlags):
    """Serve models on a device, detached: `prge serve` there, for this computer and the device's browser.

    The same command again, or --resume, reaches a server that is there, and brings back one that is not.
    """

    port: int = 8000
    """Port of the device's loopback."""
    learn: bool = False
    """Learn between requests from feedback, which stays on the device until `prge android pull --rows`."""
    feedback: bool = False
    """Keep feedback on the device, without learning from it."""

    def __post_init__(self) -> None:
        problems = self.serving_problems(learns=self.learn)
        if not self.port:
            problems.append("--port is 0, must be a port that is known before")
        if problems:
            raise ConfigError("these settings can't be used:", problems)


@dataclass(frozen=True)
class ServeAgainSettings(ReachFlags):
    """Reach a server that was started before, and bring it back if it has ended."""

    resume: bool = False
    """Rather than to start another one."""


def serve_on(phone: Phone, settings: AndroidServeSettings) -> None:
    """Start a server, or reach the one that is there with these settings; tells how.

    Raises:
        PrgeError: bad input, a port that is taken, another server or run of that name, a server that doesn't
            start, or a device that is lost.
    """
    check_name(settings.name)
    phone.need_this_driver()
    if phone.exists(phone.path("runs", settings.name, JOURNAL)):
        raise DeviceError(f"{settings.name} is a run on {phone.adb.serial}", remedy="give another --name")
    there, job = _brought(phone, settings), phone.job(settings.name)
    file = phone.path("jobs", settings.name, "settings.yaml")
    if job.state == "running" and phone.adb.shell(f"cat {quote([file])}").output != yaml_of(there):
        raise DeviceError(
            f"{settings.name} is running on {phone.adb.serial} with other settings",
            remedy=f"end it with `prge android stop {settings.name}`, or give another --name and --port",
        )
    key = ""
    with _forwarded(phone, settings, settings.port) as here:
        if job.state != "running":
            # A server that was killed or crashed comes back as the clients know it.
            if job.port is None or job.code in _OWN_ENDS:
                key = secrets.token_urlsafe()
                phone.make(phone.path("jobs", settings.name))
                phone.write(key, phone.path("jobs", settings.name, KEY))
            send_settings(phone, there, phone.path("jobs", settings.name))
            job = _started(phone, settings.name, settings.port)
    _tell(settings, job, here, key)


def serve_again(phone: Phone, settings: ServeAgainSettings) -> None:
    """Reach a server that was started before, with its key; raises as `serve_on`."""
    job = phone.job(settings.name)
    if job.port is None:
        raise DeviceError(f"{phone.adb.serial} has no server {settings.name!r}", remedy="prge android status")
    with _forwarded(phone, settings, job.port) as here:
        if job.state != "running":
            phone.need_this_driver()
            job = _started(phone, settings.name, job.port)
    _tell(settings, job, here, "")


def reached(phone: Phone, job: Job) -> str:
    """Where a server is reached from this computer, for `prge android status`."""
    if job.port is None or job.state != "running":
        return ""
    for here in ways_to(phone, job):
        return f"http://127.0.0.1:{here}/v1"
    return f"not forwarded: prge android serve --resume {job.name}"


def ways_to(phone: Phone, job: Job) -> list[int]:
    """Ports of this computer that lead to a server."""
    return [here for here, there in phone.adb.forwards().items() if there == job.port]


def _brought(phone: Phone, settings: AndroidServeSettings) -> dict[str, Any]:
    """Bring what a server needs; settings of `prge serve` there."""
    own = phone.path("runs", settings.name)
    tuning = tuning_at(settings.bundle)
    sent: dict[str, Any] = {
        **vars(part_of(ServingFlags, settings)),
        **files_there(phone, settings, "chat_template"),
    }
    if tuning is None:
        sent["bundle"] = send_bundle(phone, settings.bundle)
    else:
        sent["bundle"] = send_tuning(phone, tuning, settings.learn)
    sent["model_name"] = settings.model_name or settings.bundle.resolve().name
    sent["adapter"] = [_adapter_there(phone, word) for word in settings.adapter]
    if settings.kept is not None:
        sent["kept"] = send_rows(phone, settings.kept, "train")
    if settings.learn:
        sent["learn"] = own
    elif settings.feedback:
        phone.make(own)
        sent["feedback"] = f"{own}/{FEEDBACK}"
    return {**sent, "port": settings.port, "api_key_file": phone.path("jobs", settings.name, KEY)}


def _adapter_there(phone: Phone, word: str) -> str:
    """An adapter that a user names, as NAME=PATH on the device: one of this computer, or a run of there."""
    if word == BASE:
        return word
    source = adapter_source(word)
    name = source.resolve().name if source == Path(word) else word.partition("=")[0]
    if source.exists():
        return f"{name}={send_adapter(phone, source)}"
    check_name(str(source))
    run = phone.path("runs", str(source))
    if not phone.exists(run, "d"):
        raise DeviceError(
            f"--adapter {word}: there is no folder {source}, and no run of that name on {phone.adb.serial}",
            remedy="give a run, checkpoint or PEFT folder, or a run of `prge android status`",
        )
    return f"{name}={run}"


@contextmanager
def _forwarded(phone: Phone, settings: ReachFlags, port: int) -> Iterator[int]:
    """Port of this computer that leads to a port of the phone; one that is new goes if the server fails."""
    before = phone.adb.forwards()
    here = phone.adb.forward(port if settings.computer_port is None else settings.computer_port, port)
    try:
        yield here
    except DeviceError:
        if here not in before:
            phone.adb.unforward(here)
        raise


def _started(phone: Phone, name: str, port: int) -> Job:
    """The server once it listens, or still loads its model; raises DeviceError if it ends before."""
    console = quote([phone.path("jobs", name, "console.txt")])
    before = phone.adb.shell(f"wc -c <{console}").output.strip()
    begin = int(before) + 1 if before.isdigit() else 1
    words = ["-m", "prge.cli", "serve", "--config", phone.path("jobs", name, "settings.yaml")]
    job, deadline = phone.start(name, words, port), time.monotonic() + _READY_SECONDS
    while job.state == "running" and time.monotonic() < deadline:
        if READY in phone.adb.shell(f"tail -c +{begin} {console}").output:
            return job
        time.sleep(0.3)
        job = phone.job(name)
    if job.state != "running":
        said = phone.adb.shell(f"tail -c +{begin} {console} | tail -n {_LAST_LINES}").output.strip()
        raise DeviceError(f"{job.text()} before it listened:\n{said}")
    return job


def _tell(settings: ReachFlags, job: Job, here: int, key: str) -> None:
    print(job.text())
    print(f"http://127.0.0.1:{here}/v1 on this computer, http://127.0.0.1:{job.port}/v1 on the phone")
    if key:
        print(f"API key, shown this once: {key}")
    if settings.open and not webbrowser.open(f"http://127.0.0.1:{here}/"):
        print(f"there is no browser to open: http://127.0.0.1:{here}/")
