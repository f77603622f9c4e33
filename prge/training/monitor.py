"""The observer of a run: progress on the terminal, metrics and summary in the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any

import numpy as np

from prge.errors import DivergenceError, PrgeError, escape_control, format_value
from prge.formats.curves import merit_of, score_of
from prge.formats.journal import Journal, Record, decode_array
from prge.formats.run_folder import RunLog, write_summary
from prge.system.interrupts import ending_signals, handle_signals, ignore_interrupts
from prge.system.memory import proportional_memory
from prge.system.progress import Progress
from prge.training.estimators.protocol import Measurement
from prge.training.estimators.rollouts import DIVERGENCE, EQUAL_REWARDS, REWARD_FACTS
from prge.training.evaluation import METRIC_NAMES
from prge.training.settings import TrainingFlags


class RunMonitor:
    """Implements prge.training.loop.Observer: writes progress, metrics.jsonl, log.txt and run.json of a run.

    Attributes:
        stopped: set when the user asks to stop; the caller has to check it.
        newest: record of the latest evaluation; empty before the first one.
        summary_facts: further fields of the block `train` of run.json.

    Args:
        settings: settings of the run.
        taken: number of steps that earlier processes took.
        forward_passes: returns the forward passes of a number of steps.
        describe: returns the caller's fields of the blocks `run` and `train` of run.json.
    """

    def __init__(
        self,
        settings: TrainingFlags,
        taken: int,
        forward_passes: Callable[[int], int],
        describe: Callable[[], tuple[Record, Record]],
    ) -> None:
        self.settings = settings
        self.steps = taken
        self.forward_passes = forward_passes
        self.describe = describe
        self.stopped = False
        self.summary_facts: Record = {}
        self.log = RunLog(settings.out, keep_through=taken)
        self.progress = Progress(settings.steps, quiet=settings.quiet)
        self.progress.skip(taken)
        self._written = {(record["event"], record["step"]) for record in self.log.records}
        last = self.log.records[-1] if self.log.records else {}
        self._earlier_seconds = float(last.get("seconds") or 0.0)
        self._evaluation_seconds = float(last.get("evaluation_seconds") or 0.0)
        tangents = [record.get("largest_tangent") for record in self.log.records]
        self._largest_tangent = max(filter(None, tangents), default=None)
        self._before: Record | None = None
        self._best: Record | None = None
        self._final: int | None = None
        for record in self.log.records:
            if record["event"] == "evaluation":
                self._judge(record)
        self.newest: Record = self.log.last("evaluation") or {}
        self._paused, self._waits_for = 0.0, ""
        self._memory: Record | None = None
        self._examples = int(describe()[1].get("training_rows") or 0)
        self.start_clock()

    def __enter__(self) -> RunMonitor:
        self._summarize("running")
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
        """Duration of the run, without pauses."""
        return self._earlier_seconds + time.perf_counter() - self._start

    def start_clock(self) -> None:
        """Start measuring the duration and the memory of this part of the run."""
        self.log.memory.start()
        self._start = self._last_time = time.perf_counter()

    def stop_clock(self) -> None:
        """Stop measuring the duration and the memory of the run, at the end of training."""
        self._earlier_seconds, self._memory = self.seconds, self.log.memory.report()
        self.start_clock()

    def note(self, text: str) -> None:
        """Print a message and write it to the log."""
        text = escape_control(text)  # it may quote a row
        self.progress.note(text)
        for line in text.split("\n"):
            self.log.text(line)

    def on_wait(self, why: str) -> None:
        """Write to run.json what a pause waits for."""
        self._waits_for = why
        self._summarize("running")

    def on_pause(self, seconds: float) -> None:
        """Exclude a pause from the duration of the run."""
        self.progress.exclude(seconds, recurring=False)
        self._paused += seconds
        self._start += seconds
        self.on_wait("")
        self._last_time = time.perf_counter()

    def catch_up(self, journal: Journal) -> None:
        """Write the metrics of journaled steps and evaluations that an earlier process didn't write."""
        for record in journal.records:
            with journal.reading(record):
                if record["type"] == "step" and ("step", record["step"] + 1) not in self._written:
                    self._write_step(record, None)
                elif record["type"] == "evaluation":
                    self._write_evaluation(record)

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """See prge.training.loop.Observer."""
        self.steps = max(self.steps, record["step"] + 1)
        if measurement is not None:
            self._write_step(record, measurement)
            tokens = record["completion_tokens"] if "completion_tokens" in record else record["tokens"]
            self.progress.update(self.steps, tokens, **self._bar_values(record))
        self._last_time = time.perf_counter()

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """See prge.training.loop.Observer."""
        self.on_samples()
        self.newest = record
        if fresh:
            self._write_evaluation(record)
            self.note(f"step {record['step']}: development rows: {_figures_text(record)}")
        self._last_time = time.perf_counter()

    def on_samples(self) -> None:
        """Count the time of completing prompts, which just ended, as evaluation time."""
        now = time.perf_counter()
        self._evaluation_seconds += now - self._last_time
        self.progress.exclude(now - self._last_time)
        self._last_time = now

    def report_final(self, step: int, evaluation: Record) -> None:
        """Report the step of the result, and the first, the best and the last evaluation."""
        self._final = step
        figures = f": {_figures_text(evaluation)}" if evaluation else ""
        self.note(f"final: step {step} of {self.steps}{figures}")
        evaluations: dict[str, Record] = {}
        for name, record in (("before", self._before), ("best", self._best), ("last", self.newest)):
            if record and record["step"] not in {each["step"] for each in evaluations.values()}:
                evaluations[name] = record
        if len(evaluations) > 1:
            self.note(evaluation_table(evaluations, step))
        if count := self._equal_rewards:
            self.note(
                f"{count} of {self.steps} steps learned nothing, because their completions had equal rewards"
            )

    def _judge(self, record: Record) -> None:
        """Record an evaluation as the one at the start, or as the best so far."""
        if record.get("value") is None:  # not finite, or from a version that had no `value`
            return
        if record["step"] == 0:
            self._before = record
        if self._best is None or merit_of(record) > merit_of(self._best):
            self._best = record

    def _bar_values(self, record: Record) -> dict[str, float | str | None]:
        """Return the values that the progress bar shows for a step."""
        figures: dict[str, float | str | None] = {"loss": record["loss"]}
        if "reward" in record:
            figures = {"reward": record["reward"], "solved": record["solved"]}
        if self._best is not None:
            # The best step may have been chosen by its loss instead of the metric.
            by_loss = self.settings.select == "loss"
            name, best = ("loss", self._best["loss"]) if by_loss else score_of(self._best)
            figures[f"best dev {name.replace('_', ' ')}"] = best
        if self._examples and "rows" in record:
            batches = self.steps / self.settings.steps_per_batch
            figures["epoch"] = f"{batches * len(record['rows']) / self._examples:.2f}"
        peak = self.log.memory.peak
        figures["memory"] = None if peak is None else f"{peak / 1e6:,.0f} MB"
        return figures

    def _write_step(self, record: Record, measurement: Measurement | None) -> None:
        figures = {**_figures(record, measurement), **self._engine_metrics(measurement)}
        if record.get(EQUAL_REWARDS):
            if measurement is not None and not self._equal_rewards:
                self.note(_equal_rewards_text(record))
            figures[EQUAL_REWARDS] = True
        self._write("step", record["step"] + 1, figures)

    @property
    def _equal_rewards(self) -> int:
        """Number of steps from whose rewards nothing could be learned."""
        return sum(record.get(EQUAL_REWARDS) is True for record in self.log.records)

    def _write_evaluation(self, record: Record) -> None:
        self._judge(record)
        last = self.log.last("evaluation")
        if last is not None and last["step"] >= record["step"]:  # the journal lost it in a power failure
            return
        figures = {"split": "dev", **_evaluation(record), "value": record["value"]}
        self._write("evaluation", record["step"], figures)

    def _write(self, event: str, step: int, figures: Record) -> None:
        if (event, step) not in self._written:
            counts = {
                "forward_passes": self.forward_passes(step),
                "seconds": self.seconds,
                "evaluation_seconds": self._evaluation_seconds,
            }
            self.log.metric({"event": event, "step": step, **figures, **counts})

    def _engine_metrics(self, measurement: Measurement | None) -> Record:
        """Return the seconds of a step inside and outside of the engine, and the largest tangent, if any."""
        if measurement is None:
            return {"engine_seconds": None, "host_seconds": None}
        tangent, inside = measurement.largest_tangent, measurement.engine_seconds
        times = {"engine_seconds": inside, "host_seconds": time.perf_counter() - self._last_time - inside}
        if tangent is None:
            return times
        self._largest_tangent = max(tangent, self._largest_tangent or 0.0)
        return {**times, "largest_tangent": tangent}

    def _summarize(self, status: str) -> None:
        run, train = self.describe()
        settings = {name: None if v is None else str(v) for name, v in asdict(self.settings).items()}
        memory = self._memory or self.log.memory.report()
        waits_for = (status == "running" and self._waits_for) or None
        write_summary(
            self.settings.out,
            run={"status": status, "waits_for": waits_for, "settings": settings, **run},
            train={
                "steps": self.steps,
                "seconds": self._earlier_seconds if self._memory else self.seconds,
                "evaluation_seconds": self._evaluation_seconds,
                "paused_seconds": self._paused,
                "forward_passes": self.forward_passes(self.steps),
                "largest_tangent": self._largest_tangent,
                "last_evaluation": _evaluation(self.newest) or None,
                "last_value": self.newest.get("value"),
                "before": _evaluation(self._before or {}) or None,
                "best": _evaluation(self._best or {}) or None,
                "best_value": (self._best or {}).get("value"),
                "final_step": self._final,
                **train,
                **self.summary_facts,
                "memory": {**memory, "proportional": proportional_memory(), **train.get("memory", {})},
            },
        )


