"""Feedback against a real `prge serve --learn`: hostile rows, kills, held locks, floods and full disks.

Training on honest rows must give the same bits whatever else is in the file, however often the server is
killed, and whether or not the disk was full for a while.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import damage
from outcome import Case, Findings, Verdict
from service import Service, start_service
from tables import TABLES
from workshop import Bench, enlarge_disk, mount_disk, unmount_disk

from prge.data.readers.feedback import AnswerRecord
from tests.hostile_feedback import HOSTILE_FEEDBACK, HOSTILE_TEMPLATE

_EVERY, _ROUNDS = 4, 2
_WORDS = ("aa", "bb", "cc", "dd")
_LEARN_SECONDS, _END_SECONDS, _HEALTH_SECONDS = 240.0, 5.0, 2.0
_LEARN = f"--learn-every {_EVERY} --learning-rate 0.01 --learn-epochs 2 --threads 1 --port 0"
# Fields of a row whose values must be texts.
_TEXTS = ("prompt", "answer", "rating")
_ASK = {"model": "base", "prompt": "aa", "max_tokens": 2}
_Json = dict[str, Any]


@dataclass(frozen=True)
class Learner:
    """A server that trains on feedback in a folder."""

    service: Service
    folder: Path

    @property
    def port(self) -> int:
        """The port of the server on localhost."""
        return int(self.service.output().split("/v1;")[0].rpartition(":")[2])

    def ask(self, path: str, body: object = None) -> tuple[int, _Json]:
        """Send a request and return status and JSON; raises OSError without a response in time."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path, content, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def correct(self, correction: str) -> tuple[int, _Json]:
        """Request a completion, and send a correction of it."""
        status, answer = self.ask("/v1/completions", _ASK)
        if status != 200:
            return status, answer
        return self.ask("/v1/feedback", {"id": answer["id"], "correction": correction})

    @property
    def finished_rounds(self) -> int:
        """Number of finished rounds."""
        rounds = self.ask("/v1/adapters")[1]["data"][1:]
        return sum(each["status"] in ("served", "refused") for each in rounds)

    def result(self) -> _Json:
        """Return the bytes of all trained adapters, and the history without times."""
        finals = sorted(self.folder.glob("rounds/*/final/adapter_model.safetensors"))
        history = self.ask("/v1/adapters")[1]["data"]
        untimed = [{name: value for name, value in each.items() if name != "seconds"} for each in history]
        return {"history": untimed, **{path.parts[-3]: path.read_bytes() for path in finals}}

    def end(self) -> float:
        """Send SIGTERM and return the seconds until the process ended; raises TimeoutExpired."""
        begin = time.monotonic()
        self.service.process.send_signal(signal.SIGTERM)
        self.service.process.wait(60)
        return time.monotonic() - begin


