"""prge's folder on a phone: what lies there, bringing files there, starting and watching a run.

    runtime/            what `prge android bundle` built        jobs/NAME/   how a run was started and ended
    bundles/, adapters/ exported bundles, start adapters        runs/NAME/   its run folder
    data/               rows and tasks                          cache/, tmp/ of Python and the engine
    bench/              what `prge android bench` measured

A folder's hash lies beside it as FOLDER.tree, written last: what was cut off in between is sent again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device_runner.android.adb import Adb, quote
from device_runner.android.packages import digest
from device_runner.android.runtime import MANIFEST, driver_hash, files_of
from device_runner.serving.history import FEEDBACK, HISTORY, ROUNDS
from prge.errors import INTERRUPTED, DeviceError
from prge.files.bundle import file_sha256
from prge.files.documents import parse_json
from prge.files.run_folder import ENDED, JOURNAL, LOCK, LOG

FOLDER = "/data/local/tmp/prge"
OWN = "runtime runtime.tree bundles adapters data jobs runs fleets bench cache tmp".split()
START_SECONDS = 60.0
RESTARTS = 5
HASH_SECONDS = 600.0
PULLS = 5
GROWING = ("journal.jsonl", "metrics.jsonl", "log.txt", "run.json", HISTORY, FEEDBACK)
# Files that stay on the device unless they are asked for, and those by whose first line copies are known.
WITH_ROWS = (LOG, FEEDBACK)
BEGUN = (JOURNAL, HISTORY, FEEDBACK)
_PART = "prge-part "
_WORDS = 200
_RESERVE = 16 << 20


@dataclass(frozen=True)
class Job:
    """How a run on the device stands: `state` is absent, running, ended or killed."""

    name: str
    state: str
    process: int | None = None
    code: int | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)
    port: int | None = None
    """Of the device's loopback, where it is a server."""
    restarts: int = 0
    """Of a server that was killed."""

    @property
    def is_done(self) -> bool:
        """Whether the run has ended and can't go on."""
        return self.state != "running" and self.summary.get("run", {}).get("status") in ENDED

    def text(self) -> str:
        """One line for a person."""
        facts = [f"{self.name}: {self.state}"]
        if self.code:
            facts[0] += f" with code {self.code}"
        settings = self.summary.get("run", {}).get("settings", {})
        if "step" in self.last:
            facts.append(f"step {self.last['step']} of {settings.get('steps', '?')}")
        if isinstance(self.last.get("loss"), float):
            facts.append(f"loss {self.last['loss']:.4g}")
        if isinstance(self.last.get("seconds"), float):
            facts.append(f"{self.last['seconds']:.0f} s")
        if self.state == "ended" and "run" in self.summary:
            facts.append(str(self.summary["run"].get("status")))
        if self.restarts:
            facts.append(f"restarts {self.restarts}")
        return ", ".join(facts)