@contextmanager
def graceful_stop(monitor: RunMonitor) -> Iterator[None]:
    """Stop the run after its step at Ctrl-C, SIGTERM or SIGHUP; at once at a second signal."""

    def stop(number: int, frame: object) -> None:
        if monitor.stopped:
            ignore_interrupts()
            raise KeyboardInterrupt
        monitor.stopped = True
        monitor.note("stopping after this step; press Ctrl-C again to stop at once")

    with handle_signals(stop, ending_signals()):
        yield


def describe_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt in one line: its text, or the content of its last message."""
    return format_value(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def describe_changes(before: Sequence[str], after: Sequence[str]) -> str:
    """Return a sentence on how many sampled answers training changed; empty if there are none to compare."""
    pairs = list(zip(before, after, strict=False))
    changed = sum(first != second for first, second in pairs)
    if not pairs:
        return ""
    if not changed:
        return f"note: training changed none of the {len(pairs)} sampled answers"
    return f"{changed} of {len(pairs)} sampled answers changed"


def evaluation_table(records: Mapping[str, Record], final: int | None) -> str:
    """Format evaluations as a table with a line for each name; the step `final` is marked."""
    name = score_of(next(iter(records.values())))[0]
    columns = ("reward", "solved") if name == "reward" else tuple(dict.fromkeys(("loss", name)))
    lines = ["".join([f"{'development rows':<18}{'step':>8}", *(f"{column:>12}" for column in columns)])]
    for called, record in records.items():
        cells = (f"{'-' if record.get(each) is None else f'{record[each]:.4g}':>12}" for each in columns)
        mark = "  in final/" if record["step"] == final else ""
        lines.append("".join([f"{called:<18}{record['step']:>8}", *cells, mark]))
    return "\n".join(lines)


def _figures_text(record: Record) -> str:
    """Format loss and metrics of an evaluation in one line."""
    shown = ("reward", "solved", "completion_length") if "reward" in record else ("loss", *METRIC_NAMES)
    figures = {name: record[name] for name in shown if name in record}
    return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())


def _equal_rewards_text(record: Record) -> str:
    """Return a message on the first step from whose rewards nothing can be learned."""
    step, reward = record["step"] + 1, record["reward"]
    if record["reward_std"] == 0:
        what = f"all completions have the reward {reward:.4g}"
    else:
        what = "completions that are compared with each other have equal rewards"
    return f"step {step}: {what}: there is nothing to learn from this step"


def _evaluation(record: Record) -> Record:
    """Return the step, the loss and the metrics of a record."""
    return {name: record[name] for name in ("step", "loss", *METRIC_NAMES) if name in record}


def _figures(record: Record, measurement: Measurement | None) -> Record:
    """Return the metrics of a step: loss, learning rate, tokens, and the size of its gradient."""
    figures = {name: record.get(name) for name in ("loss", "learning_rate", "tokens")}
    figures |= {name: record[name] for name in (*REWARD_FACTS, DIVERGENCE) if name in record}
    return {**figures, **_gradient_size(record, measurement)}


def _gradient_size(record: Record, measurement: Measurement | None) -> Record:
    """Return the norm of a step's gradient, or the deviation of its projected gradients."""
    if "gradient" in record:
        # Decoding the record's gradient, megabytes of text for a large adapter, takes time.
        gradient = None if measurement is None else measurement.gradient
        if gradient is None:
            gradient = decode_array(record["gradient"])
        return {"gradient_norm": float(np.linalg.norm(gradient))}
    if "projected_gradients" in record:
        return {"projected_gradient_std": float(np.std(record["projected_gradients"]))}
    return {}
