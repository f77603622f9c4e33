"""prge's folder on a phone: copying files to and from it, starting and watching jobs.

    runtime/            output of `prge android bundle`         jobs/NAME/   how a job was started and ended
    bundles/, adapters/ exported bundles, initial adapters      runs/NAME/   its run folder
    data/               rows and tasks                          cache/, tmp/ of Python and the engine
    bench/              results of `prge android bench`

The hash of a sent folder is written last, to FOLDER.tree, so that an interrupted copy is sent again.
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
from prge.formats.bundle import file_sha256
from prge.formats.documents import parse_json
from prge.formats.run_folder import ENDED, JOURNAL, LOCK, LOG

FOLDER = "/data/local/tmp/prge"
SUBFOLDERS = "runtime runtime.tree bundles adapters data jobs runs fleets bench cache tmp".split()
START_SECONDS = 60.0
MAX_RESTARTS = 5
HASH_SECONDS = 600.0
MAX_PULLS = 5
GROWING_FILES = ("journal.jsonl", "metrics.jsonl", "log.txt", "run.json", HISTORY, FEEDBACK)
# Files that show rows; they stay on the device unless the user requests them.
FILES_WITH_ROWS = (LOG, FEEDBACK)
# Files whose first line identifies a run, one of which every run that has begun has.
RUN_MARKERS = (JOURNAL, HISTORY, FEEDBACK)
_PART = "prge-part "
_WORDS = 200
_RESERVE = 16 << 20


@dataclass(frozen=True)
class Job:
    """The status of a job on the device; `state` is absent, running, ended or killed."""

    name: str
    state: str
    process: int | None = None
    code: int | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)
    port: int | None = None
    """Port of a server on the device's loopback; None: the job is not a server."""
    restarts: int = 0
    """Number of times that a server was started again after it was killed."""

    @property
    def is_done(self) -> bool:
        """Whether the run has ended and can't be resumed."""
        return self.state != "running" and self.summary.get("run", {}).get("status") in ENDED

    def text(self) -> str:
        """Return the status as one line of text."""
        facts = [f"{self.name}: {self.state}"]
        if self.code:
            facts[0] += f" with code {self.code}"
        settings = self.summary.get("run", {}).get("settings", {})
        if "step" in self.last:
            facts.append(f"step {self.last['step']} of {settings.get('steps', '?')}")
        shown = "reward" if isinstance(self.last.get("reward"), float) else "loss"
        if isinstance(self.last.get(shown), float):
            facts.append(f"{shown} {self.last[shown]:.4g}")
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
                f"--folder is {folder!r}, which can't be used.",
                remedy="Give an absolute path on the device, without : ; or $.",
                code="device-folder-unusable",
            )

    def path(self, *parts: str) -> str:
        """Return a path in prge's folder on the device."""
        return "/".join((self.folder, *parts))

    def exists(self, path: str, test: str = "e") -> bool:
        """Return whether a path exists on the device.

        Args:
            path: the path.
            test: letter of the shell's test, such as f for a file, d for a folder, r for readable.
        """
        return self.adb.shell(f"[ -{test} {quote([path])} ]").code == 0

    def free_bytes(self) -> int | None:
        """Return the free storage where prge's folder is or will be; None if the device doesn't show it."""
        script = f'd={quote([self.folder])}; while [ ! -d "$d" ]; do d=${{d%/*}}; done; df -k "${{d:-/}}"'
        lines = self.adb.shell(script).output.strip().splitlines()
        words = lines[-1].split() if lines else []
        # Names of devices and mount points may hold spaces, so columns are counted from the percentage.
        for index, word in enumerate(words):
            if word.endswith("%") and index and words[index - 1].isdigit():
                return int(words[index - 1]) * 1024
        return None

    def make_folder(self, path: str) -> None:
        """Make a folder within prge's folder that only adb's user can read."""
        # adb may copy files with other modes, so the top folder is closed to other users.
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
        """Make a folder on the device equal to a local one, and return the number of files sent.

        Args:
            local: folder on this computer.
            remote: folder on the device; other files in it are removed.
            names: files in `local` to send; None: all.
            check: compare the hashes of the files even if the folder was complete when it was sent last.
            before: called before anything on the device is changed.

        Raises:
            DeviceError: the device was lost, is full, or stored other content than was sent.
        """
        if names is None:
            sources = {str(path.relative_to(local)): path for path in files_of(local)}
        else:
            sources = {name: local / name for name in names}
        _check_names(sources)
        local_hashes = {name: file_sha256(path) for name, path in sources.items()}
        mark, tree = f"{remote}.tree", digest(json.dumps(local_hashes, sort_keys=True))
        if not check:
            marked = self.adb.shell(f"[ -d {quote([remote])} ] && cat {quote([mark])}")
            if marked.code == 0 and marked.output.strip() == tree:
                return 0
        before()
        folder, mark_word = quote([remote]), quote([mark])
        self.adb.check(f"rm -f {mark_word}", f"unmarking {remote}")
        self.make_folder(remote)
        remote_hashes = self._hashes(remote)
        extra = sorted(set(remote_hashes) - set(local_hashes))
        for start in range(0, len(extra), _WORDS):
            names = quote([f"./{name}" for name in extra[start : start + _WORDS]])
            self.adb.check(f"cd {folder} && rm -f {names}", f"removing old files of {remote}")
        to_send = [name for name, hash_ in local_hashes.items() if remote_hashes.get(name) != hash_]
        if to_send:
            self._check_storage(sum(sources[name].stat().st_size for name in to_send), remote)
            with tempfile.TemporaryDirectory(prefix="prge-push-") as staging:
                for name in to_send:
                    _stage(sources[name], Path(staging) / name)
                self.adb.push(Path(staging), remote)
            remote_hashes = self._hashes(remote)
            if remote_hashes != local_hashes:
                wrong = sorted(
                    name
                    for name in local_hashes | remote_hashes
                    if local_hashes.get(name) != remote_hashes.get(name)
                )
                raise DeviceError(
                    f"{remote} differs from what was sent, in the file {wrong[0]}.",
                    remedy="Send it again.",
                    code="copy-differs",
                )
        self.adb.check(f"echo {tree} > {mark_word}", f"marking {remote}")
        return len(to_send)

    def send_file(self, local: Path) -> str:
        """Copy a file to data/ on the device, under a name with its hash, and return its path there."""
        if not local.is_file():
            raise DeviceError(
                f"There is no file {local}.", remedy="Give a file of this computer.", code="file-missing"
            )
        _check_names([local.name])
        hash_ = file_sha256(local)
        remote = self.path("data", f"{hash_[:12]}-{local.name}")
        if self._file_hash(remote) != hash_:
            self.make_folder(self.path("data"))
            self.copy_file(local, remote)
        return remote

    def copy_file(self, local: Path, remote: str) -> None:
        """Copy a file to an existing folder of the device; raises DeviceError like `send_folder`."""
        self._check_storage(local.stat().st_size, remote)
        self.adb.push(local, f"{remote}.new")
        if self._file_hash(f"{remote}.new") != file_sha256(local):
            raise DeviceError(
                f"{remote} differs from what was sent.", remedy="Send it again.", code="copy-differs"
            )
        self.adb.check(f"mv {quote([f'{remote}.new', remote])}", f"renaming {remote}")

    def read_file(self, remote: str) -> bytes | None:
        """Return the content of a file on the device; None if there is no such file. Raises DeviceError."""
        if not self.exists(remote, "f"):
            return None
        with tempfile.TemporaryDirectory(prefix="prge-pull-") as folder:
            local = Path(folder, "file")
            self.adb.pull(remote, local)
            if file_sha256(local) != self._file_hash(remote):
                raise DeviceError(
                    f"The copy of {remote} differs from the file on the device.",
                    remedy="Try again.",
                    code="copy-differs",
                )
            return local.read_bytes()

    def write(self, text: str, remote: str) -> None:
        """Write a text to a file on the device that only adb's user can read."""
        # By standard input: other users of the device can read the words of a command.
        new = quote([f"{remote}.new"])
        self.adb.check(
            f"rm -f {new}\ncat >{new} && mv {new} {quote([remote])}", f"writing {remote}", stdin=text
        )

    def send_runtime(self, local: Path, *, check: bool = False) -> int:
        """Send a runtime folder, and return the number of files sent; see `send_folder`."""
        remote = self.path("runtime")
        sent = self.send_folder(local, remote, check=check, before=self._check_nothing_runs)
        if sent:
            self.remove(self.path("cache"))
        # adb doesn't copy modes. The loader starts all other programs, so it alone must be executable.
        self.adb.check(f"chmod 755 {quote([f'{remote}/lib/ld.so'])}", "making the loader executable")
        return sent

    def _check_nothing_runs(self) -> None:
        """Raise DeviceError if a job is running."""
        for name in self.jobs():
            if self.job(name).state == "running":
                raise DeviceError(
                    f"{name} is running with the runtime that this command replaces.",
                    remedy=f"Wait for it, or stop it with `prge android stop {name}`.",
                    code="job-running",
                )

    def python(self, code: str, seconds: float = 120.0) -> str:
        """Run Python code in the runtime, and return its output; raises DeviceError."""
        words = quote(["sh", self.path("runtime", "run.sh"), "-c", code])
        return self.adb.check(words, "starting Python on the device", seconds)

    def attach(self, words: Iterable[str], reads: bool) -> int:
        """Run Python of the runtime in this terminal, and return its exit code.

        Args:
            words: arguments of Python.
            reads: whether it reads this process's standard input.
        """
        return self.adb.attach(quote(["sh", self.path("runtime", "run.sh"), *words]), reads)

    def require_runtime(self) -> None:
        """Raise DeviceError unless the device has a complete runtime."""
        if not self.exists(self.path("runtime.tree"), "f"):
            raise DeviceError(
                f"{self.adb.serial} has no runtime in {self.folder}.",
                remedy="Run prge android bundle runtime, then prge android push runtime.",
                code="runtime-missing",
            )

    def require_this_driver(self) -> None:
        """Raise DeviceError unless the device's runtime has the driver that is installed on this computer."""
        self.require_runtime()
        manifest = _json(
            self.adb.check(f"cat {quote([self.path('runtime', MANIFEST)])}", "reading the runtime")
        )
        if manifest.get("driver") != driver_hash():
            raise DeviceError(
                f"The runtime on {self.adb.serial} has the driver of another version of prge.",
                remedy="Build it again and push it: prge android bundle runtime, prge android push runtime.",
                code="runtime-of-other-version",
            )

    def start(self, name: str, words: Iterable[str], port: int | None = None) -> Job:
        """Start Python of the runtime as a job that doesn't depend on adb, and return once it runs.

        Args:
            name: name of the job.
            words: arguments of Python.
            port: port of a server, which is started again if it is killed; None: the job is not a server.

        Raises:
            DeviceError: a job of that name is running, or this one does not start.
        """
        self.require_runtime()
        check_name(name)
        before = self.job(name)
        if before.state == "running":
            raise DeviceError(
                f"{name} is running on {self.adb.serial}, process {before.process}.",
                remedy=f"Stop it with `prge android stop {name}`, or wait for it.",
                code="job-running",
            )
        job = self.path("jobs", name)
        command = quote(["sh", self.path("runtime", "job.sh"), job, *words])
        console = quote([f"{job}/console.txt"])
        # setsid, where the device has it, keeps the job alive when adb's shell ends.
        self.make_folder(job)
        self.make_folder(self.path("runs"))
        old = quote([f"{job}/{file}" for file in ("pid", "rc", "stop", "port", "restarts")])
        write_port = "" if port is None else f"echo {port} >{quote([f'{job}/port'])}\n"
        allow_restarts = "" if port is None else f"export PRGE_RESTARTS={MAX_RESTARTS}\n"
        self.adb.check(
            f"rm -f {old}\n{write_port}{allow_restarts}"
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
            f"{name} did not start within {START_SECONDS:.0f} seconds.",
            remedy=f"See its output: prge android logs {name} --console.",
            code="job-not-started",
        )

    def job(self, name: str) -> Job:
        """Return the status of a job."""
        check_name(name)
        for _ in range(10):
            job = self._job(name)
            if job.state != "killed" or job.code is not None:
                break
            # The process may just have ended, and job.sh may be about to write its exit code.
            time.sleep(0.1)
        return job

    def _job(self, name: str) -> Job:
        """Return the status of a job as its files show it at this moment."""
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
            # A shell reports signal N as 128 + N; the driver itself ends with INTERRUPTED on an interrupt.
            state = "ended" if code < 128 or code == INTERRUPTED else "killed"
        else:
            start = _start_time(parts["now"])
            alive = start is not None and start == _start_time(parts["then"])
            state = "running" if alive and parts["boot"] == parts["booted"] else "killed"
        summary, last = _json(parts["summary"]), _json(parts["last"])
        return Job(name, state, process, code, summary, last, port, restarts or 0)

    def no_run_error(self, name: str) -> DeviceError:
        """Return the error of a run that the device doesn't have."""
        return DeviceError(
            f"{self.adb.serial} has no run {name!r}; it has: {', '.join(self.jobs()) or 'none'}",
            code="run-missing-on-device",
        )

    def jobs(self) -> list[str]:
        """Return the names of all jobs on the device."""
        listing = self.adb.shell(f'cd {quote([self.path("jobs")])} && for n in *; do echo "$n"; done')
        return [] if listing.code else [name for name in listing.output.splitlines() if name and name != "*"]

    def stop(self, name: str, now: bool, seconds: float) -> Job:
        """Stop a job after its step, or kill it at once.

        Args:
            name: name of the job.
            now: kill it at once.
            seconds: longest wait for its end.

        Returns:
            The status of the ended job.

        Raises:
            DeviceError: the job doesn't end in time.
        """
        deadline, ended = time.monotonic() + seconds, None
        # The file must exist before the signal, or job.sh would start the process again.
        mark = quote([self.path("jobs", name, "stop")])
        while (job := self.job(name)).state == "running":
            if job.process != ended:
                ended = job.process
                self.adb.shell(f": >{mark}; kill -{'KILL' if now else 'TERM'} {ended}")
            if time.monotonic() >= deadline:
                raise DeviceError(
                    f"{name} is still running after {seconds:.0f} seconds.",
                    remedy="Kill it at once with --now.",
                    code="job-not-ended",
                )
            time.sleep(0.2)
        return job

    def pull_run(self, name: str, out: Path, excluded: Collection[str] = FILES_WITH_ROWS) -> list[str]:
        """Copy the folder of a run or a server to this computer, completely or not at all.

        Args:
            name: name of the run.
            out: folder to create, or an older copy of the run to replace.
            excluded: files that stay on the device; by default those that show rows.

        Returns:
            The names of the copied files.

        Raises:
            DeviceError: there is no such run, `out` exists and is not an older copy of it, or the device was
                lost.
        """
        check_name(name)
        remote = self.path("runs", name)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".pull-") as staging:
            for attempt in range(MAX_PULLS):
                copy = Path(staging) / str(attempt)
                copy.mkdir(mode=0o700)
                try:
                    self._pull_once(remote, copy, excluded)
                    break
                except DeviceError:
                    # A running run writes files and removes old checkpoints during the copy, so try again.
                    if attempt + 1 == MAX_PULLS or self.job(name).state != "running":
                        raise
            _replace(copy, out)
        return sorted(str(path.relative_to(out)) for path in files_of(out))

    def _pull_once(self, remote: str, copy: Path, excluded: Collection[str]) -> None:
        """Copy a run folder into the folder `copy` and compare hashes; raises DeviceError."""
        hashes = self._hashes(remote) if self.exists(remote, "d") else {}
        names = [file for file in hashes if file not in (LOCK, *excluded)]
        if not set(names) & set(RUN_MARKERS):
            raise DeviceError(
                f"{remote} holds no run yet.",
                remedy="See the output of its process: prge android logs NAME --console.",
                code="run-not-begun",
            )
        for top in sorted({file.partition("/")[0] for file in names}):
            self.adb.pull(f"{remote}/{top}", copy / top)
        _compare(copy, hashes)

    def remove(self, *paths: str) -> None:
        """Remove files and folders of prge's folder."""
        self.adb.check(f"rm -rf {quote(paths)}", "removing", HASH_SECONDS)

    def remove_all(self) -> None:
        """Remove all files of prge, and its folder if nothing else is in it."""
        self.remove(*(self.path(name) for name in SUBFOLDERS))
        self.adb.shell(f"rmdir {quote([self.folder])}")

    def _check_storage(self, size: int, remote: str) -> None:
        """Raise DeviceError if the device has too little storage for a file of this size."""
        free = self.free_bytes()
        if free is not None and free < size + _RESERVE:
            raise DeviceError(
                f"{remote} needs {size >> 20} MiB, but {self.adb.serial} has {free >> 20} MiB free, of which "
                f"{_RESERVE >> 20} MiB stay reserved.",
                remedy="Free some storage on the phone; `prge android clean` removes files of prge.",
                code="storage-full",
            )

    def _hashes(self, remote: str) -> dict[str, str]:
        """Return the SHA-256 of every file in a folder of the device, by relative path."""
        script = f"cd {quote([remote])} && find . -type f -exec sha256sum {{}} +"
        output = self.adb.check(script, f"reading {remote}", HASH_SECONDS)
        rows = [line.split(maxsplit=1) for line in output.splitlines()]
        return {row[1].removeprefix("*").removeprefix("./"): row[0] for row in rows if len(row) == 2}

    def _file_hash(self, remote: str) -> str:
        """Return the SHA-256 of a file of the device; empty if there is no such file."""
        result = self.adb.shell(f"sha256sum < {quote([remote])}", HASH_SECONDS)
        return "" if result.code else result.output.split()[0]

    def _parts(self, scripts: Mapping[str, str]) -> dict[str, str]:
        """Run several commands in one call of adb, and return their outputs by name.

        The output of a command that fails is empty.
        """
        lines = [
            f"echo; echo {quote([_PART + name])}; {{ {text}; }} 2>/dev/null" for name, text in scripts.items()
        ]
        output = self.adb.shell("\n".join(lines)).output
        parts = dict.fromkeys(scripts, "")
        for part in output.split(f"\n{_PART}")[1:]:
            name, _, content = part.partition("\n")
            parts[name] = content.strip()
        return parts


