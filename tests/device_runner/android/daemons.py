"""A real adb daemon on this machine's loopback, in a network namespace of its own, and adb calls into it.

Debian's adbd listens without authentication, so it must never see another network.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from device_runner.android.packages import Package, download_debian, unpack_debian
from prge.errors import PrgeError

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGES = (
    "adbd android-libbase android-libboringssl android-libcutils android-liblog libc6 libstdc++6 libgcc-s1 "
    "libbrotli1 liblz4-1 libprotobuf32t64 libsystemd0 libzstd1 libcap2 zlib1g libxxhash0"
).split()
PORT, SERVER_PORT = 15555, 5137
SERIAL = f"127.0.0.1:{PORT}"
SECONDS = 600


class UnavailableError(Exception):
    """Why there can be no daemon here."""


class Network:
    """A network namespace with nothing but loopback."""

    def __init__(self) -> None:
        for name in ("adb", "unshare", "nsenter", "ip", "apt-get", "dpkg-deb"):
            if shutil.which(name) is None:
                raise UnavailableError(f"{name} is not installed")
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._holder = subprocess.Popen(
            ["unshare", *user, "--net", "sleep", "3600"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        enter = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.prefix = ["nsenter", "--target", str(self._holder.pid), *enter, "--net"]
        for _ in range(50):
            time.sleep(0.02)
            if self._holder.poll() is not None:
                break
            # Until the holder is in its namespace, this would be the machine's own: look before touching.
            links = self.run(["ip", "-o", "link"]).stdout
            if links.count("\n") == 1 and self.run(["ip", "link", "set", "lo", "up"]).returncode == 0:
                return
        self.close()
        raise UnavailableError("network namespaces can't be made here")

    def run(self, words: Sequence[object], **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        command = [*self.prefix, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, **options)  # type: ignore[call-overload, no-any-return]

    def start(self, words: Sequence[object], **options: object) -> subprocess.Popen[bytes]:
        """Start a command inside; nsenter becomes the command, so the process is its own."""
        return subprocess.Popen([*self.prefix, *map(str, words)], **options)  # type: ignore[call-overload, no-any-return]

    def close(self) -> None:
        """End the namespace."""
        self._holder.kill()
        self._holder.wait()


class Daemon:
    """A running adbd of this machine's architecture, and `prge android` with adb's server beside it."""

    def __init__(self, network: Network, folder: Path, home: Path) -> None:
        self.network = network
        self.folder = folder
        self.home = home
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(home),
            "TMPDIR": str(home),
            "ANDROID_SERIAL": SERIAL,
            "ANDROID_ADB_SERVER_PORT": str(SERVER_PORT),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start adbd and wait until adb reaches it."""
        loader = self.folder / "ld-linux-x86-64.so.2"
        with (self.home / "adbd.log").open("ab") as log:
            self.process = self.network.start(
                [loader, "--library-path", self.folder, self.folder / "adbd"],
                env={"ADBD_PORT": str(PORT), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        wait_for_device(self)

    def kill(self) -> None:
        """End adbd with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def adb(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Call adb itself."""
        return self.network.run(["adb", *words], env=self.environment)

    def prge(self, *words: object, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run `prge android` as a user would; `check` is the exit code that it must have."""
        done = self.network.run([sys.executable, "-m", "prge.cli", "android", *words], env=self.environment)
        if check is not None and done.returncode != check:
            raise AssertionError(
                f"prge android {words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def close(self) -> None:
        """End adb's server and the daemon."""
        self.adb("kill-server")
        self.kill()


def wait_for_device(daemon: Daemon, seconds: float = 30.0) -> None:
    """Connect adb to a daemon that has just been started."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        daemon.adb("disconnect", SERIAL)
        daemon.adb("connect", SERIAL)
        if daemon.adb("-s", SERIAL, "shell", "echo there").stdout.strip() == "there":
            return
        if daemon.process is not None and daemon.process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"adb does not reach the daemon: {(daemon.home / 'adbd.log').read_text()[-2000:]}")


def adbd_folder(folder: Path, cache: Path, machine: str = "amd64") -> Path:
    """Debian's adbd with its libraries in one folder; raises UnavailableError."""
    try:
        files = download_debian([Package(name) for name in PACKAGES], machine, cache)
    except PrgeError as error:
        raise UnavailableError(f"adbd can't be downloaded: {error.what}") from None
    system = folder / "system"
    system.mkdir(parents=True)
    unpack_debian(list(files.values()), system)
    made = folder / "adbd"
    made.mkdir()
    triplet = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[machine]
    places = [
        system / "usr/lib" / triplet / "android",
        system / "usr/lib" / triplet,
        system / "usr/lib/android-sdk/platform-tools",
    ]
    for place in places:
        for path in sorted(place.iterdir()):
            target = made / path.name
            if path.is_file() and (".so" in path.name or path.name == "adbd") and not target.exists():
                shutil.copy(path, target)
    return made


def end_jobs(folder: Path, but: Mapping[str, int] | None = None) -> None:
    """Kill the runs that a test has left in a folder of prge."""
    for path in sorted(folder.glob("jobs/*/pid")):
        text = path.read_text().strip()
        command = Path(f"/proc/{text}/cmdline")
        if text.isdigit() and command.is_file() and str(folder).encode() in command.read_bytes():
            os.kill(int(text), signal.SIGKILL)
