"""`prge android serve`: a detached server on a phone, which this computer reaches through adb.

The server listens on the phone's loopback, which all apps can reach, so clients need a key.

    jobs/NAME/   settings.yaml, key (readable by adb's user only), console.txt, port, restarts
    runs/NAME/   feedback.jsonl, adapters.jsonl, rounds/, if the server stores feedback or learns from it
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
from device_runner.android.device import Job, Phone, PhoneFlags, check_name
from device_runner.android.push import send_bundle, send_tuning
from device_runner.android.remote import RemoteCall, RemoteFlags
from device_runner.serving.history import FEEDBACK
from prge.cli.settings import format_yaml, parse_settings
from prge.errors import INTERRUPTED, ConfigError, DeviceError, PrgeError
from prge.formats.run_folder import JOURNAL
from prge.formats.tune_folder import find_tuning

KEY = "key"
READY = "listening at"
# Longest wait for the model to load.
_READY_SECONDS = 600.0
_LAST_LINES = 15
# Exit codes of a server that was stopped, or could not start.
_OWN_ENDS = (0, PrgeError.exit_code, INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class ReachFlags(PhoneFlags):
    """How this computer reaches the server."""

    name: str = "server"
    """Name of the job on the device, for `prge android status`, `stop`, `logs` and `pull`."""
    computer_port: int | None = None
    """Port of this computer's loopback that is forwarded to the server's port; 0: a free one. Default: the
    same number."""
    open: bool = False
    """Open the server's page in this computer's browser."""
    resume: bool = False
    """Reconnect to a server that was started before, and start it again if it has ended; alone, or with the
    flags of this group. Repeating the first command does the same."""

    @contextmanager
    def forwarded(self, phone: Phone, port: int) -> Iterator[int]:
        """Forward a port of this computer to a port of the phone, and yield this computer's port.

        If the block raises DeviceError, a new forward is removed again.
        """
        before = phone.adb.forwards()
        computer_port = phone.adb.forward(port if self.computer_port is None else self.computer_port, port)
        try:
            yield computer_port
        except DeviceError:
            if computer_port not in before:
                phone.adb.unforward(computer_port)
            raise

    def report(self, job: Job, computer_port: int, key: str = "") -> int:
        """Print the server's URLs and its new key, if there is one, and return the exit code 0."""
        print(job.text())
        print(
            f"http://127.0.0.1:{computer_port}/v1 on this computer, "
            f"http://127.0.0.1:{job.port}/v1 on the phone"
        )
        if key:
            print(f"API key, shown this once: {key}")
        if self.open and not webbrowser.open(f"http://127.0.0.1:{computer_port}/"):
            print(f"Cannot find a browser. Open http://127.0.0.1:{computer_port}/ yourself.")
        return 0