@dataclass(frozen=True, kw_only=True)
class PhoneFlags:
    """The device, and prge's folder on it."""

    serial: str | None = None
    """Serial of the device, as `adb devices` lists it; default: ANDROID_SERIAL, or the only device."""
    folder: str = FOLDER
    """prge's folder on the device."""

    def path(self, *parts: str) -> str:
        """Return a path in prge's folder on the device."""
        return "/".join((self.folder.rstrip("/"), *parts))

    def phone(self) -> Phone:
        """Connect to the device."""
        return Phone(Adb(self.serial), self.folder)


def is_name(name: str) -> bool:
    """Return whether a run can have this name."""
    return bool(name) and not name.startswith((".", "-")) and "/" not in name and _is_plain(name)


def check_name(name: str) -> None:
    """Raise DeviceError unless a run can have this name."""
    if not is_name(name):
        raise DeviceError(
            f"{name!r} can't be the name of a run.",
            remedy="Give one word of letters and digits.",
            code="name-unusable",
        )


def _is_plain(text: str) -> bool:
    return text.isprintable() and "\\" not in text


def _check_names(names: Iterable[str]) -> None:
    bad = [name for name in names if not _is_plain(name)]
    if bad:
        raise DeviceError(
            f"{bad[0]!r} can't be the name of a file on the phone.",
            remedy="Rename the file.",
            code="name-unusable",
        )


