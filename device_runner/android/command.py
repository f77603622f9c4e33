"""`prge android <verb>`: from a workstation, train on a phone that adb reaches."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from device_runner.android.adb import quote
from device_runner.android.bench import BenchSettings, bench
from device_runner.android.bringing import send_adapter, send_bundle, send_run
from device_runner.android.device import (
    WITH_ROWS,
    DeviceSettings,
    Job,
    Phone,
    check_name,
    files_there,
    rows_there,
    send_settings,
)
from device_runner.android.jobs import waited
from device_runner.android.joining import AndroidJoinSettings, join_words
from device_runner.android.preflight import examine
from device_runner.android.runtime import MANIFEST as RUNTIME_MANIFEST
from device_runner.android.runtime import BundleSettings, build_runtime, open_runtime
from device_runner.android.serving import (
    AndroidServeSettings,
    ServeAgainSettings,
    reached,
    serve_again,
    serve_on,
    ways_to,
)
from device_runner.android.speaking import (
    AndroidChatSettings,
    AndroidGenerateSettings,
    chat_on,
    generate_on,
)
from device_runner.serving.history import FEEDBACK
from device_runner.session.settings import RunSettings
from prge.errors import ConfigError, DeviceError
from prge.files.run_folder import LOG
from prge.files.tuned import tuning_at
from prge.rows.sources import Part
from prge.verbs.kinds import Paths
from prge.verbs.outputs import OutputFolder
from prge.verbs.settings import parse_settings, part_of
from prge.verbs.subverbs import Action, run_action

Settings = TypeVar("Settings", bound=DeviceSettings)
EARLY_SECONDS = 10.0


@dataclass(frozen=True)
class DoctorSettings(DeviceSettings):
    """Check whether a device can train."""

    json: bool = False
    """Print one JSON object instead of text."""


@dataclass(frozen=True)
class PushSettings(DeviceSettings):
    """Bring things to a device ahead of a run, which brings by itself all but the runtime.

    Files that are there already, by their hashes, are not sent again.
    """

    paths: tuple[Path, ...]
    """Runtimes, bundles, folders of `prge tune`, and files of rows."""
    check: bool = False
    """Compare the files there even if the folder was whole when it was sent."""


@dataclass(frozen=True)
class AndroidRunSettings(RunSettings, DeviceSettings):
    """Start a run on a device, detached: it goes on without cable and computer."""

    out: Path
    """Run folder to make there; its name is the run's."""
    data_on_device: bool = False
    """--train and --dev name files that are on the device already."""
    wait: bool = False
    """Wait until the run has ended."""
    again: bool = False
    """Where the device has the run already, go on with it, and wait for it where it still runs."""
    pull: OutputFolder | None = None
    """Wait until the run has ended, and bring its folder here; see `prge android pull`."""
    remove: bool = False
    """Beside --pull: remove the run from the device once it is here."""


@dataclass(frozen=True)
class ResumeSettings(DeviceSettings):
    """Go on with a run that was stopped or killed."""

    resume: str = ""
    """Name of the run."""
    wait: bool = False
    """Wait until the run has ended."""


@dataclass(frozen=True)
class StatusSettings(DeviceSettings):
    """Tell how runs stand."""

    names: tuple[str, ...] = ()
    """Runs; default: all."""
    json: bool = False
    """Print a JSON list instead of text."""
    wait: bool = False
    """Wait until they have ended."""


@dataclass(frozen=True)
class NamedSettings(DeviceSettings):
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
class CleanSettings(DeviceSettings):
    """Remove from the device what was brought to it or made there."""

    names: tuple[str, ...] = ()
    """Runs to remove."""
    data: bool = False
    """Remove rows, bundles with their packed weights, and start adapters."""
    all: bool = False
    """Remove everything of prge, runs included."""

    def __post_init__(self) -> None:
        if not (self.names or self.data or self.all):
            raise ConfigError("nothing to remove:", ["name runs, or give --data or --all"])


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


def _run(argv: list[str]) -> int:
    if any(word.partition("=")[0] == "--resume" for word in argv):
        resumed = parse_settings(ResumeSettings, argv, "prge android run")
        phone, name = resumed.phone(), resumed.resume
        return _told(phone, _gone_on(phone, name, resumed.wait))
    settings = parse_settings(AndroidRunSettings, argv, "prge android run")
    phone, name = settings.phone(), settings.out.name
    phone.need_this_driver()
    job, waits = phone.job(name), settings.wait or settings.pull is not None
    is_there = job.state == "running" or phone.exists(phone.path("runs", name, "journal.jsonl"), "s")
    if not is_there:
        job = _begun(phone, name, settings, waits)
    elif not settings.again:
        raise DeviceError(
            f"{phone.adb.serial} has a run {name} already",
            remedy=f"go on with it: prge android run --resume {name}; or give another name with --out",
        )
    else:
        if waits:
            job = waited(phone, name)
        if job.state != "running" and not job.is_done:
            job = _gone_on(phone, name, waits)
    code = _told(phone, job)
    if settings.pull is not None and job.is_done:
        phone.pull_run(name, settings.pull)
        if settings.remove:
            phone.remove(phone.path("runs", name), phone.path("jobs", name))
    return code


