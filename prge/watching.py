"""Who watches the loop of a run: progress on the terminal, metrics and summary in the run folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType

import numpy as np

from prge.errors import DivergenceError, PrgeError
from prge.estimators import Measurement
from prge.journal import Journal, Record, decode_array
from prge.memory import proportional_memory
from prge.progress import Progress
from prge.rows.scoring import METRIC_NAMES
from prge.run_folder import RunLog, write_summary
from prge.training_flags import TrainingFlags


class Watcher:
    """Implements prge.training.Observer; `stopped` is set when the user asks for an end.

    Args:
        settings: of the run.
        taken: steps that it has taken before.
        describe: the blocks `run` and `train` of run.json, as far as whoever trains knows them.
    """

    def __init__(
        self, settings: TrainingFlags, taken: int, describe: Callable[[], tuple[Record, Record]]
    ) -> None:
        self.settings = settings
        self.steps = taken
        self.describe = describe
        self.stopped = False
        self.log = RunLog(settings.out, keep_through=taken)
        self.progress = Progress(settings.steps, quiet=settings.quiet)
        self.progress.skip(taken)
        self._written = {(record["event"], record["step"]) for record in self.log.records}
        last = self.log.records[-1] if self.log.records else {}
        self.rows = int(last.get("rows") or 0)
        self._earlier = float(last.get("seconds") or 0.0)
        self._evaluating = float(last.get("evaluation_seconds") or 0.0)
        known = [record.get("largest_tangent") for record in self.log.records]
        self._largest_tangent = max(filter(None, known), default=None)
        self._evaluation = _evaluation(self.log.last("evaluation") or {}) or None
        self._paused = 0.0
        self._memory: Record | None = None
        self.start_clock()

    def __enter__(self) -> Watcher:
        self._summarize("running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.close()
        if error is None:
            self._summarize("completed" if self.steps == self.settings.steps else "stopped early")
        else:
            status = "diverged" if isinstance(error, DivergenceError) else "failed"
            self._summarize("interrupted" if isinstance(error, KeyboardInterrupt) else status)
            if isinstance(error, PrgeError):
                self.log.text(f"error: {error}")
        self.log.close()

    @property
    def seconds(self) -> float:
        """Seconds of the run, without pauses."""
        return self._earlier + time.perf_counter() - self._begin

    def start_clock(self) -> None:
        """Count the seconds of this part of the run from now on."""
        self._begin = self._last = time.perf_counter()

    def stop_clock(self) -> None:
        """Training is over: what comes now counts neither as seconds nor as memory of the run."""
        self._earlier, self._memory = self.seconds, self.log.memory.report()
        self.start_clock()

    def say(self, text: str) -> None:
        """Tell the user, and the log."""
        self.progress.note(text)
        for line in text.splitlines():
            self.log.text(line)

    def on_pause(self, seconds: float) -> None:
        """Leave a pause out of the seconds of the run."""
        self._paused += seconds
        self._begin += seconds
        self._last = time.perf_counter()

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """See prge.training.Observer."""
        self.steps = max(self.steps, record["step"] + 1)
        now = time.perf_counter()
        if measurement is not None:
            self.rows += measurement.rows
        self._metric("step", record["step"] + 1, {**_figures(record), **self._of_engine(measurement, now)})
        self._last = now
        if measurement is not None:
            self.progress.update(self.steps, measurement.rows, loss=record["loss"])

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """See prge.training.Observer."""
        now = time.perf_counter()
        self._evaluating += now - self._last
        self._evaluation = _evaluation(record)
        self._metric("evaluation", record["step"], {"split": "dev", **self._evaluation})
        if fresh:
            self.say(f"step {record['step']}: development rows: {figures_text(record)}")
        self._last = time.perf_counter()

    def catch_up(self, journal: Journal, rows: int) -> None:
        """Write the metrics that a killed process had no time for, of a run whose steps take so many rows."""
        for record in journal.records:
            with journal.reading(record):
                if record["kind"] == "step" and ("step", record["step"] + 1) not in self._written:
                    self.rows = (record["step"] + 1) * rows
                    figures = {**_figures(record), **self._of_engine(None, 0.0)}
                    self._metric("step", record["step"] + 1, figures)
                elif record["kind"] == "evaluation" and ("evaluation", record["step"]) not in self._written:
                    self.rows = record["step"] * rows
                    self._metric("evaluation", record["step"], {"split": "dev", **_evaluation(record)})
        self.rows = journal.steps * rows

    def _metric(self, event: str, step: int, figures: Record) -> None:
        """Write a record, once for every event of a step."""
        if (event, step) not in self._written:
            self._written.add((event, step))
            counts = {"rows": self.rows, "seconds": self.seconds, "evaluation_seconds": self._evaluating}
            self.log.metric({"event": event, **figures, "step": step, **counts})

    def _of_engine(self, measurement: Measurement | None, now: float) -> Record:
        """A step's seconds in the engine and around it, and its largest derivative where there is one."""
        if measurement is None:
            return {"engine_seconds": None, "host_seconds": None}
        tangent, inside = measurement.largest_tangent, measurement.engine_seconds
        times = {"engine_seconds": inside, "host_seconds": now - self._last - inside}
        if tangent is None:
            return times
        self._largest_tangent = max(tangent, self._largest_tangent or 0.0)
        return {**times, "largest_tangent": tangent}

    def _summarize(self, status: str) -> None:
        run, train = self.describe()
        settings = {name: None if v is None else str(v) for name, v in asdict(self.settings).items()}
        memory = self._memory or self.log.memory.report()
        write_summary(
            self.settings.out,
            run={"status": status, "settings": settings, **run},
            train={
                "steps": self.steps,
                "seconds": self._earlier if self._memory else self.seconds,
                "evaluation_seconds": self._evaluating,
                "paused_seconds": self._paused,
                "rows": self.rows,
                "largest_tangent": self._largest_tangent,
                "last_evaluation": self._evaluation,
                **train,
                "memory": {**memory, "proportional": proportional_memory(), **train.get("memory", {})},
            },
        )


@contextmanager
def graceful_stop(watcher: Watcher) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run after its step, a second one at once."""

    def stop(number: int, frame: object) -> None:
        if watcher.stopped:
            raise KeyboardInterrupt
        watcher.stopped = True
        watcher.say("stopping after this step; once more to stop at once")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def figures_text(record: Record) -> str:
    """Loss and metric of a record, for a person."""
    figures = {name: value for name, value in _evaluation(record).items() if name != "step"}
    return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())


def _evaluation(record: Record) -> Record:
    """Step, loss and metric of a record."""
    return {name: record[name] for name in ("step", "loss", *METRIC_NAMES) if name in record}


def _figures(record: Record) -> Record:
    """Loss and learning rate of a step, and the size of its derivatives."""
    return {"loss": record["loss"], "learning_rate": record["learning_rate"], **_size(record)}


def _size(record: Record) -> Record:
    """How large the derivatives of a step are, where the record has them."""
    if "gradient" in record:
        return {"gradient_norm": float(np.linalg.norm(decode_array(record["gradient"])))}
    return {"scalar_deviation": float(np.std(record["scalars"]))} if "scalars" in record else {}