def _stage(path: Path, target: Path) -> None:
    """Link a file to another path, or copy it where links are impossible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def _start_time(stat: str) -> str | None:
    """Return the start time of a process from its line of /proc/PID/stat.

    None for any other text, and for a process that has ended.
    """
    words = stat.rpartition(")")[2].split()
    return None if len(words) < 20 or words[0] in "ZX" else words[19]


def _json(text: str) -> dict[str, Any]:
    """Parse a text as a JSON object; return an empty dict if the text is anything else."""
    try:
        content = parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _compare(copy: Path, hashes: Mapping[str, str]) -> None:
    """Raise DeviceError if a copied file differs from the device's, unless the run may have extended it."""
    for path in files_of(copy):
        name = str(path.relative_to(copy))
        if not _grows(name) and hashes.get(name) != file_sha256(path):
            raise DeviceError(
                f"The copy of {name} differs from the file on the device.",
                remedy="Pull again.",
                code="copy-differs",
            )


def _grows(name: str) -> bool:
    """Return whether a running run may extend a file; each round of a learning server has its own journal."""
    return name in GROWING_FILES or (name.startswith(f"{ROUNDS}/") and name.endswith(f"/{JOURNAL}"))


def _replace(copy: Path, out: Path) -> None:
    """Move a copied run to `out`, replacing an older copy; raises DeviceError for any other folder."""
    if out.exists():
        try:
            name = next(name for name in RUN_MARKERS if (copy / name).is_file())
            same = _first_line(out / name) == _first_line(copy / name)
        except OSError:
            same = False
        if not same:
            raise DeviceError(
                f"{out} exists, and is not this run.",
                remedy="Give another folder with --out.",
                code="folder-exists",
            )
        out.rename(copy.with_name("older"))
    copy.rename(out)


def _first_line(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.readline()
