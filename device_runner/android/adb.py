"""adb calls: each with a timeout, words that need quoting quoted, and what fails told as a DeviceError."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prge.errors import DeviceError

QUICK_SECONDS = 60.0
COPY_SECONDS = 3600.0
_MARK = "prge-exit-code="
_SERVER = "adb's server on this computer does not work: `adb kill-server`, then `adb devices` says more"
_NOT_THERE = "connect the phone, unlock it, allow USB debugging; `adb devices` must list it as device"


@dataclass(frozen=True)
class Answer:
    """What a command on the device printed, and its exit code."""

    code: int
    output: str
    errors: str

    @property
    def said(self) -> str:
        """The last line that it printed as an error, or else at all."""
        lines = (self.errors.strip() or self.output.strip()).splitlines()
        return lines[-1] if lines else f"exit code {self.code}"


class Adb:
    """adb for one device; `serial` is what `adb devices` calls it."""

    def __init__(self, serial: str | None = None, quick_seconds: float = QUICK_SECONDS) -> None:
        """Find the device and wait for nothing: a network device that was lost is connected again.

        Raises:
            DeviceError: there is no adb or it fails, no such device, none at all, more than one, or it is not
                ready.
        """
        self.executable = find_adb()
        self.quick_seconds = quick_seconds
        self.serial = serial or os.environ.get("ANDROID_SERIAL") or ""
        states = self._states()
        if not self.serial:
            self.serial = _only(states)
        state, connecting = states.get(self.serial), ""
        if state != "device" and ":" in self.serial:
            connecting = self._connect()
            state = self._states().get(self.serial)
        if state != "device":
            raise _not_ready(self.serial, state, states, connecting)

    def shell(self, script: str, seconds: float | None = None, said: str = "") -> Answer:
        """Run a shell script on the device; its exit code is in the answer, its files are its user's alone.

        Args:
            script: what to run; others on the device can read it while it runs.
            seconds: that it may take.
            said: its standard input, which they can't read.

        Raises:
            DeviceError: the device was lost or did not answer in time.
        """
        # adb's own exit code 1 looks like a command's: only what really ended prints the mark.
        done = self._call(
            ["shell", f"(\numask 077\n{script}\n)\ncode=$?; echo; echo {_MARK}$code"],
            seconds or self.quick_seconds,
            said=said.encode(),
        )
        output, mark, code = done.stdout.decode(errors="replace").rpartition(f"\n{_MARK}")
        errors = done.stderr.decode(errors="replace")
        if not mark or not code.strip().isdigit():
            raise self._lost(errors)
        return Answer(int(code), output, errors)

    def check(self, script: str, doing: str, seconds: float | None = None, said: str = "") -> str:
        """Run a shell script that must succeed, and return what it printed.

        Raises:
            DeviceError: it did not; `doing` says what it was for.
        """
        answer = self.shell(script, seconds, said)
        if answer.code:
            raise failed(doing, answer.said)
        return answer.output

    def attach(self, script: str, reads: bool) -> int:
        """Run a shell script with this process's output, and input if it `reads`; its exit code.

        In a terminal it has one too, which Ctrl-C goes through.
        """
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        command = [self.executable, "-s", self.serial, "shell", "-t" if terminal else "-T", script]
        stdin = None if terminal or reads else subprocess.DEVNULL
        try:
            return subprocess.run(command, stdin=stdin, check=False).returncode
        except OSError as error:
            raise self._not_started(error) from None

    def push(self, local: Path, remote: str) -> None:
        """Copy a file to the device, or what is in a folder into a folder that is there.

        Raises:
            DeviceError: the device was lost, or can't keep it.
        """
        source = _local(local) + ("/." if local.is_dir() else "")
        self._copy(["push", source, remote], f"copying {local} to {remote}")

    def pull(self, remote: str, local: Path) -> None:
        """Copy a file or folder from the device; raises DeviceError."""
        self._copy(["pull", remote, _local(local)], f"copying {remote} to {local}")

    def forward(self, here: int, there: int) -> int:
        """Let this computer reach the device's port of loopback at its own, by default a free one; that one.

        Raises:
            DeviceError: it is in use.
        """
        if here and self.forwards().get(here) == there:
            return here
        done = self._call(["forward", "--no-rebind", f"tcp:{here}", f"tcp:{there}"], self.quick_seconds)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            raise DeviceError(
                f"port {here} of this computer can't lead to the phone: {said}",
                remedy="give another one with --computer-port; 0 takes a free one",
                code="port-not-forwarded",
            )
        return here or int(done.stdout)

    def forwards(self) -> dict[int, int]:
        """Ports of this computer that lead to the device, and the device's ports."""
        listed = self._listed(["forward", "--list"])
        rows = [line.replace("tcp:", "").split() for line in listed.splitlines()]
        return {int(row[1]): int(row[2]) for row in rows if row[:1] == [self.serial] and _are_ports(row[1:])}

    def unforward(self, here: int) -> None:
        """Let a port of this computer lead to the device no more."""
        self._call(["forward", "--remove", f"tcp:{here}"], self.quick_seconds)

    def reverse(self, port: str) -> None:
        """Let the device reach this computer's port of loopback at its own; raises DeviceError."""
        done = self._call(["reverse", f"tcp:{port}", f"tcp:{port}"], self.quick_seconds)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            raise failed(f"reversing port {port}", said)

    def _copy(self, words: Sequence[str], doing: str) -> None:
        done = self._call(words, COPY_SECONDS)
        if done.returncode:
            text = (done.stderr + b"\n" + done.stdout).decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if "error" in line.lower()]
            said = (lines or text.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise failed(doing, said)

    def _states(self) -> dict[str, str]:
        rows = [line.split("\t") for line in self._listed(["devices"], select=False).splitlines()]
        return {row[0]: row[1].strip() for row in rows if len(row) == 2}

    def _listed(self, words: Sequence[str], select: bool = True) -> str:
        """What adb lists; raises DeviceError with what adb says where it fails."""
        done = self._call(words, self.quick_seconds, select)
        if done.returncode:
            raise DeviceError(
                f"adb {' '.join(words)} failed: {_words_of(done)}", remedy=_SERVER, code="adb-failed"
            )
        return done.stdout.decode(errors="replace")

    def _connect(self) -> str:
        """Connect to a device of the network; what adb says of it."""
        # A connection that has died on the other side stays listed until it is given up.
        self._call(["disconnect", self.serial], self.quick_seconds, select=False)
        return _words_of(self._call(["connect", self.serial], self.quick_seconds, select=False))

    def _call(
        self, words: Sequence[str], seconds: float, select: bool = True, said: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        command = [self.executable, *(["-s", self.serial] if select else []), *words]
        try:
            return subprocess.run(command, input=said, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"adb {words[0]} did not end within {seconds:.0f} seconds",
                remedy="is the phone still connected? A run on it goes on: `prge android status`",
                code="adb-too-slow",
            ) from None
        except OSError as error:
            raise self._not_started(error) from None

    def _not_started(self, error: OSError) -> DeviceError:
        return DeviceError(
            f"{self.executable} can't be started: {error.strerror or error}", code="program-not-started"
        )

    def _lost(self, errors: str) -> DeviceError:
        lines = errors.strip().splitlines()
        said = lines[-1] if lines else "it closed the connection"
        return DeviceError(
            f"the device {self.serial} was lost: {said}", remedy=_NOT_THERE, code="device-lost"
        )


def find_adb() -> str:
    """Path of adb, or of what PRGE_ADB names.

    Raises:
        DeviceError: it is not installed.
    """
    name = os.environ.get("PRGE_ADB") or "adb"
    path = shutil.which(name)
    if path is None:
        raise DeviceError(
            f"{name} is not installed",
            remedy="install Android's platform tools (Debian: apt install adb)",
            code="program-missing",
        )
    return path


def quote(words: Sequence[object]) -> str:
    """Words as the device's shell reads them back."""
    return shlex.join(map(str, words))


def failed(doing: str, said: str) -> DeviceError:
    """The error of something that the device refused."""
    remedy = ""
    if "no space left" in said.lower():
        remedy = "free some storage on the phone; `prge android clean` removes what prge brought"
    elif "permission denied" in said.lower():
        remedy = "give a folder that adb's shell may write with --folder"
    return DeviceError(f"{doing} failed: {said}", remedy=remedy, code="device-command-failed")


def _words_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """What adb itself said, in one line."""
    text = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace")
    return "; ".join(filter(None, map(str.strip, text.splitlines()))) or f"exit code {done.returncode}"


def _are_ports(words: Sequence[str]) -> bool:
    return len(words) == 2 and all(word.isdigit() for word in words)


def _only(states: dict[str, str]) -> str:
    if len(states) == 1:
        return next(iter(states))
    if not states:
        raise DeviceError("there is no device", remedy=_NOT_THERE, code="device-missing")
    raise DeviceError(
        "there is more than one device: " + ", ".join(sorted(states)),
        remedy="choose one with --serial",
        code="device-ambiguous",
    )


def _not_ready(serial: str, state: str | None, states: dict[str, str], connecting: str) -> DeviceError:
    """The error of a device that can't be used; `connecting` is what `adb connect` said."""
    if state is None:
        listed = ", ".join(sorted(set(states) - {serial})) or "none"
        why = f"; adb connect: {connecting}" if connecting else ""
        return DeviceError(
            f"there is no device {serial}; connected: {listed}{why}", remedy=_NOT_THERE, code="device-missing"
        )
    remedies = {
        "unauthorized": "unlock the phone and allow this computer in the dialogue that it shows",
        "offline": "connect the phone again, or start `adb kill-server`",
    }
    return DeviceError(
        f"the device {serial} is {state}", remedy=remedies.get(state, _NOT_THERE), code="device-not-ready"
    )


def _local(path: Path) -> str:
    """A local path as adb reads it: it would take a leading dash for a flag."""
    text = str(path)
    return text if text.startswith(("/", "./")) else f"./{text}"
