"""Transfer files to and from a phone over adb while the connection is cut after some bytes.

A real adb and a real adb daemon run in a network namespace of their own, with a relay between them that
closes each connection when its budget of bytes is used up. A file must arrive complete or not exist under its
name, and the next try must succeed. As a command, this module is the relay, or one transfer by the code of
`prge android`.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from child import ProcessResult
from outcome import Case, Findings, Verdict, judge
from workshop import REPOSITORY, Bench, Workshop

from device_runner.android.adb import Adb
from device_runner.android.device import Phone
from device_runner.android.runtime import default_cache
from prge.errors import PrgeError
from tests.device_runner.android.daemons import (
    PHONE,
    PORT,
    Daemon,
    Network,
    adbd_folder,
    lacking_for_network,
    lacking_for_packages,
)

_RELAY = "127.0.0.1:15556"
_TRIES = 12
_BLOCK = 4096


def unavailable_reason(workshop: Workshop) -> str:
    """Return why transfers can't run here; empty if they can, with the daemon in the workshop."""
    reason = lacking_for_network() or lacking_for_packages()
    if not reason and not (workshop.folder / "adbd" / "adbd").is_file():
        adbd_folder(workshop.folder / "adbd", default_cache())
    return reason


def attack_a_transfer(bench: Bench, random: Random, folder: Path) -> Findings:
    """Send a file or a folder, or fetch a run, until it arrives; the first connections are cut."""
    daemon = bench.once("daemon", partial(_daemon, bench))
    transfer = random.choice(["file", "folder", "run"])
    source = folder / "source"
    size = _make_files(source, random)
    budgets = [random.randint(0, random.choice([300, 5000, 2 * size])) for _ in range(random.randint(1, 4))]
    phone = folder / "phone"
    if transfer == "run":
        (source / "journal.jsonl").write_text("{}\n")
        shutil.copytree(source, phone / "runs" / "name")
    relay = daemon.network.start(
        [sys.executable, __file__, "relay", *budgets],
        stdout=subprocess.PIPE,
        env={**daemon.environment, "PYTHONPATH": _path()},
    )
    counts: Counter[str] = Counter()
    try:
        assert relay.stdout is not None
        relay.stdout.readline()  # the relay listens
        for _ in range(_TRIES):
            result = _run_transfer(daemon, transfer, source, phone, folder)
            problem = _find_problem(transfer, source, phone, folder, result)
            if problem or judge(result) not in (None, Verdict.REFUSED):
                verdict = Verdict.DIFFERENT if problem else judge(result) or Verdict.UNEXPLAINED
                return [Case.of(f"a {transfer}, cut", verdict, result, problem)], counts
            if result.code == 0:
                return [Case(f"a {transfer}, cut", Verdict.ACCEPTED)], counts
            counts["cut transfers"] += 1
        return [Case.of(f"a {transfer}, cut", Verdict.HUNG, result)], counts
    finally:
        relay.kill()
        relay.wait()
        daemon.adb("disconnect", _RELAY)


def _daemon(bench: Bench) -> Daemon:
    """Start a daemon in a network namespace, for the bench's process."""
    home = bench.folder / "home"
    home.mkdir()
    network = Network()
    daemon = Daemon(network, bench.workshop.folder / "adbd" / "adbd", home)
    bench.closers += [daemon.close, network.close]
    daemon.start()
    return daemon


def _make_files(folder: Path, random: Random) -> int:
    """Create a folder of files, some empty, and return their total size."""
    (folder / "inner").mkdir(parents=True)
    most = [100, 10_000, 1_000_000]
    sizes = [0, *(random.randint(1, random.choice(most)) for _ in range(random.randint(1, 6)))]
    for number, size in enumerate(sizes):
        name = f"inner/file {number}" if number % 2 else f"file-{number}"
        (folder / name).write_bytes(random.randbytes(size))
    return sum(sizes)


def _run_transfer(daemon: Daemon, transfer: str, source: Path, phone: Path, folder: Path) -> ProcessResult:
    if transfer == "run":
        arguments = [
            "android",
            "pull",
            "name",
            "--out",
            str(folder / "pulled"),
            "--folder",
            str(phone),
            "--log",
        ]
        command = [sys.executable, "-m", "prge.cli.main", *arguments]
    else:
        arguments = ["android", transfer, str(source), str(phone)]
        command = [sys.executable, __file__, *arguments[1:]]
    environment = {**daemon.environment, "ANDROID_SERIAL": _RELAY, "PYTHONPATH": _path()}
    try:
        done = daemon.network.run(command, env=environment)
    except subprocess.TimeoutExpired:
        return ProcessResult(tuple(arguments), -9, "", hung=True)
    return ProcessResult(tuple(arguments), done.returncode, done.stdout + done.stderr)


def _find_problem(transfer: str, source: Path, phone: Path, folder: Path, result: ProcessResult) -> str:
    """Describe an incomplete file under its final name, or a reported success that isn't one."""
    if transfer == "run":
        out = folder / "pulled"
        if out.exists() and _tree(out) != _tree(source):
            return "half of a run was pulled"
        remaining = [path.name for path in folder.iterdir() if path.name.startswith(".pull-")]
        return f"left behind: {remaining}" if remaining else ""
    if transfer == "file":
        there = [path for path in (phone / "data").glob("*") if path.suffix != ".new"]
        largest = _largest(source)
        if any(path.read_bytes() != largest.read_bytes() for path in there):
            return "half of a file has its name"
        return "" if there or result.code else "it was said to be there"
    is_marked, there_is = (phone / "bundles" / "sent.tree").exists(), phone / "bundles" / "sent"
    if (is_marked or result.code == 0) and _tree(there_is) != _tree(source):
        return "half of a folder is marked as whole"
    return ""


def _largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def _tree(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _path() -> str:
    return f"{REPOSITORY}:{Path(__file__).parent}"


def _relay(budgets: Sequence[int]) -> None:
    """Relay connections to the daemon; the first ones are cut after a number of bytes."""
    host, _, port = _RELAY.partition(":")
    server = socket.create_server((host, int(port)))
    print("listening", flush=True)
    remaining = list(budgets)
    while True:
        near, _ = server.accept()
        try:
            far = socket.create_connection((PHONE, PORT))
        except OSError:
            near.close()
            continue
        budget = [remaining.pop(0) if remaining else None]
        for source_socket, target_socket in ((near, far), (far, near)):
            threading.Thread(
                target=_pass_on, args=(source_socket, target_socket, budget), daemon=True
            ).start()


def _pass_on(source_socket: socket.socket, target_socket: socket.socket, budget: list[int | None]) -> None:
    try:
        while block := source_socket.recv(_BLOCK):
            remaining = budget[0]
            if remaining is not None:
                block, budget[0] = block[:remaining], remaining - min(remaining, len(block))
            target_socket.sendall(block)
            if budget[0] == 0:
                break
    except OSError:
        pass
    for each in (source_socket, target_socket):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _transfer(arguments: Sequence[str]) -> int:
    """Run one transfer by the code of `prge android`, with its error messages."""
    transfer, source, folder = arguments[0], Path(arguments[1]), arguments[2]
    try:
        phone = Phone(Adb(), folder)
        if transfer == "file":
            phone.send_file(_largest(source))
        else:
            phone.send_folder(source, phone.path("bundles", "sent"))
    except PrgeError as error:
        print(f"prge android: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def main(argv: Sequence[str]) -> int:
    """Run the relay, or one transfer."""
    if argv[0] == "relay":
        _relay([int(word) for word in argv[1:]])
    return _transfer(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