class Phone:
    """A device and prge's folder on it."""

    def __init__(self, adb: Adb, folder: str = FOLDER) -> None:
        self.adb = adb
        self.folder = folder.rstrip("/")
        # The loader splits its library path at colons and semicolons, and replaces dollar signs.
        if not folder.startswith("/") or not _is_plain(folder) or set(folder) & set(":;$"):
            raise DeviceError(
                f"--folder is {folder!r}",
                remedy="give an absolute path on the device, without : ; or $",
                code="device-folder-unusable",
            )

    def path(self, *parts: str) -> str:
        """A path in prge's folder."""
        return "/".join((self.folder, *parts))

    def exists(self, path: str, test: str = "e") -> bool:
        """Whether a path is there; `test` is a letter of the shell's test, such as f, d or r."""
        return self.adb.shell(f"[ -{test} {quote([path])} ]").code == 0

    def free_bytes(self) -> int | None:
        """Free storage where prge's folder is or will be; None if the device doesn't tell."""
        script = f'd={quote([self.folder])}; while [ ! -d "$d" ]; do d=${{d%/*}}; done; df -k "${{d:-/}}"'
        lines = self.adb.shell(script).output.strip().splitlines()
        words = lines[-1].split() if lines else []
        # The device's name may hold spaces, and the mount point too: count from the percentage.
        for index, word in enumerate(words):
            if word.endswith("%") and index and words[index - 1].isdigit():
                return int(words[index - 1]) * 1024
        return None

    def make(self, path: str) -> None:
        """Make a folder within prge's; nobody else looks into it, whatever modes adb leaves."""
        top = self.path(path[len(self.folder) + 1 :].partition("/")[0])
        self.adb.check(f"mkdir -p {quote([path])} && chmod 700 {quote([top])}", f"making {path}")

    def send_folder(
        self,
        local: Path,
        remote: str,
        *,
        names: Iterable[str] | None = None,
        check: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> int:
        """Make a folder of the device equal to a local one, and return how many files were sent.

        Args:
            local: folder here.
            remote: folder there; files that it has besides are removed.
            names: of the files in `local` to send; by default all.
            check: compare the files' hashes even if the folder was whole when it was sent last.
            before: called before anything there is changed.

        Raises:
            DeviceError: the device was lost, is full, or kept something else than was sent.
        """
        if names is None:
            here = {str(path.relative_to(local)): path for path in files_of(local)}
        else:
            here = {name: local / name for name in names}
        _check_names(here)
        wanted = {name: file_sha256(path) for name, path in here.items()}
        mark, tree = f"{remote}.tree", digest(json.dumps(wanted, sort_keys=True))
        if not check:
            told = self.adb.shell(f"[ -d {quote([remote])} ] && cat {quote([mark])}")
            if told.code == 0 and told.output.strip() == tree:
                return 0
        before()
        folder, mark_word = quote([remote]), quote([mark])
        self.adb.check(f"rm -f {mark_word}", f"unmarking {remote}")
        self.make(remote)
        there = self._hashes(remote)
        extra = sorted(set(there) - set(wanted))
        for start in range(0, len(extra), _WORDS):
            names = quote([f"./{name}" for name in extra[start : start + _WORDS]])
            self.adb.check(f"cd {folder} && rm -f {names}", f"removing old files of {remote}")
        lacking = [name for name, hash_ in wanted.items() if there.get(name) != hash_]
        if lacking:
            self._need_room(sum(here[name].stat().st_size for name in lacking), remote)
            with tempfile.TemporaryDirectory(prefix="prge-push-") as staging:
                for name in lacking:
                    _stage(here[name], Path(staging) / name)
                self.adb.push(Path(staging), remote)
            arrived = self._hashes(remote)
            if arrived != wanted:
                wrong = sorted(name for name in wanted | arrived if wanted.get(name) != arrived.get(name))
                raise DeviceError(
                    f"{remote} is not what was sent: {wrong[0]} differs",
                    remedy="send it again",
                    code="copy-differs",
                )
        self.adb.check(f"echo {tree} > {mark_word}", f"marking {remote}")
        return len(lacking)

    def send_file(self, local: Path) -> str:
        """Bring one file to data/, under a name with its hash; returns its path there."""
        if not local.is_file():
            raise DeviceError(
                f"there is no file {local}", remedy="give a file of this computer", code="file-missing"
            )
        _check_names([local.name])
        hash_ = file_sha256(local)
        remote = self.path("data", f"{hash_[:12]}-{local.name}")
        if self._file_hash(remote) != hash_:
            self.make(self.path("data"))
            self.copy_file(local, remote)
        return remote

    def copy_file(self, local: Path, remote: str) -> None:
        """Copy a file to a path whose folder is there; raises DeviceError as `send_folder`."""
        self._need_room(local.stat().st_size, remote)
        self.adb.push(local, f"{remote}.new")
        if self._file_hash(f"{remote}.new") != file_sha256(local):
            raise DeviceError(f"{remote} is not what was sent", remedy="send it again", code="copy-differs")
        self.adb.check(f"mv {quote([f'{remote}.new', remote])}", f"renaming {remote}")

    def read_file(self, remote: str) -> bytes | None:
        """What a file of the device holds; None where there is none. Raises DeviceError."""
        if not self.exists(remote, "f"):
            return None
        with tempfile.TemporaryDirectory(prefix="prge-pull-") as folder:
            local = Path(folder, "file")
            self.adb.pull(remote, local)
            if file_sha256(local) != self._file_hash(remote):
                raise DeviceError(
                    f"{remote} did not come as it is on the device", remedy="try again", code="copy-differs"
                )
            return local.read_bytes()

    def write(self, text: str, remote: str) -> None:
        """Write a text to a file that is adb's user's alone, by no words that others can read."""
        new = quote([f"{remote}.new"])
        self.adb.check(
            f"rm -f {new}\ncat >{new} && mv {new} {quote([remote])}", f"writing {remote}", said=text
        )

    def send_runtime(self, local: Path, *, check: bool = False) -> int:
        """Bring a runtime folder; see `send_folder`."""
        remote = self.path("runtime")
        sent = self.send_folder(local, remote, check=check, before=self._need_no_run)
        if sent:
            self.remove(self.path("cache"))
        # adb keeps no modes; started through the loader, only that must be executable.
        self.adb.check(f"chmod 755 {quote([f'{remote}/lib/ld.so'])}", "making the loader executable")
        return sent

    def _need_no_run(self) -> None:
        for name in self.jobs():
            if self.job(name).state == "running":
                raise DeviceError(
                    f"{name} is running with the runtime that this would replace",
                    remedy=f"wait for it, or end it with `prge android stop {name}`",
                    code="job-running",
                )

    def python(self, code: str, seconds: float = 120.0) -> str:
        """Run Python code in the runtime and return what it prints; raises DeviceError."""
        words = quote(["sh", self.path("runtime", "run.sh"), "-c", code])
        return self.adb.check(words, "starting Python on the device", seconds)

    def attach(self, words: Iterable[str], reads: bool) -> int:
        """Run Python of the runtime with these words at this terminal; its exit code.

        Args:
            words: for Python.
            reads: whether it reads this process's standard input.
        """
        return self.adb.attach(quote(["sh", self.path("runtime", "run.sh"), *words]), reads)

    def need_runtime(self) -> None:
        """Raises DeviceError unless a whole runtime is there."""
        if not self.exists(self.path("runtime.tree"), "f"):
            raise DeviceError(
                f"{self.adb.serial} has no runtime in {self.folder}",
                remedy="prge android bundle runtime, then prge android push runtime",
                code="runtime-missing",
            )

    def need_this_driver(self) -> None:
        """Raises DeviceError unless the runtime there has the driver that is installed here."""
        self.need_runtime()
        manifest = _json(
            self.adb.check(f"cat {quote([self.path('runtime', MANIFEST)])}", "reading the runtime")
        )
        if manifest.get("driver") != driver_hash():
            raise DeviceError(
                f"the runtime on {self.adb.serial} has the driver of another prge",
                remedy="build it again and push it: prge android bundle runtime, prge android push runtime",
                code="runtime-of-other-version",
            )

    def start(self, name: str, words: Iterable[str], port: int | None = None) -> Job:
        """Start Python of the runtime with these words, detached from adb, and return once it runs.

        Args:
            name: of the run.
            words: for Python.
            port: of a server, which is started again if it is killed.

        Raises:
            DeviceError: a run of that name goes on, or this one does not start.
        """
        self.need_runtime()
        check_name(name)
        before = self.job(name)
        if before.state == "running":
            raise DeviceError(
                f"{name} is running on {self.adb.serial}, process {before.process}",
                remedy=f"end it with `prge android stop {name}`, or wait for it",
                code="job-running",
            )
        job = self.path("jobs", name)
        command = quote(["sh", self.path("runtime", "job.sh"), job, *words])
        console = quote([f"{job}/console.txt"])
        # A session of its own where there is a command for it: what ends adb's shell must not end the run.
        self.make(job)
        self.make(self.path("runs"))
        old = quote([f"{job}/{file}" for file in ("pid", "rc", "stop", "port", "restarts")])
        served = "" if port is None else f"echo {port} >{quote([f'{job}/port'])}\n"
        keeps = "" if port is None else f"export PRGE_RESTARTS={RESTARTS}\n"
        self.adb.check(
            f"rm -f {old}\n{served}{keeps}"
            "session=setsid; command -v setsid >/dev/null 2>&1 || session=\n"
            f"nohup $session {command} >>{console} 2>&1 </dev/null &",
            f"starting {name}",
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            now = self.job(name)
            if now.state != "absent":
                return now
            time.sleep(0.2)
        raise DeviceError(
            f"{name} did not start within {START_SECONDS:.0f} seconds",
            remedy=f"prge android logs {name} --console",
            code="job-not-started",
        )

    def job(self, name: str) -> Job:
        """How a run stands."""
        check_name(name)
        for _ in range(10):
            job = self._job(name)
            if job.state != "killed" or job.code is not None:
                break
            # Its process has just gone, and the one that waited for it may be about to write its code.
            time.sleep(0.1)
        return job

    def _job(self, name: str) -> Job:
        job, run = self.path("jobs", name), self.path("runs", name)
        parts = self._parts(
            {
                "pid": f"cat {quote([f'{job}/pid'])}",
                "rc": f"cat {quote([f'{job}/rc'])}",
                "then": f"cat {quote([f'{job}/stat'])}",
                "now": f"p=$(cat {quote([f'{job}/pid'])}) && cat /proc/$p/stat",
                "boot": f"cat {quote([f'{job}/boot'])}",
                "booted": "cat /proc/sys/kernel/random/boot_id",
                "summary": f"cat {quote([f'{run}/run.json'])}",
                "last": f"tail -n 1 {quote([f'{run}/metrics.jsonl'])}",
                "port": f"cat {quote([f'{job}/port'])}",
                "restarts": f"cat {quote([f'{job}/restarts'])}",
            }
        )
        process, code, port, restarts = (
            int(parts[part]) if parts[part].isdigit() else None for part in ("pid", "rc", "port", "restarts")
        )
        if process is None and code is None:
            state = "absent"
        elif code is not None:
            # The shell tells a signal as 128 and its number; the driver ends so by itself on an interrupt.
            state = "ended" if code < 128 or code == INTERRUPTED else "killed"
        else:
            alive = _began(parts["now"]) is not None and _began(parts["now"]) == _began(parts["then"])
            state = "running" if alive and parts["boot"] == parts["booted"] else "killed"
        told = _json(parts["summary"]), _json(parts["last"])
        return Job(name, state, process, code, *told, port, restarts or 0)

    def no_run(self, name: str) -> DeviceError:
        """The error of a run that isn't there."""
        return DeviceError(
            f"{self.adb.serial} has no run {name!r}; it has: {', '.join(self.jobs()) or 'none'}",
            code="run-missing-on-device",
        )

    def jobs(self) -> list[str]:
        """Names of all runs that were started here."""
        told = self.adb.shell(f'cd {quote([self.path("jobs")])} && for n in *; do echo "$n"; done')
        return [] if told.code else [name for name in told.output.splitlines() if name and name != "*"]

    def stop(self, name: str, now: bool, seconds: float) -> Job:
        """End a run after its step, or at once; raises DeviceError if it doesn't end in time."""
        deadline, ended = time.monotonic() + seconds, None
        # Who would start it again is told first.
        mark = quote([self.path("jobs", name, "stop")])
        while (job := self.job(name)).state == "running":
            if job.process != ended:
                ended = job.process
                self.adb.shell(f": >{mark}; kill -{'KILL' if now else 'TERM'} {ended}")
            if time.monotonic() >= deadline:
                raise DeviceError(
                    f"{name} still runs after {seconds:.0f} seconds",
                    remedy="end it at once with --now",
                    code="job-not-ended",
                )
            time.sleep(0.2)
        return job

    def pull_run(self, name: str, out: Path, but: Collection[str] = WITH_ROWS) -> list[str]:
        """Bring the folder of a run or a server here, all of it or nothing; returns the names of its files.

        Args:
            name: of the run.
            out: folder to make, or an older copy of it.
            but: files that stay; by default those that show rows.

        Raises:
            DeviceError: there is no such run, `out` is there and is not an older copy of it, or the device
                was lost.
        """
        check_name(name)
        remote = self.path("runs", name)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".pull-") as staging:
            for attempt in range(PULLS):
                made = Path(staging) / str(attempt)
                made.mkdir(mode=0o700)
                try:
                    self._pull_once(remote, made, but)
                    break
                except DeviceError:
                    # A run goes on writing, and removes old checkpoints: look again.
                    if attempt + 1 == PULLS or self.job(name).state != "running":
                        raise
            _replace(made, out)
        return sorted(str(path.relative_to(out)) for path in files_of(out))

    def _pull_once(self, remote: str, made: Path, but: Collection[str]) -> None:
        there = self._hashes(remote) if self.exists(remote, "d") else {}
        wanted = [file for file in there if file not in (LOCK, *but)]
        if not set(wanted) & set(BEGUN):
            raise DeviceError(
                f"{remote} holds no run yet", remedy="prge android logs NAME --console", code="run-not-begun"
            )
        for top in sorted({file.partition("/")[0] for file in wanted}):
            self.adb.pull(f"{remote}/{top}", made / top)
        _compare(made, there)

    def remove(self, *paths: str) -> None:
        """Remove files and folders of prge's folder."""
        self.adb.check(f"rm -rf {quote(paths)}", "removing", HASH_SECONDS)

    def remove_all(self) -> None:
        """Remove what prge made, and its folder if nothing else is in it."""
        self.remove(*(self.path(name) for name in OWN))
        self.adb.shell(f"rmdir {quote([self.folder])}")

    def _need_room(self, size: int, remote: str) -> None:
        free = self.free_bytes()
        if free is not None and free < size + _RESERVE:
            raise DeviceError(
                f"{remote} needs {size >> 20} MiB, and {self.adb.serial} has {free >> 20} MiB free "
                f"({_RESERVE >> 20} MiB stay free)",
                remedy="free some storage on the phone; `prge android clean` removes what prge brought",
                code="storage-full",
            )

    def _hashes(self, remote: str) -> dict[str, str]:
        script = f"cd {quote([remote])} && find . -type f -exec sha256sum {{}} +"
        told = self.adb.check(script, f"reading {remote}", HASH_SECONDS)
        rows = [line.split(maxsplit=1) for line in told.splitlines()]
        return {row[1].removeprefix("*").removeprefix("./"): row[0] for row in rows if len(row) == 2}

    def _file_hash(self, remote: str) -> str:
        told = self.adb.shell(f"sha256sum < {quote([remote])}", HASH_SECONDS)
        return "" if told.code else told.output.split()[0]

    def _parts(self, scripts: Mapping[str, str]) -> dict[str, str]:
        """Outputs of several commands by name, from one call; empty where a command fails."""
        lines = [
            f"echo; echo {quote([_PART + name])}; {{ {text}; }} 2>/dev/null" for name, text in scripts.items()
        ]
        told = self.adb.shell("\n".join(lines)).output
        parts = dict.fromkeys(scripts, "")
        for part in told.split(f"\n{_PART}")[1:]:
            name, _, content = part.partition("\n")
            parts[name] = content.strip()
        return parts


@dataclass(frozen=True, kw_only=True)
class PhoneFlags:
    """Which device, and where on it."""

    serial: str | None = None
    """The device, as `adb devices` lists it; default: the only one, or ANDROID_SERIAL."""
    folder: str = FOLDER
    """prge's folder on the device."""

    def path(self, *parts: str) -> str:
        """A path in prge's folder on the device."""
        return "/".join((self.folder.rstrip("/"), *parts))

    def phone(self) -> Phone:
        """The device, connected."""
        return Phone(Adb(self.serial), self.folder)


def is_name(name: str) -> bool:
    """Whether a run can have that name."""
    return bool(name) and not name.startswith((".", "-")) and "/" not in name and _is_plain(name)


def check_name(name: str) -> None:
    """Raises DeviceError unless a run can have that name."""
    if not is_name(name):
        raise DeviceError(
            f"{name!r} can't be the name of a run",
            remedy="give one word of letters and digits",
            code="name-unusable",
        )


def _is_plain(text: str) -> bool:
    return text.isprintable() and "\\" not in text


def _check_names(names: Iterable[str]) -> None:
    bad = [name for name in names if not _is_plain(name)]
    if bad:
        raise DeviceError(
            f"{bad[0]!r} can't be the name of a file there", remedy="rename it", code="name-unusable"
        )


def _stage(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def _began(stat: str) -> str | None:
    """When a process began, from its line in /proc; None for a line that is none, and for a dead process."""
    words = stat.rpartition(")")[2].split()
    return None if len(words) < 20 or words[0] in "ZX" else words[19]


def _json(text: str) -> dict[str, Any]:
    try:
        content = parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _compare(made: Path, there: Mapping[str, str]) -> None:
    """Whether what came is what the device had; files that grow may have grown meanwhile."""
    for path in files_of(made):
        name = str(path.relative_to(made))
        if not _grows(name) and there.get(name) != file_sha256(path):
            raise DeviceError(f"{name} is not what the device has", remedy="pull again", code="copy-differs")


def _grows(name: str) -> bool:
    """Whether a file of a run's folder may be longer now; a round of a server's has a journal of its own."""
    return name in GROWING or (name.startswith(f"{ROUNDS}/") and name.endswith(f"/{JOURNAL}"))


def _replace(made: Path, out: Path) -> None:
    """Put a pulled run in place of an older copy of the same run."""
    if out.exists():
        try:
            name = next(name for name in BEGUN if (made / name).is_file())
            same = _first_line(out / name) == _first_line(made / name)
        except OSError:
            same = False
        if not same:
            raise DeviceError(
                f"{out} is there already, and is not this run",
                remedy="give another folder with --out",
                code="folder-exists",
            )
        out.rename(made.with_name("older"))
    made.rename(out)


def _first_line(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.readline()
