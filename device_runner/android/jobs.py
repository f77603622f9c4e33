"""Verbs that go on on a phone without this computer: started, waited for, and `prge android run` itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from device_runner.android.adb import Adb, quote
from device_runner.android.device import Job, Phone, PhoneFlags, check_name
from device_runner.android.remote import RemoteCall, RemoteFlags
from prge.errors import DeviceError
from prge.verbs.outputs import OutputFolder
from prge.verbs.settings import parse_settings

EARLY_SECONDS = 10.0
# Between two lines of how a run stands that is waited for.
TELL_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class ResumeFlags(PhoneFlags):
    """Go on with a run that was stopped or killed."""

    resume: str = ""
    """Alone, or with --wait: name of a run on the device to go on with, which was stopped or killed."""
    wait: bool = False
    """Wait until the run has ended."""


@dataclass(frozen=True, kw_only=True)
class JobFlags(RemoteFlags, ResumeFlags):
    """The run on the device: it goes on without cable and computer."""

    POSITIONAL: ClassVar = ()
    NOT_GIVEN: ClassVar = ("change_estimator",)

    out: Path
    """Run folder to create on the device; its name is the name of the run."""
    again: bool = False
    """Where the device has the run already, go on with it, and wait for it where it still runs."""
    pull: OutputFolder | None = None
    """Wait until the run has ended, and bring its folder here; see `prge android pull`."""
    remove: bool = False
    """Beside --pull: remove the run from the device once it is here."""

    def settings_there(self, given: Any) -> Mapping[str, Any]:
        """See RemoteFlags."""
        return {"out": Path(self.path("runs", self.out.name))}

    def execute(self, call: RemoteCall) -> int:
        """Start the run; see RemoteFlags."""
        phone, name = call.phone, self.out.name
        job, waits = phone.job(name), self.wait or self.pull is not None
        if job.state != "running" and not phone.exists(phone.path("runs", name, "journal.jsonl"), "s"):
            job = start_job(phone, name, call.send(call.bring(), phone.path("jobs", name)), waits)
        elif not self.again:
            raise DeviceError(
                f"{phone.adb.serial} has a run {name} already",
                remedy=f"go on with it: prge android run --resume {name}; or give another name with --out",
                code="run-exists-on-device",
            )
        else:
            if waits:
                job = wait_for(phone, name)
            if job.state != "running" and not job.is_done:
                job = resume_run(phone, name, waits)
        code = report(phone, job)
        if self.pull is not None and job.is_done:
            phone.pull_run(name, self.pull)
            if self.remove:
                phone.remove(phone.path("runs", name), phone.path("jobs", name))
        return code


def resume(argv: list[str]) -> int:
    """`prge android run --resume NAME`; returns the exit code, raises PrgeError."""
    flags = parse_settings(ResumeFlags, argv, "prge android run")
    phone = flags.phone()
    return report(phone, resume_run(phone, flags.resume, flags.wait))


def resume_run(phone: Phone, name: str, wait: bool) -> Job:
    """Go on with a run that was stopped or killed; raises DeviceError."""
    check_name(name)
    if phone.job(name).port is not None:
        raise DeviceError(
            f"{name} is a server", remedy=f"prge android serve --resume {name}", code="job-is-server"
        )
    words = ["--resume", phone.path("runs", name)]
    if not phone.exists(phone.path("runs", name, "config.yaml"), "f"):
        # Killed before its first record: begin it as it was begun.
        words = ["--config", phone.path("jobs", name, "settings.yaml")]
        if not phone.exists(words[1], "f"):
            raise DeviceError(
                f"{phone.adb.serial} has no run {name} to go on with", code="run-missing-on-device"
            )
    return start_job(phone, name, ["-m", "prge.cli", "run", *words], wait)


def start_job(phone: Phone, name: str, words: Iterable[str], wait: bool = False) -> Job:
    """Start Python of the runtime as a job, and see how it begins or, to `wait`, ends; raises DeviceError."""
    job = phone.start(name, words)
    if wait:
        job = wait_for(phone, name)
    deadline = time.monotonic() + EARLY_SECONDS
    # Bad input ends a run before it has a summary: say so at once, if it is quick.
    while job.state == "running" and not job.summary and time.monotonic() < deadline:
        time.sleep(0.2)
        job = phone.job(name)
    return job


def wait_for(phone: Phone, name: str, prints: bool = True) -> Job:
    """The job once it has ended; a device that is lost meanwhile is looked for again for a while."""
    lost, then = 0, time.monotonic()
    while True:
        try:
            job = phone.job(name)
            lost = 0
        except DeviceError:
            lost += 1
            if lost > 30:
                raise
            time.sleep(2)
            with suppress(DeviceError):
                phone = Phone(Adb(phone.adb.serial), phone.folder)
            continue
        if job.state != "running":
            return job
        if prints and time.monotonic() - then > TELL_SECONDS:
            then = time.monotonic()
            print(job.text(), flush=True)
        time.sleep(1)


def report(phone: Phone, job: Job) -> int:
    """Print how a job stands; 0 if it goes on or has ended well, else its exit code, with its last words."""
    print(job.text())
    if job.state == "running" or job.code == 0:
        return 0
    console = quote([phone.path("jobs", job.name, "console.txt")])
    print(phone.adb.shell(f"tail -n 15 {console}").output, end="", file=sys.stderr)
    return job.code or 1
