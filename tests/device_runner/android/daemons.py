"""A real adb daemon and a computer with adb, in two network namespaces that are connected by a cable.

Debian's adbd listens without authentication, so it must have no access to other networks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_runner.android.packages import Archive, configured_archive, download_debian, unpack_debian
from prge.errors import PrgeError

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGES = (
    "adbd android-libbase android-libboringssl android-libcutils android-liblog libc6 libstdc++6 libgcc-s1 "
    "libbrotli1 liblz4-1 libprotobuf32t64 libsystemd0 libzstd1 libcap2 zlib1g libxxhash0"
).split()
PORT, SERVER_PORT = 15555, 5137
COMPUTER, PHONE = "10.99.0.1", "10.99.0.2"
SERIAL = f"{PHONE}:{PORT}"
SECONDS = 600


_ASK = """
import sys, urllib.request
url, key, body = sys.argv[1:]
headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
request = urllib.request.Request(url, body.encode() or None, headers)
try:
    answer = urllib.request.urlopen(request, timeout=300)
except urllib.error.HTTPError as error:
    answer = error
except OSError:
    print(0, "")
    sys.exit()
print(answer.status, answer.read().decode())
"""
_NAMESPACE = ("readlink", "/proc/self/ns/net")


def lacking_for_packages() -> str:
    """Return what this machine lacks to download Debian's packages; empty if nothing."""
    for name in ("apt-get", "dpkg-deb"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    try:
        configured_archive()
    except PrgeError as error:
        return error.what
    return ""


def lacking_for_network() -> str:
    """Return what this machine lacks for two hosts with adb; empty if nothing."""
    for name in ("adb", "unshare", "nsenter", "ip"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    tried = subprocess.run(["unshare", *user, "--net", "true"], capture_output=True, text=True, check=False)
    return f"no namespaces of networks: {tried.stderr.strip()}" if tried.returncode else ""


class Network:
    """Two hosts, a computer and a phone, that reach only their own loopback and each other."""

    def __init__(self) -> None:
        root = os.geteuid() == 0
        self._holders: list[subprocess.Popen[bytes]] = []
        enter = [] if root else ["--user", "--preserve-credentials"]
        try:
            self.computer = self._host([] if root else ["--user", "--map-root-user"], [], enter)
            # In the computer's user namespace, so that both ends of the cable can be configured.
            self._phone = self._host([], self.computer, enter)
            pid = str(self._holders[1].pid)
            self._set_up(self.computer, f"link add cable type veth peer name cable netns {pid}")
            for host, address in ((self.computer, COMPUTER), (self._phone, PHONE)):
                self._set_up(host, f"address add {address}/30 dev cable")
                self._set_up(host, "link set cable up")
        except BaseException:
            self.close()
            raise

    def _host(self, user: Sequence[str], within: Sequence[str], enter: Sequence[str]) -> list[str]:
        """Make a namespace with only loopback, and return the prefix of commands that run in it."""
        holder = subprocess.Popen(
            [*within, "unshare", *user, "--net", "sleep", "3600"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._holders.append(holder)
        command = ["nsenter", "--target", str(holder.pid), *enter, "--net"]
        outside = subprocess.run([*within, *_NAMESPACE], capture_output=True, check=True).stdout
        for _ in range(100):
            time.sleep(0.02)
            if holder.poll() is not None:
                break
            # Until the holder has entered its namespace, commands would run in another one.
            inside = subprocess.run([*command, *_NAMESPACE], capture_output=True, check=False)
            if inside.returncode == 0 and inside.stdout != outside:
                self._set_up(command, "link set lo up")
                return command
        raise AssertionError("a namespace of networks was not entered")

    def _set_up(self, host: Sequence[str], arguments: str) -> None:
        done = subprocess.run([*host, "ip", *arguments.split()], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ip {arguments}: {done.stderr.strip()}"

    def run(self, command: Sequence[object], **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command on the computer."""
        arguments = [*self.computer, *map(str, command)]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS, **options)  # type: ignore[call-overload, no-any-return]

    def start(
        self, command: Sequence[object], on_phone: bool = False, **options: object
    ) -> subprocess.Popen[bytes]:
        """Start a command on the computer or the phone, and return its process, which replaces nsenter."""
        host = self._phone if on_phone else self.computer
        return subprocess.Popen([*host, *map(str, command)], **options)  # type: ignore[call-overload, no-any-return]

    def close(self) -> None:
        """Remove both hosts."""
        for holder in self._holders:
            holder.kill()
            holder.wait()


class Daemon:
    """A running adbd of this machine's architecture, and `prge android` with its own adb server."""

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
                [loader, "--library-path", self.folder, self.folder / "adbd"], on_phone=True,
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

    def adb(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Call adb itself."""
        return self.network.run(["adb", *arguments], env=self.environment)

    def prge(self, *arguments: object, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run `prge android` as a user would; `check` is the expected exit code, None for any."""
        done = self.network.run(
            [sys.executable, "-m", "prge.cli.main", "android", *arguments], env=self.environment
        )
        if check is not None and done.returncode != check:
            raise AssertionError(
                f"prge android {arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def ask(self, port: int, path: str, key: str = "", body: Any = None) -> tuple[int, Any]:
        """Send an HTTP request on the computer, and return status and body; status 0 if nobody listens."""
        text = "" if body is None else json.dumps(body)
        arguments = [f"http://127.0.0.1:{port}{path}", key, text]
        status, _, content = self.network.run([sys.executable, "-c", _ASK, *arguments]).stdout.partition(" ")
        return int(status), json.loads(content) if content.startswith("{") else content

    def close(self) -> None:
        """Stop adb's server and the daemon."""
        self.adb("kill-server")
        self.kill()


def wait_for_device(daemon: Daemon, seconds: float = 30.0) -> None:
    """Connect adb to a daemon that was just started."""
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
    """Put Debian's adbd with its libraries into one folder, and return it; raises PrgeError."""
    files = download_debian(PACKAGES, machine, cache, Archive())
    shutil.rmtree(folder, ignore_errors=True)
    system = folder / "system"
    system.mkdir(parents=True)
    unpack_debian(files.values(), system)
    target_folder = folder / "adbd"
    target_folder.mkdir()
    triplet = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[machine]
    sources = [
        system / "usr/lib" / triplet / "android",
        system / "usr/lib" / triplet,
        system / "usr/lib/android-sdk/platform-tools",
    ]
    for source in sources:
        for path in sorted(source.iterdir()):
            target = target_folder / path.name
            if path.is_file() and (".so" in path.name or path.name == "adbd") and not target.exists():
                shutil.copy(path, target)
    return target_folder


def end_jobs(folder: Path, but: Mapping[str, int] | None = None) -> None:
    """Kill the jobs that a test has left in a folder of prge."""
    for path in sorted(folder.glob("jobs/*/pid")):
        text = path.read_text().strip()
        command = Path(f"/proc/{text}/cmdline")
        if text.isdigit() and command.is_file() and str(folder).encode() in command.read_bytes():
            os.kill(int(text), signal.SIGKILL)
