"""`prge android <verb>`: from a workstation, train on a phone that adb reaches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from device_runner.android.adb import quote
from device_runner.android.bench import BenchSettings, bench
from device_runner.android.bringing import send_bundle, send_run
from device_runner.android.device import WITH_ROWS, Phone, PhoneFlags
from device_runner.android.jobs import JobFlags, resume, wait_for
from device_runner.android.joining import JoinFlags
from device_runner.android.preflight import examine
from device_runner.android.remote import RemoteVerb
from device_runner.android.runtime import MANIFEST as RUNTIME_MANIFEST
from device_runner.android.runtime import BundleSettings, build_runtime, open_runtime
from device_runner.android.serving import ServeFlags, reach, reached, ways_to
from device_runner.fleet.joining import JoinSettings
from device_runner.serving.flags import ServeSettings
from device_runner.serving.history import FEEDBACK
from device_runner.session.settings import EvaluateSettings, RunSettings
from device_runner.session.speaking import ChatSettings, GenerateSettings
from prge.errors import ConfigError, DeviceError
from prge.files.run_folder import LOG
from prge.files.tuned import tuning_at
from prge.verbs.inputs import InputPath
from prge.verbs.outputs import OutputFolder
from prge.verbs.settings import parse_settings
from prge.verbs.subverbs import Action, run_action

Settings = TypeVar("Settings", bound=PhoneFlags)


@dataclass(frozen=True)
class DoctorSettings(PhoneFlags):
    """Check whether a device can train."""

    json: bool = False
    """Print one JSON object instead of text."""


@dataclass(frozen=True)
class PushSettings(PhoneFlags):
    """Bring things to a device ahead of a run, which brings by itself all but the runtime.

    Files that are there already, by their hashes, are not sent again.
    """

    paths: tuple[InputPath, ...]
    """Runtimes, bundles, folders of `prge tune`, and files of rows."""
    check: bool = False
    """Compare the files there even if the folder was whole when it was sent."""


@dataclass(frozen=True)
class StatusSettings(PhoneFlags):
    """Tell how runs stand."""

    names: tuple[str, ...] = ()
    """Runs; default: all."""
    json: bool = False
    """Print a JSON list instead of text."""
    wait: bool = False
    """Wait until they have ended."""


@dataclass(frozen=True)
class NamedSettings(PhoneFlags):
    """Which run."""

    name: str
    """The run."""


@dataclass(frozen=True)
class LogsSettings(NamedSettings):
    """Print a run's log. It shows a training row."""

    lines: int = 40
    """Lines from its end."""
    console: bool = False
    """What the process printed, instead of log.txt."""


@dataclass(frozen=True)
class PullSettings(NamedSettings):
    """Bring a run folder here: adapter, checkpoints, journal, figures."""

    out: OutputFolder | None = None
    """Folder to make, or an older copy of the run to replace; default: the run's name."""
    log: bool = False
    """Bring log.txt too, which shows a training row."""
    rows: bool = False
    """Bring feedback.jsonl of a server too: what users asked and answered."""


@dataclass(frozen=True)
class StopSettings(NamedSettings):
    """End a run after its step; it can be resumed."""

    now: bool = False
    """Kill it at once; it can be resumed then too."""
    seconds: float = 120.0
    """How long to wait for it."""


@dataclass(frozen=True)
class CleanSettings(PhoneFlags):
    """Remove from the device what was brought to it or made there."""

    names: tuple[str, ...] = ()
    """Runs to remove."""
    data: bool = False
    """Remove rows, bundles with their packed weights, and start adapters."""
    all: bool = False
    """Remove everything of prge, runs included."""

    def __post_init__(self) -> None:
        if not (self.names or self.data or self.all):
            raise ConfigError(
                "nothing to remove:", ["name runs, or give --data or --all"], code="settings-unusable"
            )


def main(argv: Sequence[str]) -> int:
    """Run one verb; see `prge android --help`."""
    return run_action(argv, ACTIONS, "prge android", "Train on a phone that adb reaches.")


def _bundle(argv: list[str]) -> int:
    settings = parse_settings(BundleSettings, argv, "prge android bundle", ["out"])
    runtime = build_runtime(settings)
    print(f"{runtime.folder}: {runtime.machine}, {runtime.megabytes:.1f} MB, tree {runtime.tree}")
    return 0


def _doctor(phone: Phone, settings: DoctorSettings) -> int:
    checks = []
    for check in examine(phone):
        checks.append(check)
        if not settings.json:
            print(f"{check.state:<8} {check.name:<12} {check.found}", flush=True)
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
            if tuning := tuning_at(item):
                print(f"{tuning.adapter} -> {send_run(phone, tuning, remote)}")
        else:
            print(f"{item} -> {phone.send_file(item)}")
    return 0


