"""Compare a server that learns with one that only serves, and with `prge run`, on one machine.

    python scripts/bench/serve.py --learn BUNDLE ROWS [--requests 200] [--tokens 32] [--json FILE]

ROWS are jsonl with prompt and completion; they are the requests, and the corrections to train on. Both
servers get requests in turns, while the other one is stopped with its training process. The server that
learns has more feedback than it can train on. Requests are sequential, with a pause for training steps.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prge.cli.subprocesses import read_json, run_verb, started
from prge.data.readers.feedback import AnswerRecord, append_feedback
from prge.data.readers.files import read_rows

# Requests of a turn, seconds between them, and seconds of training without requests.
_TURN, _PAUSE, _IDLE_SECONDS = 10, 0.1, 20.0
# Epochs of a round, which makes it last longer than the measurement.
_EPOCHS = 100_000


@dataclass
class Served:
    """A server, and timings of its responses."""

    process: subprocess.Popen[str]
    port: int
    first: list[float] = field(default_factory=list)
    seconds: float = 0.0
    decoding: float = 0.0
    tokens: int = 0

    def ask(self, prompt: str, tokens: int) -> None:
        """Request a completion, and time its first chunk and its end."""
        body = {"model": "base", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        options = {"stream_options": {"include_usage": True}}
        begin, first = time.perf_counter(), 0.0
        connection.request(
            "POST", "/v1/completions", json.dumps({**body, **options}), {"Content-Type": "application/json"}
        )
        for line in connection.getresponse():
            first = first or (time.perf_counter() - begin if line.startswith(b"data:") else 0.0)
            if match := re.search(rb'"completion_tokens": (\d+)', line):
                self.tokens += int(match[1])
        self.seconds += time.perf_counter() - begin
        self.decoding += time.perf_counter() - begin - first
        self.first.append(first)
        connection.close()

    @property
    def learner(self) -> list[int]:
        """The id of the server's training process, if there is one."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        numbers = [int(number) for path in tasks for number in path.read_text().split()]
        return [each for each in numbers if b"round_process" in Path(f"/proc/{each}/cmdline").read_bytes()]

    def stop(self) -> None:
        """Stop the server and its training process."""
        for number in (self.process.pid, *self.learner):
            os.kill(number, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the server and its training process."""
        for number in (self.process.pid, *self.learner):
            os.kill(number, signal.SIGCONT)

    def figures(self) -> dict[str, float]:
        """Return the seconds to the first token, and tokens per second."""
        ordered = sorted(self.first)
        return {
            "first_token_median": statistics.median(ordered),
            "first_token_95th": ordered[int(0.95 * (len(ordered) - 1))],
            "tokens_per_second": self.tokens / self.seconds,
            "tokens_per_second_after_first": (self.tokens - len(self.first)) / self.decoding,
            "anonymous_mb": _anonymous_bytes(self.process.pid) / 1e6,
            "learner_anonymous_mb": sum(map(_anonymous_bytes, self.learner)) / 1e6,
        }


def _anonymous_bytes(number: int) -> int:
    """Return a process's memory that no file backs."""
    status = Path(f"/proc/{number}/status").read_text()
    return 1024 * sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)))


@contextmanager
def serving(bundle: Path, threads: int, *arguments: object) -> Iterator[Served]:
    """Start a server of a bundle and yield it when it listens."""
    command = ["serve", bundle, "--port", 0, "--threads", threads, "--slots", 1, *arguments]
    with started(*command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "listening" in line)
            yield Served(process, int(re.search(r":(\d+)/", line)[1]))  # type: ignore[index]
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def count_steps(journal: Path) -> int:
    """Return the number of steps in a round's journal."""
    return journal.read_bytes().count(b'"type":"step"') if journal.is_file() else 0


def measure(
    bundle: Path, rows: Path, requests: int, tokens: int, threads: int, folder: Path
) -> dict[str, Any]:
    """Measure all figures."""
    examples = [(str(row.fields["prompt"]), str(row.fields["completion"])) for row in read_rows(rows)]
    learn = folder / "learn"
    learn.mkdir()
    answers = [
        AnswerRecord(str(number), "m", "", {"prompt": prompt}, " ?", {})
        for number, (prompt, _) in enumerate(examples)
    ]
    corrections = [
        each.to_feedback(correction=better) for each, (_, better) in zip(answers, examples, strict=True)
    ]
    append_feedback(learn / "feedback.jsonl", corrections)
    learning = ["--learn", learn, "--learn-every", len(examples), "--learn-epochs", _EPOCHS, "--replay", 0]
    journal = learn / "rounds" / "0001" / "journal.jsonl"
    with ExitStack() as held:
        plain_server = held.enter_context(serving(bundle, threads))
        learning_server = held.enter_context(serving(bundle, threads, *learning))
        while count_steps(journal) < 5:
            time.sleep(0.1)
        steps_between, seconds_between = 0, 0.0
        for start in range(0, requests, _TURN):
            for server, other in ((plain_server, learning_server), (learning_server, plain_server)):
                other.stop()
                server.resume()
                begin, before = time.perf_counter(), count_steps(journal)
                for number in range(start, start + _TURN):
                    time.sleep(_PAUSE)
                    server.ask(examples[number % len(examples)][0], tokens)
                if server is learning_server:
                    steps_between, seconds_between = (
                        steps_between + count_steps(journal) - before,
                        seconds_between + time.perf_counter() - begin,
                    )
        plain_server.stop()
        begin, before = time.perf_counter(), count_steps(journal)
        time.sleep(_IDLE_SECONDS)
        idle = (count_steps(journal) - before) / (time.perf_counter() - begin)
        server_figures = {"alone": plain_server.figures(), "learning": learning_server.figures()}
    run = _measure_run(bundle, rows, threads, max(20, int(idle * _IDLE_SECONDS)), folder / "run")
    both = [server_figures[name] for name in ("learning", "alone")]
    return {
        **server_figures,
        "tokens_learning_over_alone": both[0]["tokens_per_second"] / both[1]["tokens_per_second"],
        "tokens_after_first_learning_over_alone": both[0]["tokens_per_second_after_first"]
        / both[1]["tokens_per_second_after_first"],
        "first_token_learning_over_alone": both[0]["first_token_median"] / both[1]["first_token_median"],
        "steps_per_second_between_requests": steps_between / seconds_between,
        "steps_per_second_idle": idle,
        "steps_per_second_run": run,
        "steps_idle_over_run": idle / run,
        "requests": requests,
    }


def _measure_run(bundle: Path, rows: Path, threads: int, steps: int, out: Path) -> float:
    """Return steps per second of `prge run` on the same rows, with the settings of a round."""
    arguments = [
        "--bundle",
        bundle,
        "--train",
        rows,
        "--steps",
        steps,
        "--batch-size",
        4,
        "--threads",
        threads,
    ]
    run_verb("run", *arguments, "--eval-steps", 0, "--out", out, "--quiet", quiet=True)
    return steps / float(read_json(out / "run.json")["train"]["seconds"])


def main(argv: Sequence[str]) -> int:
    """Parse the flags, measure and print JSON."""
    parser = argparse.ArgumentParser(prog="serve.py --learn", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="prge-learning-"))
    try:
        figures = measure(
            options.bundle, options.rows, options.requests, options.tokens, options.threads, folder
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
