"""`prge android <verb>`: train on a phone from a workstation, through adb."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from device_runner.android.adb import quote
from device_runner.android.bench import BenchSettings, bench
from device_runner.android.device import FILES_WITH_ROWS, Phone, PhoneFlags
from device_runner.android.fleet_join import JoinFlags
from device_runner.android.jobs import JobFlags, resume, wait_for
from device_runner.android.preflight import examine
from device_runner.android.push import send_bundle, send_run
from device_runner.android.remote import RemoteVerb
from device_runner.android.runtime import MANIFEST as RUNTIME_MANIFEST
from device_runner.android.runtime import BundleSettings, build_runtime, open_runtime
from device_runner.android.serving import ServeFlags, forwarded_ports, reconnect, server_url
from device_runner.fleet.join import JoinSettings
from device_runner.serving.history import FEEDBACK
from device_runner.serving.settings import ServeSettings
from device_runner.session.generation import ChatSettings, GenerateSettings
from device_runner.session.settings import EvaluateSettings, RunSettings
from prge.cli.inputs import InputPath
from prge.cli.outputs import OutputFolder
from prge.cli.settings import parse_settings
from prge.cli.subcommands import Action, run_action
from prge.errors import ConfigError, DeviceError
from prge.formats.run_folder import LOG
from prge.formats.tune_folder import find_tuning

Settings = TypeVar("Settings", bound=PhoneFlags)


@dataclass(frozen=True)
class AndroidDoctorSettings(PhoneFlags):
    """Check whether a phone can train."""

    EXAMPLE: ClassVar = ""

    json: bool = False
    """Print one JSON object instead of text."""


@dataclass(frozen=True)
class PushSettings(PhoneFlags):
    """Copy files to a phone before a run. A run itself copies everything except the runtime.

    Files that the phone already has, by their hashes, are not sent again.
    """

    EXAMPLE: ClassVar = "runtime bundle rows.jsonl"

    paths: tuple[InputPath, ...]
    """Runtimes, bundles, folders of `prge tune`, and files of rows."""
    check: bool = False
    """Compare the files on the phone even if they were complete when they were sent."""


@dataclass(frozen=True)
class AndroidStatusSettings(PhoneFlags):
    """Print the status of runs."""

    EXAMPLE: ClassVar = "run --wait"

    names: tuple[str, ...] = ()
    """Names of the runs; default: all."""
    json: bool = False
    """Print a JSON list instead of text."""
    wait: bool = False
    """Wait until the runs have ended."""


@dataclass(frozen=True)
class NamedSettings(PhoneFlags):
    """The run that a verb is for."""

    name: str
    """Name of the run."""


@dataclass(frozen=True)
class LogsSettings(NamedSettings):
    """Print the log of a run. The log shows a training row."""

    EXAMPLE: ClassVar = "run --lines 100"

    lines: int = 40
    """Number of lines from the end of the log."""
    console: bool = False
    """Print the output of the process instead of log.txt."""


@dataclass(frozen=True)
class PullSettings(NamedSettings):
    """Copy a run folder to this computer: adapter, checkpoints, journal, metrics."""

    EXAMPLE: ClassVar = "run --out run"

    out: OutputFolder | None = None
    """Folder to create, or an older copy of the run to replace; default: the name of the run."""
    log: bool = False
    """Copy log.txt too, which shows a training row."""
    rows: bool = False
    """Copy feedback.jsonl of a server too, with prompts and corrections of users."""


@dataclass(frozen=True)
class StopSettings(NamedSettings):
    """Stop a run after its current step. You can resume the run later."""

    EXAMPLE: ClassVar = "run"

    now: bool = False
    """Kill the run at once. You can still resume it later."""
    seconds: float = 120.0
    """Longest wait for the run to end, in seconds."""


@dataclass(frozen=True)
class CleanSettings(PhoneFlags):
    """Remove files of prge from the phone."""

    EXAMPLE: ClassVar = "run"

    names: tuple[str, ...] = ()
    """Names of the runs to remove."""
    data: bool = False
    """Remove rows, bundles with their packed weights, and initial adapters."""
    all: bool = False
    """Remove all files of prge, including the runs."""

    def __post_init__(self) -> None:
        if not (self.names or self.data or self.all):
            raise ConfigError(
                "There is nothing to remove:",
                ["name runs, or give --data or --all"],
                code="settings-unusable",
            )


def main(argv: Sequence[str]) -> int:
    """Run a verb of `prge android` and return its exit code."""
    return run_action(argv, ACTIONS, "prge android", "Train on a phone that adb reaches.")


def _bundle(argv: list[str]) -> int:
    settings = parse_settings(BundleSettings, argv, "prge android bundle", ["out"])
    runtime = build_runtime(settings)
    print(f"{runtime.folder}: {runtime.machine}, {runtime.megabytes:.1f} MB, tree {runtime.tree}")
    return 0


def _doctor(phone: Phone, settings: AndroidDoctorSettings) -> int:
    checks = []
    for check in examine(phone):
        checks.append(check)
        if not settings.json:
            print(f"{check.state:<8} {check.name:<12} {check.detail}", flush=True)
            if check.remedy:
                print(f"{'':<21} {check.remedy}", flush=True)
    if settings.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    return 1 if any(check.state == "missing" for check in checks) else 0


def _push(phone: Phone, settings: PushSettings) -> int:
    for item in settings.paths:
        if (item / RUNTIME_MANIFEST).is_file():
            open_runtime(item)
            sent = phone.send_runtime(item, check=settings.check)
            print(f"{item} -> {phone.path('runtime')}: {sent} files sent")
        elif item.is_dir():
            remote = send_bundle(phone, item, settings.check)
            print(f"{item} -> {remote}")
            if tuning := find_tuning(item):
                print(f"{tuning.adapter} -> {send_run(phone, tuning, remote)}")
        else:
            print(f"{item} -> {phone.send_file(item)}")
    return 0


def _status(phone: Phone, settings: AndroidStatusSettings) -> int:
    jobs = [
        wait_for(phone, name, prints=not settings.json) if settings.wait else phone.job(name)
        for name in settings.names or phone.jobs()
    ]
    if settings.json:
        print(json.dumps([asdict(job) for job in jobs], indent=2))
    else:
        lines = [", ".join(filter(None, [job.text(), server_url(phone, job)])) for job in jobs]
        print("\n".join(lines) or "no runs")
    return 0


def _logs(phone: Phone, settings: LogsSettings) -> int:
    _check_exists(phone, settings.name)
    is_console = settings.console or phone.job(settings.name).port is not None
    file = ("jobs", settings.name, "console.txt") if is_console else ("runs", settings.name, LOG)
    words = quote([phone.path(*file)])
    print(phone.adb.check(f"tail -n {settings.lines} {words}", f"reading {file[-1]}"), end="")
    return 0


def _pull(phone: Phone, settings: PullSettings) -> int:
    _check_exists(phone, settings.name)
    out = settings.out or Path(settings.name)
    is_wanted = {LOG: settings.log, FEEDBACK: settings.rows}
    phone.pull_run(settings.name, out, [file for file in FILES_WITH_ROWS if not is_wanted[file]])
    print(out / "final" if (out / "final").is_dir() else out)
    return 0


def _stop(phone: Phone, settings: StopSettings) -> int:
    _check_exists(phone, settings.name)
    job = phone.stop(settings.name, settings.now, settings.seconds)
    for port in forwarded_ports(phone, job):
        phone.adb.unforward(port)
    print(job.text())
    return 0


def _clean(phone: Phone, settings: CleanSettings) -> int:
    names = settings.names if not (settings.all or settings.data) else phone.jobs()
    running = [name for name in names if phone.job(name).state == "running"]
    if running:
        raise DeviceError(
            f"{running[0]} is running.",
            remedy=f"Stop it with `prge android stop {running[0]}`.",
            code="job-running",
        )
    if settings.all:
        phone.remove_all()
        return 0
    for name in settings.names:
        _check_exists(phone, name)
        phone.remove(phone.path("runs", name), phone.path("jobs", name))
    if settings.data:
        phone.remove(
            *(phone.path(name) for name in ("data", "bundles", "adapters", "bench", "tmp", "cache/prge"))
        )
    return 0


def _on_phone(
    verb: str, settings_type: type[Settings], act: Callable[[Phone, Settings], int], *positional: str
) -> Callable[[list[str]], int]:
    """Return a verb that parses its settings, connects to the phone, and calls `act`."""

    def run(argv: list[str]) -> int:
        settings = parse_settings(settings_type, argv, f"prge android {verb}", positional)
        return act(settings.phone(), settings)

    return run


def _fleet(argv: list[str]) -> int:
    return run_action(argv, {"join": _remote("join")}, "prge android fleet", "A phone as a fleet's device.")


def _check_exists(phone: Phone, name: str) -> None:
    """Raise DeviceError unless the phone has a job or a run of this name."""
    if phone.job(name).state == "absent" and not phone.exists(phone.path("runs", name), "d"):
        raise phone.no_run_error(name)


REMOTE = {
    "run": RemoteVerb(
        "run",
        RunSettings,
        "start or resume a run on a phone",
        "--bundle bundle --train rows.jsonl --out run",
        JobFlags,
        resume,
    ),
    "eval": RemoteVerb(
        "eval",
        EvaluateSettings,
        "score an adapter on rows, on a phone",
        "bundle --data test.jsonl --adapter run",
    ),
    "generate": RemoteVerb(
        "generate",
        GenerateSettings,
        "generate text with a model, on a phone",
        'bundle --adapter run --prompt "Once upon a time"',
    ),
    "chat": RemoteVerb(
        "chat", ChatSettings, "chat with a model, on a phone", "bundle --adapter run", reads=True
    ),
    "serve": RemoteVerb(
        "serve",
        ServeSettings,
        "start a server on a phone, or reconnect to one",
        "bundle --open",
        ServeFlags,
        reconnect,
    ),
    "join": RemoteVerb(
        "fleet join",
        JoinSettings,
        "let a phone join a fleet",
        "--server 192.168.1.10:9092 --keys phone --bundle bundle --train rows.jsonl",
        JoinFlags,
    ),
}


def _remote(name: str) -> Action:
    return Action(REMOTE[name].help, REMOTE[name].main)


ACTIONS = {
    "bundle": Action("build the runtime of a phone, for arm64 or amd64", _bundle),
    "doctor": Action("check whether a phone can train", _on_phone("doctor", AndroidDoctorSettings, _doctor)),
    "push": Action(
        "copy a runtime, bundles or rows to a phone", _on_phone("push", PushSettings, _push, "paths")
    ),
    "run": _remote("run"),
    "status": Action(
        "print the status of runs", _on_phone("status", AndroidStatusSettings, _status, "names")
    ),
    "logs": Action("print the log of a run", _on_phone("logs", LogsSettings, _logs, "name")),
    "eval": _remote("eval"),
    "generate": _remote("generate"),
    "chat": _remote("chat"),
    "serve": _remote("serve"),
    "bench": Action("benchmark a phone", _on_phone("bench", BenchSettings, bench, "only")),
    "fleet": Action("`fleet join`: let a phone join a fleet", _fleet),
    "pull": Action("copy a run folder to this computer", _on_phone("pull", PullSettings, _pull, "name")),
    "stop": Action("stop a run, which you can resume later", _on_phone("stop", StopSettings, _stop, "name")),
    "clean": Action(
        "remove runs, rows or everything from a phone", _on_phone("clean", CleanSettings, _clean, "names")
    ),
}
