"""Files on their way to and from a phone over adb, whose connection is cut after some bytes.

A real adb and a real adb daemon, in a network namespace of their own, with a relay between them that closes
each connection when its bytes are spent. What arrives is whole or isn't there under its name, and the next
try brings it. As a command, this module is the relay, or one transfer by the code that `prge android` uses.
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

from child import Ended
from outcome import Case, Found, Verdict, judged
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


def why_not(workshop: Workshop) -> str:
    """Why nothing can be sent here; empty if it can, and then the daemon lies in the workshop."""
    reason = lacking_for_network() or lacking_for_packages()
    if not reason and not (workshop.folder / "adbd" / "adbd").is_file():
        adbd_folder(workshop.folder / "adbd", default_cache())
    return reason


def attack_a_transfer(bench: Bench, random: Random, folder: Path) -> Found:
    """Send a file or a folder, or fetch a run, until it arrives; the first connections are cut."""
    daemon = bench.once("daemon", partial(_daemon, bench))
    what = random.choice(["file", "folder", "run"])
    source = folder / "source"
    size = _made(source, random)
    budgets = [random.randint(0, random.choice([300, 5000, 2 * size])) for _ in range(random.randint(1, 4))]
    phone = folder / "phone"
    if what == "run":
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
        relay.stdout.readline()  # it listens
        for _ in range(_TRIES):
            ended = _transferred(daemon, what, source, phone, folder)
            problem = _problem(what, source, phone, folder, ended)
            if problem or judged(ended) not in (None, Verdict.REFUSED):
                verdict = Verdict.DIFFERENT if problem else judged(ended) or Verdict.UNEXPLAINED
                return [Case.of(f"a {what}, cut", verdict, ended, problem)], counts
            if ended.code == 0:
                return [Case(f"a {what}, cut", Verdict.ACCEPTED)], counts
            counts["cut transfers"] += 1
        return [Case.of(f"a {what}, cut", Verdict.HUNG, ended)], counts
    finally:
        relay.kill()
        relay.wait()
        daemon.adb("disconnect", _RELAY)


def _daemon(bench: Bench) -> Daemon:
    """A daemon in a network of its own, for the bench's process."""
    home = bench.folder / "home"
    home.mkdir()
    network = Network()
    daemon = Daemon(network, bench.workshop.folder / "adbd" / "adbd", home)
    bench.closers += [daemon.close, network.close]
    daemon.start()
    return daemon


def _made(folder: Path, random: Random) -> int:
    """A folder of files, some empty, and all their bytes."""
    (folder / "inner").mkdir(parents=True)
    most = [100, 10_000, 1_000_000]
    sizes = [0, *(random.randint(1, random.choice(most)) for _ in range(random.randint(1, 6)))]
    for number, size in enumerate(sizes):
        name = f"inner/file {number}" if number % 2 else f"file-{number}"
        (folder / name).write_bytes(random.randbytes(size))
    return sum(sizes)


def _transferred(daemon: Daemon, what: str, source: Path, phone: Path, folder: Path) -> Ended:
    if what == "run":
        words = ["android", "pull", "name", "--out", str(folder / "pulled"), "--folder", str(phone), "--log"]
        command = [sys.executable, "-m", "prge.cli.main", *words]
    else:
        words = ["android", what, str(source), str(phone)]
        command = [sys.executable, __file__, *words[1:]]
    environment = {**daemon.environment, "ANDROID_SERIAL": _RELAY, "PYTHONPATH": _path()}
    try:
        done = daemon.network.run(command, env=environment)
    except subprocess.TimeoutExpired:
        return Ended(tuple(words), -9, "", hung=True)
    return Ended(tuple(words), done.returncode, done.stdout + done.stderr)


def _problem(what: str, source: Path, phone: Path, folder: Path, ended: Ended) -> str:
    """What is half there though it has its name, or isn't what was sent though it was said to be."""
    if what == "run":
        out = folder / "pulled"
        if out.exists() and _tree(out) != _tree(source):
            return "half of a run was pulled"
        left = [path.name for path in folder.iterdir() if path.name.startswith(".pull-")]
        return f"left behind: {left}" if left else ""
    if what == "file":
        there = [path for path in (phone / "data").glob("*") if path.suffix != ".new"]
        largest = _largest(source)
        if any(path.read_bytes() != largest.read_bytes() for path in there):
            return "half of a file has its name"
        return "" if there or ended.code else "it was said to be there"
    is_marked, there_is = (phone / "bundles" / "sent.tree").exists(), phone / "bundles" / "sent"
    if (is_marked or ended.code == 0) and _tree(there_is) != _tree(source):
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
    """Pass connections on to the daemon; the first ones are cut when so many bytes went through."""
    host, _, port = _RELAY.partition(":")
    server = socket.create_server((host, int(port)))
    print("listening", flush=True)
    left = list(budgets)
    while True:
        near, _ = server.accept()
        try:
            far = socket.create_connection((PHONE, PORT))
        except OSError:
            near.close()
            continue
        budget = [left.pop(0) if left else None]
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=_pass_on, args=(one, other, budget), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket, budget: list[int | None]) -> None:
    try:
        while block := one.recv(_BLOCK):
            left = budget[0]
            if left is not None:
                block, budget[0] = block[:left], left - min(left, len(block))
            other.sendall(block)
            if budget[0] == 0:
                break
    except OSError:
        pass
    for each in (one, other):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _transfer(words: Sequence[str]) -> int:
    """One transfer by the code of `prge android`, told as the command line would tell it."""
    what, source, folder = words[0], Path(words[1]), words[2]
    try:
        phone = Phone(Adb(), folder)
        if what == "file":
            phone.send_file(_largest(source))
        else:
            phone.send_folder(source, phone.path("bundles", "sent"))
    except PrgeError as error:
        print(f"prge android: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def main(argv: Sequence[str]) -> int:
    """The relay, or one transfer."""
    if argv[0] == "relay":
        _relay([int(word) for word in argv[1:]])
    return _transfer(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
