"""A run in progress: reads its files from where the last read ended, within bounds whatever they hold.

new lines of metrics.jsonl and samples.jsonl -> records, thinned -> RunFacts -> what the page shows
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from device_runner.reporting.content import curves, prompt_text
from device_runner.reporting.run_reader import RunFacts, collect_run_facts
from device_runner.serving.page.about import describe_run
from device_runner.serving.page.stopping import PROCESSES, process_state
from device_runner.serving.protocol import Json
from device_runner.session.samples import sample_record
from prge.errors import shortened
from prge.formats.documents import mapping
from prge.formats.run_folder import CONFIG, METRICS, SAMPLES, SUMMARY, Record, metrics_record
from prge.system.memory import resident_bytes
from prge.system.regular_files import open_regular

# Bytes per read, which also bounds the length of a record's line.
MAX_BYTES = 4 << 20
# Records of an event that are kept; if there are more, every second one, then every fourth, ...
MAX_RECORDS = 4096
MAX_PROMPTS, MAX_ANSWERS, LONGEST_TEXT = 20, 4, 2000
# Steps by which the remaining time is estimated.
_RECENT = 32


class LineReader:
    """Reads whole lines of a growing file: those since the last read, or all if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._offset = 0, 0
        self.has_more = False

    def new(self) -> tuple[bool, list[bytes]]:
        """Return whether the file was replaced, and its next lines; no lines if it is not a regular file."""
        try:
            with open_regular(self._path, "rb") as stream:
                facts = os.fstat(stream.fileno())
                is_replaced = facts.st_ino != self._file or facts.st_size < self._offset
                self._file, self._offset = facts.st_ino, 0 if is_replaced else self._offset
                stream.seek(self._offset)
                content = stream.read(MAX_BYTES)
        except OSError:
            return False, []
        self.has_more = len(content) == MAX_BYTES
        # An incomplete line is left for the next read, unless it is longer than any record.
        end = content.rfind(b"\n") + 1 or (len(content) if self.has_more else 0)
        self._offset += end
        return is_replaced, content[:end].splitlines(keepends=True)


class ThinnedRecords:
    """Records in order, thinned evenly if there are many; always includes the newest one."""

    def __init__(self) -> None:
        self._kept: list[Record] = []
        self._newest: Record | None = None
        self._count, self._stride = 0, 1

    def add(self, record: Record) -> None:
        """Add the next record."""
        self._newest = record
        if self._count % self._stride == 0:
            self._kept.append(record)
        self._count += 1
        if len(self._kept) > MAX_RECORDS:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    @property
    def records(self) -> list[Record]:
        """The kept records, the oldest first."""
        is_kept = self._newest is None or self._kept[-1] is self._newest
        return self._kept if is_kept else [*self._kept, self._newest or {}]


