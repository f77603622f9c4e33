"""`prge android serve`: a server on a phone, detached, which this computer reaches by adb.

It listens at the phone's own loopback, that all apps reach, too; therefore it has a key.

    jobs/NAME/   settings.yaml, key (of adb's user alone), console.txt, port, restarts
    runs/NAME/   feedback.jsonl, adapters.jsonl, rounds/, where feedback is kept or learnt from
"""

from __future__ import annotations

import secrets
import time
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from device_runner.android.adb import quote
from device_runner.android.bringing import send_bundle, send_tuning
from device_runner.android.device import Job, Phone, PhoneFlags, check_name
from device_runner.android.remote import RemoteCall, RemoteFlags
from device_runner.serving.history import FEEDBACK
from prge.errors import INTERRUPTED, ConfigError, DeviceError, PrgeError
from prge.files.run_folder import JOURNAL
from prge.files.tuned import tuning_at
from prge.verbs.settings import parse_settings, yaml_of

KEY = "key"
READY = "listening at"
# For a model to be loaded.
_READY_SECONDS = 600.0
_LAST_LINES = 15
# Exit codes of a server that was ended, or couldn't begin.
_OWN_ENDS = (0, PrgeError.exit_code, INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class ReachFlags(PhoneFlags):
    """How this computer reaches the server."""

    name: str = "server"
    """Of the job on the device, for `prge android status`, `stop`, `logs` and `pull`."""
    computer_port: int | None = None
    """Port of this computer's loopback that leads to the server's; 0: a free one. Default: the same."""
    open: bool = False
    """Open the server's page in this computer's browser."""
    resume: bool = False
    """Alone, or with these: reach a server that was started before, and bring it back if it has ended. So
    does the same command again."""

    @contextmanager
    def forwarded(self, phone: Phone, port: int) -> Iterator[int]:
        """Port of this computer that leads to one of the phone; if it is new, it goes if the block fails."""
        before = phone.adb.forwards()
        here = phone.adb.forward(port if self.computer_port is None else self.computer_port, port)
        try:
            yield here
        except DeviceError:
            if here not in before:
                phone.adb.unforward(here)
            raise

    def report(self, job: Job, here: int, key: str = "") -> int:
        """Print how the server is reached, by a port of this computer and a key that is new; 0."""
        print(job.text())
        print(f"http://127.0.0.1:{here}/v1 on this computer, http://127.0.0.1:{job.port}/v1 on the phone")
        if key:
            print(f"API key, shown this once: {key}")
        if self.open and not webbrowser.open(f"http://127.0.0.1:{here}/"):
            print(f"there is no browser to open: http://127.0.0.1:{here}/")
        return 0


@dataclass(frozen=True, kw_only=True)
class ServeFlags(RemoteFlags, ReachFlags):
    """The server on the device: it goes on without cable and computer."""

    POSITIONAL: ClassVar = ("bundle",)
    # Where it listens, and by which key, is settled; the page shows no runs.
    NOT_GIVEN: ClassVar = ("host", "allowed_hosts", "api_key_file", "insecure", "runs")

    port: int = 8000
    """Port of the device's loopback."""
    learn: bool = False
    """Learn between requests from feedback, which stays on the device until `prge android pull --rows`."""
    feedback: bool = False
    """Keep feedback on the device, without learning from it."""

    def settings_there(self, given: Any) -> Mapping[str, Any]:
        """See RemoteFlags."""
        check_name(self.name)
        if not self.port:
            problem = "--port is 0, must be a port that is known before"
            raise ConfigError("these settings can't be used:", [problem], code="settings-unusable")
        own = Path(self.path("runs", self.name))
        return {
            "host": "127.0.0.1",
            "port": self.port,
            "api_key_file": Path(self.path("jobs", self.name, KEY)),
            "model_name": given.model_name or given.bundle.resolve().name,
            "learn": own if self.learn else None,
            "feedback": own / FEEDBACK if self.feedback and not self.learn else None,
        }

    def execute(self, call: RemoteCall) -> int:
        """Start a server, or reach the one that is there with these settings; see RemoteFlags."""
        phone, name = call.phone, self.name
        if phone.exists(phone.path("runs", name, JOURNAL)):
            raise DeviceError(
                f"{name} is a run on {phone.adb.serial}",
                remedy="give another --name",
                code="run-exists-on-device",
            )
        bundle, tuning = call.settings.bundle, tuning_at(call.settings.bundle)
        # What learns must not forget rows of a tuning.
        bundle = send_tuning(phone, tuning, rows=self.learn) if tuning else send_bundle(phone, bundle)
        settings, job, key = call.bring(bundle=bundle), phone.job(name), ""
        if settings["feedback"] is not None:
            phone.make(phone.path("runs", name))
        folder = phone.path("jobs", name)
        begun = phone.adb.shell(f"cat {quote([f'{folder}/settings.yaml'])}").output
        if job.state == "running" and begun != yaml_of(settings):
            raise DeviceError(
                f"{name} is running on {phone.adb.serial} with other settings",
                remedy=f"end it with `prge android stop {name}`, or give another --name and --port",
                code="server-with-other-settings",
            )
        with self.forwarded(phone, self.port) as here:
            if job.state != "running":
                # A server that was killed or crashed comes back as the clients know it.
                if job.port is None or job.code in _OWN_ENDS:
                    key = secrets.token_urlsafe()
                    phone.make(folder)
                    phone.write(key, f"{folder}/{KEY}")
                call.send(settings, folder)
                job = _started(phone, name, self.port)
        return self.report(job, here, key)


def reach(argv: list[str]) -> int:
    """`prge android serve --resume [NAME]`; returns the exit code, raises PrgeError."""
    flags = parse_settings(ReachFlags, argv, "prge android serve", ["name"])
    phone = flags.phone()
    job = phone.job(flags.name)
    if job.port is None:
        raise DeviceError(
            f"{phone.adb.serial} has no server {flags.name!r}",
            remedy="prge android status",
            code="server-missing-on-device",
        )
    with flags.forwarded(phone, job.port) as here:
        if job.state != "running":
            phone.need_this_driver()
            job = _started(phone, flags.name, job.port)
    return flags.report(job, here)


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
        raise DeviceError(f"{job.text()} before it listened:\n{said}", code="server-not-started")
    return job