def _status(phone: Phone, settings: StatusSettings) -> int:
    jobs = [
        wait_for(phone, name, prints=not settings.json) if settings.wait else phone.job(name)
        for name in settings.names or phone.jobs()
    ]
    if settings.json:
        print(json.dumps([asdict(job) for job in jobs], indent=2))
    else:
        lines = [", ".join(filter(None, [job.text(), reached(phone, job)])) for job in jobs]
        print("\n".join(lines) or "no runs")
    return 0


def _logs(phone: Phone, settings: LogsSettings) -> int:
    _known(phone, settings.name)
    is_console = settings.console or phone.job(settings.name).port is not None
    file = ("jobs", settings.name, "console.txt") if is_console else ("runs", settings.name, LOG)
    words = quote([phone.path(*file)])
    print(phone.adb.check(f"tail -n {settings.lines} {words}", f"reading {file[-1]}"), end="")
    return 0


def _pull(phone: Phone, settings: PullSettings) -> int:
    _known(phone, settings.name)
    out = settings.out or Path(settings.name)
    asked = {LOG: settings.log, FEEDBACK: settings.rows}
    phone.pull_run(settings.name, out, [file for file in WITH_ROWS if not asked[file]])
    print(out / "final" if (out / "final").is_dir() else out)
    return 0


def _stop(phone: Phone, settings: StopSettings) -> int:
    _known(phone, settings.name)
    job = phone.stop(settings.name, settings.now, settings.seconds)
    for here in ways_to(phone, job):
        phone.adb.unforward(here)
    print(job.text())
    return 0


def _clean(phone: Phone, settings: CleanSettings) -> int:
    names = settings.names if not (settings.all or settings.data) else phone.jobs()
    running = [name for name in names if phone.job(name).state == "running"]
    if running:
        raise DeviceError(
            f"{running[0]} is running", remedy=f"prge android stop {running[0]}", code="job-running"
        )
    if settings.all:
        phone.remove_all()
        return 0
    for name in settings.names:
        _known(phone, name)
        phone.remove(phone.path("runs", name), phone.path("jobs", name))
    if settings.data:
        phone.remove(
            *(phone.path(name) for name in ("data", "bundles", "adapters", "bench", "tmp", "cache/prge"))
        )
    return 0


def _on_phone(
    verb: str, settings_type: type[Settings], act: Callable[[Phone, Settings], int], *positional: str
) -> Callable[[list[str]], int]:
    """A verb that reads its settings, connects to the phone, and acts there."""

    def run(argv: list[str]) -> int:
        settings = parse_settings(settings_type, argv, f"prge android {verb}", positional)
        return act(settings.phone(), settings)

    return run


def _fleet(argv: list[str]) -> int:
    return run_action(argv, {"join": _remote("join")}, "prge android fleet", "A phone as a fleet's device.")


def _known(phone: Phone, name: str) -> None:
    if phone.job(name).state == "absent" and not phone.exists(phone.path("runs", name), "d"):
        raise phone.no_run(name)


REMOTE = {
    "run": RemoteVerb("run", RunSettings, "start a run on a phone, or go on with one", JobFlags, resume),
    "eval": RemoteVerb("eval", EvaluateSettings, "score an adapter on rows, on a phone"),
    "generate": RemoteVerb("generate", GenerateSettings, "write what a model answers, on a phone"),
    "chat": RemoteVerb("chat", ChatSettings, "talk to a model, on a phone", reads=True),
    "serve": RemoteVerb(
        "serve", ServeSettings, "start a server on a phone, or go on with one", ServeFlags, reach
    ),
    "join": RemoteVerb("fleet join", JoinSettings, "let a phone take part in a fleet", JoinFlags),
}


def _remote(name: str) -> Action:
    return Action(REMOTE[name].help, REMOTE[name].main)


ACTIONS = {
    "bundle": Action("build the folder that a phone needs, for arm64 or amd64", _bundle),
    "doctor": Action("check whether a phone can train", _on_phone("doctor", DoctorSettings, _doctor)),
    "push": Action(
        "bring the runtime, bundles or rows to a phone", _on_phone("push", PushSettings, _push, "paths")
    ),
    "run": _remote("run"),
    "status": Action("tell how runs stand", _on_phone("status", StatusSettings, _status, "names")),
    "logs": Action("print a run's log", _on_phone("logs", LogsSettings, _logs, "name")),
    "eval": _remote("eval"),
    "generate": _remote("generate"),
    "chat": _remote("chat"),
    "serve": _remote("serve"),
    "bench": Action(
        "measure what others publish, on a phone", _on_phone("bench", BenchSettings, bench, "only")
    ),
    "fleet": Action("`fleet join`: let a phone take part in a fleet", _fleet),
    "pull": Action("bring a run folder here", _on_phone("pull", PullSettings, _pull, "name")),
    "stop": Action("end a run; it can be resumed", _on_phone("stop", StopSettings, _stop, "name")),
    "clean": Action(
        "remove runs, rows or everything from a phone", _on_phone("clean", CleanSettings, _clean, "names")
    ),
}
