"""Jobs on a phone that continue without this computer: starting them, waiting, and `prge android run`."""

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
from prge.cli.outputs import OutputFolder
from prge.cli.settings import parse_settings
from prge.errors import DeviceError

EARLY_SECONDS = 10.0
# Time between two status lines while waiting.
STATUS_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class ResumeFlags(PhoneFlags):
    """Resume a run that was stopped or killed."""

    resume: str = ""
    """Name of a stopped or killed run on the device to resume. Give this flag alone, or with --wait."""
    wait: bool = False
    """Wait until the run has ended."""


@dataclass(frozen=True, kw_only=True)
class JobFlags(RemoteFlags, ResumeFlags):
    """A run on the device, which continues without cable and computer."""

    POSITIONAL: ClassVar = ()
    NOT_GIVEN: ClassVar = ("change_estimator",)

    out: Path
    """Run folder to create on the device; its name is the name of the run."""
    again: bool = False
    """If the device already has the run, resume it, or wait for it if it is still running."""
    pull: OutputFolder | None = None
    """Wait until the run has ended, and copy its folder to this computer; see `prge android pull`."""
    remove: bool = False
    """With --pull: remove the run from the device after the copy."""

    def device_settings(self, settings: Any) -> Mapping[str, Any]:
        """See RemoteFlags."""
        return {"out": Path(self.path("runs", self.out.name))}

    def execute(self, call: RemoteCall) -> int:
        """Start or resume the run; see RemoteFlags."""
        phone, name = call.phone, self.out.name
        job, waits = phone.job(name), self.wait or self.pull is not None
        if job.state != "running" and not phone.exists(phone.path("runs", name, "journal.jsonl"), "s"):
            job = start_job(phone, name, call.send(call.send_inputs(), phone.path("jobs", name)), waits)
        elif not self.again:
            raise DeviceError(
                f"{phone.adb.serial} already has a run {name}.",
                remedy=f"Resume it with prge android run --resume {name}, or give another name with --out.",
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
    """Run `prge android run --resume NAME` and return its exit code; raises PrgeError."""
    flags = parse_settings(ResumeFlags, argv, "prge android run")
    phone = flags.phone()
    return report(phone, resume_run(phone, flags.resume, flags.wait))


def resume_run(phone: Phone, name: str, wait: bool) -> Job:
    """Resume a run that was stopped or killed, and return its status; raises DeviceError."""
    check_name(name)
    if phone.job(name).port is not None:
        raise DeviceError(
            f"{name} is a server, not a run.",
            remedy=f"Reconnect to it with prge android serve --resume {name}.",
            code="job-is-server",
        )
    words = ["--resume", phone.path("runs", name)]
    if not phone.exists(phone.path("runs", name, "config.yaml"), "f"):
        # The run was killed before its first record, so it starts from the beginning.
        words = ["--config", phone.path("jobs", name, "settings.yaml")]
        if not phone.exists(words[1], "f"):
            raise DeviceError(
                f"{phone.adb.serial} has no run {name} that could be resumed.", code="run-missing-on-device"
            )
    return start_job(phone, name, ["-m", "prge.cli.main", "run", *words], wait)


def start_job(phone: Phone, name: str, words: Iterable[str], wait: bool = False) -> Job:
    """Start Python of the runtime as a job, and watch its first seconds.

    Args:
        phone: the device.
        name: name of the job.
        words: arguments of Python.
        wait: wait until the job has ended.

    Returns:
        The status of the job.

    Raises:
        DeviceError: the job can't be started, or the device was lost.
    """
    job = phone.start(name, words)
    if wait:
        job = wait_for(phone, name)
    deadline = time.monotonic() + EARLY_SECONDS
    # Bad input ends a run before it writes a summary; a short wait shows the user the error at once.
    while job.state == "running" and not job.summary and time.monotonic() < deadline:
        time.sleep(0.2)
        job = phone.job(name)
    return job


def wait_for(phone: Phone, name: str, prints: bool = True) -> Job:
    """Wait until a job has ended, and return its status; reconnect to a lost device for a minute."""
    lost, printed = 0, time.monotonic()
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
        if prints and time.monotonic() - printed > STATUS_SECONDS:
            printed = time.monotonic()
            print(job.text(), flush=True)
        time.sleep(1)


def report(phone: Phone, job: Job) -> int:
    """Print the status of a job, and the end of its output if it failed.

    Returns:
        0 if the job is running or has ended successfully, else its exit code.
    """
    print(job.text())
    if job.state == "running" or job.code == 0:
        return 0
    console = quote([phone.path("jobs", job.name, "console.txt")])
    print(phone.adb.shell(f"tail -n 15 {console}").output, end="", file=sys.stderr)
    return job.code or 1