def _begun(phone: Phone, name: str, settings: AndroidRunSettings, wait: bool) -> Job:
    """A run that was not there, with what it needs brought first."""
    there = _brought(phone, settings)
    return _started(phone, name, ["run", *send_settings(phone, vars(there), phone.path("jobs", name))], wait)


def _gone_on(phone: Phone, name: str, wait: bool) -> Job:
    """A run that was stopped or killed."""
    check_name(name)
    if phone.job(name).port is not None:
        raise DeviceError(f"{name} is a server", remedy=f"prge android serve --resume {name}")
    if phone.exists(phone.path("runs", name, "config.yaml"), "f"):
        return _started(phone, name, ["run", "--resume", phone.path("runs", name)], wait)
    # Killed before its first record: begin it as it was begun.
    job_settings = phone.path("jobs", name, "settings.yaml")
    if not phone.exists(job_settings, "f"):
        raise DeviceError(f"{phone.adb.serial} has no run {name} to go on with")
    return _started(phone, name, ["run", "--config", job_settings], wait)


def _status(phone: Phone, settings: StatusSettings) -> int:
    jobs = [
        waited(phone, name, tells=not settings.json) if settings.wait else phone.job(name)
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


def _join(phone: Phone, settings: AndroidJoinSettings) -> int:
    words = join_words(phone, settings, send_bundle(phone, settings.bundle))
    return _told(phone, _started(phone, settings.name, words, False))


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
        raise DeviceError(f"{running[0]} is running", remedy=f"prge android stop {running[0]}")
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


def _serve(argv: list[str]) -> int:
    if "--resume" in argv:
        again = parse_settings(ServeAgainSettings, argv, "prge android serve", ["name"])
        serve_again(again.phone(), again)
    else:
        settings = parse_settings(AndroidServeSettings, argv, "prge android serve", ["bundle"])
        serve_on(settings.phone(), settings)
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
    join = _on_phone("fleet join", AndroidJoinSettings, _join)
    actions = {"join": Action("let a phone take part in a fleet, detached", join)}
    return run_action(argv, actions, "prge android fleet", "A phone as a fleet's device.")


ACTIONS = {
    "bundle": Action("build the folder that a phone needs, for arm64 or amd64", _bundle),
    "doctor": Action("check whether a phone can train", _on_phone("doctor", DoctorSettings, _doctor)),
    "push": Action(
        "bring the runtime, bundles or rows to a phone", _on_phone("push", PushSettings, _push, "paths")
    ),
    "run": Action("start a run on a phone, or go on with one", _run),
    "status": Action("tell how runs stand", _on_phone("status", StatusSettings, _status, "names")),
    "logs": Action("print a run's log", _on_phone("logs", LogsSettings, _logs, "name")),
    "generate": Action(
        "write what a run's model answers to prompts, on the phone",
        _on_phone("generate", AndroidGenerateSettings, generate_on, "names"),
    ),
    "chat": Action(
        "talk to a run's model, on the phone", _on_phone("chat", AndroidChatSettings, chat_on, "names")
    ),
    "serve": Action("start a server on a phone that this computer reaches, or go on with one", _serve),
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


def _brought(phone: Phone, settings: AndroidRunSettings) -> RunSettings:
    """Bring what a run needs, and return its settings as they are on the device."""
    plain = part_of(RunSettings, settings)
    named: dict[Part, Paths | None] = {"train": plain.train, "dev": plain.dev}
    changes: dict[str, Any] = {
        name: rows_there(phone, path, name, settings.data_on_device)
        for name, path in named.items()
        if path is not None
    }
    sent = files_there(phone, plain, "sample_prompts", "heads_of", "task")
    changes |= {name: path if name == "task" else Path(path) for name, path in sent.items()}
    changes["bundle"] = Path(send_bundle(phone, plain.bundle))
    changes["out"] = Path(phone.path("runs", plain.out.name))
    if plain.adapter:
        changes["adapter"] = Path(send_adapter(phone, plain.adapter))
    return replace(plain, **changes)


def _started(phone: Phone, name: str, words: list[str], wait: bool) -> Job:
    job = phone.start(name, ["-m", "prge.cli", *words])
    if wait:
        job = waited(phone, name)
    deadline = time.monotonic() + EARLY_SECONDS
    # Bad input ends a run before it has a summary: say so at once, if it is quick.
    while job.state == "running" and not job.summary and time.monotonic() < deadline:
        time.sleep(0.2)
        job = phone.job(name)
    return job


def _told(phone: Phone, job: Job) -> int:
    """Say how a run stands; 0 if it goes on or has ended well, else its exit code, with its last words."""
    print(job.text())
    if job.state == "running" or job.code == 0:
        return 0
    console = quote([phone.path("jobs", job.name, "console.txt")])
    print(phone.adb.shell(f"tail -n 15 {console}").output, end="", file=sys.stderr)
    return job.code or 1


def _known(phone: Phone, name: str) -> None:
    if phone.job(name).state == "absent" and not phone.exists(phone.path("runs", name), "d"):
        raise phone.no_run(name)
