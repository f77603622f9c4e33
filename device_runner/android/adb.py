"""Calls of adb with timeouts and quoting, whose failures are DeviceErrors."""

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
_SERVER = (
    "The adb server on this computer doesn't work. Run `adb kill-server`, then `adb devices` for details."
)
_NOT_THERE = "Connect the phone, unlock it, and allow USB debugging. `adb devices` must list it as `device`."


@dataclass(frozen=True)
class AdbOutput:
    """The output and exit code of a command on the device."""

    code: int
    output: str
    errors: str

    @property
    def last_line(self) -> str:
        """The last line of the error output, or else of the output, or else the exit code."""
        lines = (self.errors.strip() or self.output.strip()).splitlines()
        return lines[-1] if lines else f"exit code {self.code}"


class Adb:
    """adb for one device.

    Attributes:
        serial: name of the device in the list of `adb devices`.
    """

    def __init__(self, serial: str | None = None, quick_seconds: float = QUICK_SECONDS) -> None:
        """Find the device, without waiting for one; reconnect a lost device of the network.

        Args:
            serial: the device; None: that of ANDROID_SERIAL, or the only one.
            quick_seconds: timeout of calls that copy nothing.

        Raises:
            DeviceError: adb is missing or fails, there is no such device, there are several to choose from,
                or the device is not ready.
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
            raise _not_ready_error(self.serial, state, states, connecting)

    def shell(self, script: str, seconds: float | None = None, stdin: str = "") -> AdbOutput:
        """Run a shell script on the device and return its output and exit code.

        Only adb's user can read files that the script makes.

        Args:
            script: the script, which other users of the device can see while it runs.
            seconds: timeout; None: `quick_seconds`.
            stdin: standard input of the script, which other users can't see.

        Raises:
            DeviceError: the device was lost or did not answer in time.
        """
        # adb's own exit code 1 looks like that of a script, so a script that ended prints the mark.
        process = self._call(
            ["shell", f"(\numask 077\n{script}\n)\ncode=$?; echo; echo {_MARK}$code"],
            seconds or self.quick_seconds,
            stdin=stdin.encode(),
        )
        output, mark, code = process.stdout.decode(errors="replace").rpartition(f"\n{_MARK}")
        errors = process.stderr.decode(errors="replace")
        if not mark or not code.strip().isdigit():
            raise self._lost_device_error(errors)
        return AdbOutput(int(code), output, errors)

    def check(self, script: str, doing: str, seconds: float | None = None, stdin: str = "") -> str:
        """Run a shell script that must succeed, and return its output.

        Args:
            script: as for `shell`, like `seconds` and `stdin`.
            doing: what the script does, for the error message, such as "reading metrics".

        Raises:
            DeviceError: the script failed, or the device was lost.
        """
        result = self.shell(script, seconds, stdin)
        if result.code:
            raise command_error(doing, result.last_line)
        return result.output

    def attach(self, script: str, reads: bool) -> int:
        """Run a shell script connected to this process's output, and return its exit code.

        In a terminal, the script has a terminal too, and Ctrl-C reaches it.

        Args:
            script: the script.
            reads: whether the script reads this process's standard input.
        """
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        command = [self.executable, "-s", self.serial, "shell", "-t" if terminal else "-T", script]
        stdin = None if terminal or reads else subprocess.DEVNULL
        try:
            return subprocess.run(command, stdin=stdin, check=False).returncode
        except OSError as error:
            raise self._not_started_error(error) from None

    def push(self, local: Path, remote: str) -> None:
        """Copy a file to the device, or the content of a folder into an existing folder.

        Raises:
            DeviceError: the device was lost, or can't store the files.
        """
        source = _local(local) + ("/." if local.is_dir() else "")
        self._copy(["push", source, remote], f"copying {local} to {remote}")

    def pull(self, remote: str, local: Path) -> None:
        """Copy a file or folder from the device; raises DeviceError."""
        self._copy(["pull", remote, _local(local)], f"copying {remote} to {local}")

    def forward(self, computer_port: int, device_port: int) -> int:
        """Forward a loopback port of this computer to one of the device, and return the computer's port.

        Args:
            computer_port: port of this computer; 0: a free one.
            device_port: port of the device's loopback.

        Raises:
            DeviceError: the computer's port is in use.
        """
        if computer_port and self.forwards().get(computer_port) == device_port:
            return computer_port
        process = self._call(
            ["forward", "--no-rebind", f"tcp:{computer_port}", f"tcp:{device_port}"], self.quick_seconds
        )
        if process.returncode:
            reason = process.stderr.decode(errors="replace").strip() or f"exit code {process.returncode}"
            raise DeviceError(
                f"Cannot forward port {computer_port} of this computer to the phone: {reason}",
                remedy="Give another port with --computer-port; 0 takes a free one.",
                code="port-not-forwarded",
            )
        return computer_port or int(process.stdout)

    def forwards(self) -> dict[int, int]:
        """Return the device's ports by the ports of this computer that are forwarded to them."""
        output = self._output(["forward", "--list"])
        rows = [line.replace("tcp:", "").split() for line in output.splitlines()]
        return {int(row[1]): int(row[2]) for row in rows if row[:1] == [self.serial] and _are_ports(row[1:])}

    def unforward(self, computer_port: int) -> None:
        """Stop forwarding a port of this computer to the device."""
        self._call(["forward", "--remove", f"tcp:{computer_port}"], self.quick_seconds)

    def reverse(self, port: str) -> None:
        """Forward a loopback port of the device to the same port of this computer; raises DeviceError."""
        process = self._call(["reverse", f"tcp:{port}", f"tcp:{port}"], self.quick_seconds)
        if process.returncode:
            reason = process.stderr.decode(errors="replace").strip() or f"exit code {process.returncode}"
            raise command_error(f"reversing port {port}", reason)

    def _copy(self, arguments: Sequence[str], doing: str) -> None:
        """Run a command of adb that copies files; raises DeviceError."""
        process = self._call(arguments, COPY_SECONDS)
        if process.returncode:
            text = (process.stderr + b"\n" + process.stdout).decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if "error" in line.lower()]
            reason = (lines or text.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise command_error(doing, reason)

    def _states(self) -> dict[str, str]:
        """Return the states of all devices by their serials."""
        rows = [line.split("\t") for line in self._output(["devices"], select=False).splitlines()]
        return {row[0]: row[1].strip() for row in rows if len(row) == 2}

    def _output(self, arguments: Sequence[str], select: bool = True) -> str:
        """Return the output of a command of adb; raises DeviceError if adb fails."""
        process = self._call(arguments, self.quick_seconds, select)
        if process.returncode:
            raise DeviceError(
                f"adb {' '.join(arguments)} failed: {_message_of(process)}", remedy=_SERVER, code="adb-failed"
            )
        return process.stdout.decode(errors="replace")

    def _connect(self) -> str:
        """Connect to a device of the network, and return adb's message."""
        # adb keeps listing a connection that the other side has closed until it is disconnected.
        self._call(["disconnect", self.serial], self.quick_seconds, select=False)
        return _message_of(self._call(["connect", self.serial], self.quick_seconds, select=False))

    def _call(
        self, arguments: Sequence[str], seconds: float, select: bool = True, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run adb, for this device if `select`, and return the ended process; raises DeviceError."""
        command = [self.executable, *(["-s", self.serial] if select else []), *arguments]
        try:
            return subprocess.run(command, input=stdin, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"adb {arguments[0]} did not end within {seconds:.0f} seconds.",
                remedy="Check that the phone is connected. A run on it continues: `prge android status`.",
                code="adb-too-slow",
            ) from None
        except OSError as error:
            raise self._not_started_error(error) from None

    def _not_started_error(self, error: OSError) -> DeviceError:
        """Return the error of an adb that the system can't start."""
        return DeviceError(
            f"Cannot start {self.executable}: {error.strerror or error}", code="program-not-started"
        )

    def _lost_device_error(self, errors: str) -> DeviceError:
        """Return the error of a device whose connection ended during a script."""
        lines = errors.strip().splitlines()
        reason = lines[-1] if lines else "it closed the connection"
        return DeviceError(
            f"Lost the connection to the device {self.serial}: {reason}",
            remedy=_NOT_THERE,
            code="device-lost",
        )


def find_adb() -> str:
    """Return the path of adb, or of the program that PRGE_ADB names.

    Raises:
        DeviceError: the program is not installed.
    """
    name = os.environ.get("PRGE_ADB") or "adb"
    path = shutil.which(name)
    if path is None:
        raise DeviceError(
            f"{name} is not installed.",
            remedy="Install Android's platform tools (Debian: apt install adb).",
            code="program-missing",
        )
    return path


def quote(words: Sequence[object]) -> str:
    """Return words joined and quoted for the device's shell."""
    return shlex.join(map(str, words))


def command_error(doing: str, reason: str) -> DeviceError:
    """Return the error of a command that failed on the device.

    Args:
        doing: what the command does, such as "reading metrics".
        reason: the message of the device.
    """
    remedy = ""
    if "no space left" in reason.lower():
        remedy = "Free some storage on the phone; `prge android clean` removes the files of prge."
    elif "permission denied" in reason.lower():
        remedy = "Give a folder that adb's shell can write to with --folder."
    return DeviceError(f"{doing} failed: {reason}", remedy=remedy, code="device-command-failed")


def _message_of(process: subprocess.CompletedProcess[bytes]) -> str:
    """Return the message of adb itself, in one line."""
    text = (process.stderr.strip() or process.stdout.strip()).decode(errors="replace")
    return "; ".join(filter(None, map(str.strip, text.splitlines()))) or f"exit code {process.returncode}"


def _are_ports(words: Sequence[str]) -> bool:
    return len(words) == 2 and all(word.isdigit() for word in words)


def _only(states: dict[str, str]) -> str:
    """Return the serial of the only device; raises DeviceError if there are none or several."""
    if len(states) == 1:
        return next(iter(states))
    if not states:
        raise DeviceError("No device is connected.", remedy=_NOT_THERE, code="device-missing")
    raise DeviceError(
        "More than one device is connected: " + ", ".join(sorted(states)),
        remedy="Choose one with --serial.",
        code="device-ambiguous",
    )


def _not_ready_error(serial: str, state: str | None, states: dict[str, str], connecting: str) -> DeviceError:
    """Return the error of a device that can't be used; `connecting` is the message of `adb connect`."""
    if state is None:
        listed = ", ".join(sorted(set(states) - {serial})) or "none"
        why = f"; adb connect: {connecting}" if connecting else ""
        return DeviceError(
            f"There is no device {serial}. Connected devices: {listed}{why}.",
            remedy=_NOT_THERE,
            code="device-missing",
        )
    remedies = {
        "unauthorized": "Unlock the phone, and allow this computer in the dialog that it shows.",
        "offline": "Connect the phone again, or run `adb kill-server`.",
    }
    return DeviceError(
        f"The device {serial} is {state}.", remedy=remedies.get(state, _NOT_THERE), code="device-not-ready"
    )


def _local(path: Path) -> str:
    """Return a local path that adb can't mistake for a flag."""
    text = str(path)
    return text if text.startswith(("/", "./")) else f"./{text}"