@dataclass(frozen=True, kw_only=True)
class ServeFlags(RemoteFlags, ReachFlags):
    """A server on the device, which continues without cable and computer."""

    POSITIONAL: ClassVar = ("bundle",)
    # Address and key are fixed here, and the page shows no runs.
    NOT_GIVEN: ClassVar = ("host", "allowed_hosts", "api_key_file", "insecure", "runs")

    port: int = 8000
    """Port of the device's loopback."""
    learn: bool = False
    """Learn from feedback between requests. The feedback stays on the device until you run
    `prge android pull --rows`."""
    feedback: bool = False
    """Store feedback on the device without learning from it."""

    def device_settings(self, settings: Any) -> Mapping[str, Any]:
        """See RemoteFlags."""
        check_name(self.name)
        if not self.port:
            problem = "--port is 0, must be a fixed port"
            raise ConfigError("These settings can't be used:", [problem], code="settings-unusable")
        own = Path(self.path("runs", self.name))
        return {
            "host": "127.0.0.1",
            "port": self.port,
            "api_key_file": Path(self.path("jobs", self.name, KEY)),
            "model_name": settings.model_name or settings.bundle.resolve().name,
            "learn": own if self.learn else None,
            "feedback": own / FEEDBACK if self.feedback and not self.learn else None,
        }

    def execute(self, call: RemoteCall) -> int:
        """Start the server, or reconnect to a running one with equal settings; see RemoteFlags."""
        phone, name = call.phone, self.name
        if phone.exists(phone.path("runs", name, JOURNAL)):
            raise DeviceError(
                f"{name} is a run on {phone.adb.serial}.",
                remedy="Give another --name.",
                code="run-exists-on-device",
            )
        bundle, tuning = call.settings.bundle, find_tuning(call.settings.bundle)
        # A server that learns repeats rows of the tuning, so as not to forget them.
        bundle = send_tuning(phone, tuning, rows=self.learn) if tuning else send_bundle(phone, bundle)
        settings, job, key = call.send_inputs(bundle=bundle), phone.job(name), ""
        if settings["feedback"] is not None:
            phone.make_folder(phone.path("runs", name))
        folder = phone.path("jobs", name)
        begun = phone.adb.shell(f"cat {quote([f'{folder}/settings.yaml'])}").output
        if job.state == "running" and begun != format_yaml(settings):
            raise DeviceError(
                f"{name} is running on {phone.adb.serial} with other settings.",
                remedy=f"Stop it with `prge android stop {name}`, or give another --name and --port.",
                code="server-with-other-settings",
            )
        with self.forwarded(phone, self.port) as computer_port:
            if job.state != "running":
                # A server that was killed or crashed keeps its key, which its clients know.
                if job.port is None or job.code in _OWN_ENDS:
                    key = secrets.token_urlsafe()
                    phone.make_folder(folder)
                    phone.write(key, f"{folder}/{KEY}")
                call.send(settings, folder)
                job = _start_server(phone, name, self.port)
        return self.report(job, computer_port, key)


def reconnect(argv: list[str]) -> int:
    """Run `prge android serve --resume [NAME]` and return its exit code; raises PrgeError."""
    flags = parse_settings(ReachFlags, argv, "prge android serve", ["name"])
    phone = flags.phone()
    job = phone.job(flags.name)
    if job.port is None:
        raise DeviceError(
            f"{phone.adb.serial} has no server {flags.name!r}.",
            remedy="See its jobs with prge android status.",
            code="server-missing-on-device",
        )
    with flags.forwarded(phone, job.port) as computer_port:
        if job.state != "running":
            phone.require_this_driver()
            job = _start_server(phone, flags.name, job.port)
    return flags.report(job, computer_port)


def server_url(phone: Phone, job: Job) -> str:
    """Return the URL of a server on this computer, for `prge android status`; empty for any other job."""
    if job.port is None or job.state != "running":
        return ""
    for computer_port in forwarded_ports(phone, job):
        return f"http://127.0.0.1:{computer_port}/v1"
    return f"not forwarded: prge android serve --resume {job.name}"


def forwarded_ports(phone: Phone, job: Job) -> list[int]:
    """Return the ports of this computer that are forwarded to a server."""
    forwards = phone.adb.forwards()
    return [computer_port for computer_port, device_port in forwards.items() if device_port == job.port]


def _start_server(phone: Phone, name: str, port: int) -> Job:
    """Start a server, and wait until it listens, or for ten minutes.

    Raises:
        DeviceError: the server ends before it listens.
    """
    console = quote([phone.path("jobs", name, "console.txt")])
    before = phone.adb.shell(f"wc -c <{console}").output.strip()
    begin = int(before) + 1 if before.isdigit() else 1
    words = ["-m", "prge.cli.main", "serve", "--config", phone.path("jobs", name, "settings.yaml")]
    job, deadline = phone.start(name, words, port), time.monotonic() + _READY_SECONDS
    while job.state == "running" and time.monotonic() < deadline:
        if READY in phone.adb.shell(f"tail -c +{begin} {console}").output:
            return job
        time.sleep(0.3)
        job = phone.job(name)
    if job.state != "running":
        output = phone.adb.shell(f"tail -c +{begin} {console} | tail -n {_LAST_LINES}").output.strip()
        raise DeviceError(f"{job.text()} before it listened:\n{output}", code="server-not-started")
    return job