def attack_feedback(bench: Bench, random: Random, folder: Path) -> Findings:
    """Run one scene of feedback."""
    scenes, weights = zip(*_SCENES, strict=True)
    (scene,) = random.choices(scenes, weights)
    started: list[Service] = []
    try:
        findings: Findings = scene(_Stage(bench, random, folder, started))
        return findings
    except (RuntimeError, OSError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        has_ended = started and not started[-1].is_alive
        verdict = Verdict.CRASHED if has_ended else Verdict.HUNG
        if isinstance(error, RuntimeError):  # the server didn't start
            verdict = Verdict.UNEXPLAINED
        tail = started[-1].output() if started else ""
        return [Case(scene.__name__.strip("_"), verdict, "", f"{error!r}\n{tail[-3000:]}")], Counter()
    finally:
        for service in started:
            service.end()


@dataclass(frozen=True)
class _Stage:
    """Context of a scene: its folder, its random generator, and the servers that it starts."""

    bench: Bench
    random: Random
    folder: Path
    started: list[Service]

    @property
    def bundle(self) -> Path:
        """A bundle whose chat template refuses some messages."""
        return self.bench.once("bundle that refuses messages", self._make_bundle)

    def _make_bundle(self) -> Path:
        copy = self.bench.folder / "bundle-that-refuses"
        shutil.copytree(self.bench.workshop.bundle("decoder"), copy)
        (copy / "tokenizer" / "chat_template.jinja").write_text(HOSTILE_TEMPLATE)
        damage.rehash_bundle(copy)
        return copy

    def serve(self, learn: Path, *more: object) -> Learner:
        """Start a server that trains in a folder; raises RuntimeError with its output if it doesn't serve."""
        log = self.folder / f"server-{len(self.started)}.log"
        arguments = ["serve", self.bundle, "--learn", learn, *_LEARN.split(), *more]
        service = start_service(log, arguments, "Ctrl-C")
        self.started.append(service)
        return Learner(service, learn)

    def honest_result(self) -> _Json:
        """Return the result of training on honest rows alone."""
        return self.bench.once("learnt of honest rows", self._learn_honest)

    def _learn_honest(self) -> _Json:
        learn = self.folder / "honest"
        write_feedback(learn, honest_rows())
        learner = self.serve(learn)
        wait_for_rounds(learner)
        result = learner.result()
        learner.service.end()
        assert len(result) == 1 + _ROUNDS, result
        return result


def honest_rows() -> list[_Json]:
    """Return valid rows: corrections of texts and of conversations, as many as all rounds need."""
    rows = []
    for number in range(_EVERY * _ROUNDS):
        word = _WORDS[number % len(_WORDS)]
        prompt = {"prompt": f"{word} {number}"}
        if number % 2:
            prompt = {"messages": [{"role": "user", "content": f"{word} {number}"}]}  # type: ignore[dict-item]
        answered = AnswerRecord(f"cmpl-{number}", "bundle", "", prompt, " dd", {"seed": 1})
        rows.append(dict(answered.to_feedback(correction=" aa bb")))
        rows[-1]["time"] = "2026-01-01T00:00:00+00:00"
    return rows


def write_feedback(learn: Path, rows: Sequence[object]) -> None:
    """Write rows into feedback.jsonl of a learning folder."""
    learn.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (learn / "feedback.jsonl").write_text(lines, encoding="utf-8")
    (learn / "feedback.jsonl").chmod(0o600)


def wait_for_rounds(learner: Learner, ends: Callable[[], bool] = lambda: False) -> None:
    """Wait until all rounds are finished, or until `ends` returns True; raises TimeoutError."""
    deadline = time.monotonic() + _LEARN_SECONDS
    while not ends() and learner.finished_rounds < _ROUNDS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{learner.finished_rounds} of {_ROUNDS} rounds after {_LEARN_SECONDS:.0f} s")
        time.sleep(0.1)


def make_case(name: str, learner: Learner, verdict: Verdict, why: str = "") -> Findings:
    """Return one case of a server; a traceback in its log is always a failure."""
    log = learner.service.output()
    if "Traceback" in log or "Exception ignored" in log:
        verdict = Verdict.TRACEBACK
    command = " ".join(map(str, learner.service.process.args))  # type: ignore[arg-type]
    memory = learner.service.memory("VmHWM")
    return [Case(name, verdict, command, f"{why}\n{log[-3000:]}", memory=memory)], Counter(
        {"rounds": _ROUNDS}
    )


def _compare(name: str, stage: _Stage, learner: Learner) -> Findings:
    """Return the case of a server with finished rounds: its result must equal that of honest rows."""
    learnt, expected = learner.result(), stage.honest_result()
    apart = [each for each in learnt.keys() | expected.keys() if learnt.get(each) != expected.get(each)]
    verdict = Verdict.DIFFERENT if apart else Verdict.ACCEPTED
    return make_case(name, learner, verdict, f"otherwise: {sorted(apart)}" if apart else "")


def hostile_row(random: Random) -> tuple[str, object]:
    """Return a row that can't be trained on."""
    if random.random() < 0.6:
        name = random.choice(list(HOSTILE_FEEDBACK))
        return name, HOSTILE_FEEDBACK[name]
    row = {"id": "h", "prompt": "aa", "answer": " bb", "rating": "good"}
    name = random.choice(_TEXTS)
    value = random.choice([value for value in TABLES["strange"] if not isinstance(value, str)])
    return f"{name} is not a text", {**row, name: value}


def _hostile_rows(stage: _Stage) -> Findings:
    """Train on honest rows with hostile ones among them."""
    random, rows = stage.random, list[object](honest_rows())
    names = []
    for _ in range(random.choice([1, 1, 3, 40])):
        name, row = hostile_row(random)
        names.append(name)
        rows.insert(random.randint(0, len(rows)), row)
    write_feedback(stage.folder / "learn", rows)
    learner = stage.serve(stage.folder / "learn")
    wait_for_rounds(learner)
    return _compare(f"hostile row: {names[0]}" if len(names) == 1 else "hostile rows", stage, learner)


def _kills(stage: _Stage) -> Findings:
    """Kill a server or its child processes during training, and restart it until it is done."""
    stage.honest_result()
    learn, counts = stage.folder / "learn", Counter[str]()
    write_feedback(learn, honest_rows())
    for _ in range(stage.random.randint(3, 8)):
        learner = stage.serve(learn)
        until = time.monotonic() + stage.random.uniform(0, 4)
        seen = len(list(learn.rglob("*")))
        by_change = stage.random.random() < 0.5
        while time.monotonic() < until and not (by_change and len(list(learn.rglob("*"))) != seen):
            time.sleep(0.001)
        if stage.random.random() < 0.3:
            with suppress(OSError):  # the process may end at this moment
                counts["kills of its child process"] += learner.service.kill_children("round_process")
            time.sleep(stage.random.uniform(0, 0.3))
        learner.service.process.send_signal(
            stage.random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        )
        learner.service.process.wait(60)
        counts["kills"] += 1
        counts["kills of a server that learns"] += 1
    learner = stage.serve(learn)
    wait_for_rounds(learner)
    cases, more = _compare("killed while it learns", stage, learner)
    return cases, counts + more


def _lock(stage: _Stage) -> Findings:
    """Hold the lock of the feedback file: completions continue, and feedback is refused."""
    learn = stage.folder / "learn"
    write_feedback(learn, honest_rows()[:1])
    learner = stage.serve(learn)
    _, answer = learner.ask("/v1/completions", _ASK)
    with (learn / "feedback.jsonl").open("rb") as stream, ThreadPoolExecutor(1) as pool:
        fcntl.flock(stream, fcntl.LOCK_EX)
        body = {"id": answer["id"], "correction": " aa"}
        waiting = pool.submit(learner.ask, "/v1/feedback", body)
        ends_early, slowest = stage.random.random() < 0.3, 0.0
        while not waiting.done():
            begin = time.monotonic()
            learner.ask("/health")
            slowest = max(slowest, time.monotonic() - begin)
            learner.ask("/v1/completions", _ASK)
            if ends_early and stage.random.random() < 0.2:
                seconds = learner.end()
                with suppress(OSError, http.client.HTTPException):
                    waiting.result()
                verdict = Verdict.HUNG if seconds > _END_SECONDS else Verdict.ACCEPTED
                return make_case("an end while a lock is held", learner, verdict, f"{seconds:.1f} s")
        status, answer = waiting.result()
        fcntl.flock(stream, fcntl.LOCK_UN)
    again = learner.ask("/v1/feedback", body)
    why = f"{status} {answer}, then {again}; /health took {slowest:.2f} s at most"
    if slowest > _HEALTH_SECONDS:
        return make_case("a lock that is held", learner, Verdict.HUNG, why)
    is_right = status == 503 and again[0] == 200 and learner.ask("/health")[1]["status"] == "ok"
    return make_case(
        "a lock that is held", learner, Verdict.ACCEPTED if is_right else Verdict.UNEXPLAINED, why
    )


def _flood(stage: _Stage) -> Findings:
    """Send feedback as fast as possible."""
    learn = stage.folder / "learn"
    limit, size = stage.random.choice([20_000, 65_536]), stage.random.choice([1000, 2000])
    learner = stage.serve(learn, "--feedback-limit", limit)
    for _ in range(limit // size + 1):
        status, answer = learner.correct("a" * size)
        if status != 200:
            break
    kept = (learn / "feedback.jsonl").stat().st_size
    answers, _ = learner.ask("/v1/completions", _ASK)
    is_bounded = status == 507 and answers == 200 and kept <= limit
    why = f"{status} {answer}; {kept} bytes are kept"
    return make_case("a flood of feedback", learner, Verdict.REFUSED if is_bounded else Verdict.GREEDY, why)


def _full_disk(stage: _Stage) -> Findings:
    """Train on a disk that is full at first and has room later."""
    stage.honest_result()
    learn = stage.folder / "disk"
    learn.mkdir()
    is_mounted = mount_disk(learn, stage.random.choice([4, 6, 8, 12, 20, 40, 80]) * 4096)
    try:
        write_feedback(learn, honest_rows())
        learner = _served_with_room(stage, learn)
        wait_for_rounds(learner, lambda: learner.ask("/health")[1]["status"] != "ok")
        was = learner.ask("/health")[1]["status"]
        if is_mounted:
            enlarge_disk(learn)
        wait_for_rounds(learner)
        cases, counts = _compare(f"a disk that was full: {was}" if is_mounted else "a disk", stage, learner)
        if learner.ask("/health")[1]["status"] != "ok":
            return make_case(
                "a disk with room again", learner, Verdict.UNEXPLAINED, str(learner.ask("/health"))
            )
        return cases, counts
    finally:
        if is_mounted:
            for service in stage.started:
                service.end()
            unmount_disk(learn)


def _served_with_room(stage: _Stage, learn: Path) -> Learner:
    """Start a server on a disk that is too small; enlarge it if the server can't start."""
    try:
        return stage.serve(learn)
    except RuntimeError as refused:
        if "Traceback" in str(refused) or not os.path.ismount(learn):
            raise
        enlarge_disk(learn)
        return stage.serve(learn)


_SCENES: list[tuple[Callable[[_Stage], Findings], int]] = [
    (_hostile_rows, 8),
    (_kills, 3),
    (_lock, 3),
    (_flood, 2),
    (_full_disk, 3),
]