class RunFollower:
    """A run that is read again and again, by one thread.

    Args:
        folder: the folder of the run.
        temperature: returns the temperature of this machine; None if it is unknown.
    """

    def __init__(self, folder: Path, temperature: Callable[[], float | None]) -> None:
        self.folder = folder
        self._temperature = temperature
        self._metrics, self._samples = LineReader(folder / METRICS), LineReader(folder / SAMPLES)
        self._documents: object = None
        self._forget_metrics()
        self._forget_samples()
        self._facts: RunFacts | None = None
        self._pictures: dict[str, list[Json]] = {}

    @property
    def has_more(self) -> bool:
        """Whether another read would find more at once."""
        return self._metrics.has_more or self._samples.has_more

    def read(self) -> RunFacts:
        """Read new records of the run, and return its facts."""
        is_replaced, lines = self._metrics.new()
        if is_replaced:
            self._forget_metrics()
        for line in lines:
            self._add_record(metrics_record(line))
        samples_replaced, samples = self._samples.new()
        if samples_replaced:
            self._forget_samples()
        for line in samples:
            self._add_sample(sample_record(line))
        documents = [file_stamp(self.folder / name) for name in (CONFIG, SUMMARY)]
        if self._facts is None or lines or samples or is_replaced or documents != self._documents:
            self._documents, self._pictures = documents, {}
            metrics = [*self._evaluations.records, *self._steps.records]
            self._facts = collect_run_facts(self.folder, metrics, [])
            self._description = describe_run(self.folder)
        return self._facts

    def snapshot(self, language: str, translate: Callable[[str], str]) -> Json:
        """Return the run's data for the page; `translate` translates its charts into `language`."""
        facts = self.read()
        if language not in self._pictures:
            self._pictures[language] = [
                {"svg": picture.drawing, "caption": picture.caption}
                for picture in curves(facts, translate)
                if picture.drawing
            ]
        running, process = process_state(self.folder)
        facts = replace(facts, running=running)
        score, newest = facts.score, facts.evaluations[-1] if facts.evaluations else None
        planned, waits = _count(facts.config.get("steps")), facts.run.get("waits_for")
        malformed = f"{METRICS}: {self._malformed} {translate('malformed lines')}"
        return {
            "status": shortened(facts.status, 40),
            "waits_for": shortened(str(waits), 200) if running and waits else None,
            # Before its first step, a run would stop at once, without a checkpoint to resume from.
            "can_stop": process is not None and facts.run.get("status") == "running",
            "steps": facts.steps,
            "planned": planned,
            "seconds": self._last.get("seconds"),
            "left": self._left(planned) if running else None,
            "forward_passes": self._last.get("forward_passes"),
            "loss": self._recent[-1].get("loss") if self._recent else None,
            "reward": self._recent[-1].get("reward") if self._recent else None,
            "score": score,
            "value": newest.get(score) if newest else None,
            "memory": _memory(facts, process),
            "temperature": self._temperature() if running else None,
            "evaluations": _evaluations(facts),
            "pictures": self._pictures[language],
            "samples": [
                {**json.loads(prompt), "answers": list(answers.values())}
                for prompt, answers in self._answers.items()
            ],
            "how": self._description,
            "problems": [*facts.problems, *([malformed] if self._malformed else [])],
        }  # fmt: skip

    def _forget_metrics(self) -> None:
        self._steps, self._evaluations = ThinnedRecords(), ThinnedRecords()
        self._recent: deque[Record] = deque(maxlen=_RECENT)
        self._last: Record = {}
        self._malformed = 0

    def _forget_samples(self) -> None:
        self._answers: OrderedDict[str, OrderedDict[int, Json]] = OrderedDict()

    def _add_record(self, record: Record | None) -> None:
        if record is None:
            self._malformed += 1
        elif record["event"] == "step":
            self._steps.add(record)
            self._recent.append(record)
            self._last = record
        elif record["event"] == "evaluation":
            self._evaluations.add(record)
            self._last = record

    def _add_sample(self, record: Record | None) -> None:
        """Keep a completion: of every prompt the first one and the newest ones."""
        if record is None:
            return
        right = shortened(record.get("right", ""), LONGEST_TEXT)
        key = json.dumps({"prompt": prompt_text(record["prompt"]), "right": right})
        if key not in self._answers and len(self._answers) == MAX_PROMPTS:
            return
        answers = self._answers.setdefault(key, OrderedDict())
        text = shortened(record["text"], LONGEST_TEXT)
        answers[record["step"]] = {"step": record["step"], "text": text}
        if len(answers) > MAX_ANSWERS:
            del answers[list(answers)[1]]

    def _left(self, planned: int | None) -> float | None:
        """Return the estimated seconds until the last step, from the pace of the newest steps."""
        if planned is None or len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        taken, spent = last["step"] - first["step"], (last.get("seconds") or 0) - (first.get("seconds") or 0)
        return max(0.0, spent / taken * (planned - last["step"])) if taken > 0 else None


def _evaluations(facts: RunFacts) -> list[Json]:
    """Return the first, the best and the last evaluation, as in a report, without duplicates."""
    newest = facts.evaluations[-1] if facts.evaluations else None
    by_step: dict[int, Json] = {}
    for name, record in (("before", facts.before), ("best", facts.best), ("last", newest)):
        if record is not None and record["step"] not in by_step:
            step, is_final = record["step"], record["step"] == facts.final_step
            values = {"loss": record.get("loss"), "value": record.get(facts.score)}
            by_step[step] = {"called": name, "step": step, "final": is_final, **values}
    return list(by_step.values())


def _memory(facts: RunFacts, process: int | None) -> int | None:
    """Return the bytes that a run's process uses now; for a run that has ended, its peak."""
    if process is not None:
        return resident_bytes(PROCESSES / str(process) / "status")
    return _count(mapping(facts.train.get("memory")).get("peak_bytes"))


def _count(value: Any) -> int | None:
    """Return a non-negative integer that a page can show; None otherwise."""
    return value if type(value) is int and 0 <= value < 10**15 else None


def file_stamp(path: Path) -> object:
    """Return a value that changes when a file is written again; None if there is no file."""
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size
