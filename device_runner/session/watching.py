"""Who watches the loop of a run: progress on the terminal, metrics and summary in the run folder."""

from __future__ import annotations

import time
from dataclasses import asdict
from types import TracebackType

import numpy as np

from device_runner.engines.programs import Programs
from device_runner.session.inputs import RunInputs, make_estimator
from device_runner.session.sensors import Sensors
from device_runner.session.settings import RunSettings
from prge.errors import DivergenceError, PrgeError
from prge.estimators import Measurement
from prge.journal import Journal, Record, decode_array
from prge.memory import proportional_memory
from prge.progress import Progress
from prge.rows.scoring import METRIC_NAMES
from prge.run_folder import RunLog, write_summary


class Watcher:
    """Implements prge.training.Observer; `stopped` is set when the user asks for an end."""

    def __init__(
        self, settings: RunSettings, inputs: RunInputs, programs: Programs, journal: Journal
    ) -> None:
        self.settings = settings
        self.inputs = inputs
        self.programs = programs
        self.stopped = False
        self.log = RunLog(settings.out, keep_through=journal.steps)
        self.progress = Progress(settings.steps, quiet=settings.quiet)
        self.progress.skip(journal.steps)
        self.rows_of_step = make_estimator(settings).rows(programs.step.contract, settings.calls)
        last = self.log.records[-1] if self.log.records else {}
        self.earlier = float(last.get("seconds") or 0.0)
        known = [record.get("largest_tangent") for record in self.log.records]
        self.largest_tangent = max(filter(None, known), default=None)
        self.begin = self.last = time.perf_counter()
        self.final: Record = {}
        self.steps = journal.steps
        self.paused = 0.0
        self.sensors = {"start": Sensors().record()}
        self._catch_up(journal)

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

    def say(self, text: str) -> None:
        """Tell the user, and the log."""
        self.progress.note(text)
        for line in text.splitlines():
            self.log.text(line)

    def on_pause(self, seconds: float) -> None:
        """Leave a pause out of the seconds of the run."""
        self.paused += seconds
        self.begin += seconds
        self.last = time.perf_counter()

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """See prge.training.Observer."""
        self.steps = record["step"] + 1
        if measurement is not None:
            self._write_step(record, measurement)
            self.progress.update(self.steps, self.rows_of_step, loss=record["loss"])
        self.last = time.perf_counter()

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """See prge.training.Observer."""
        metrics = {name: record[name] for name in METRIC_NAMES if name in record}
        self.final = {"step": record["step"], "loss": record["loss"], **metrics}
        if fresh:
            self._write_evaluation(record)
            shown = "  ".join(
                f"{name} {value:.4g}" for name, value in [("loss", record["loss"]), *metrics.items()]
            )
            self.say(f"step {record['step']}: development rows: {shown}")
        self.last = time.perf_counter()

    def _catch_up(self, journal: Journal) -> None:
        """Write the metrics of what the journal holds and the process before had no time to tell."""
        written = {(record["event"], record["step"]) for record in self.log.records}
        for record in journal.records:
            with journal.reading(record):
                if record["kind"] == "step" and ("step", record["step"] + 1) not in written:
                    self._write_step(record, None)
                elif record["kind"] == "evaluation" and ("evaluation", record["step"]) not in written:
                    self._write_evaluation(record)

    def _write_step(self, record: Record, measurement: Measurement | None) -> None:
        now = time.perf_counter()
        engine_seconds = measurement.engine_seconds if measurement is not None else None
        tangent = self._note_tangent(measurement)
        self.log.metric(
            {
                "event": "step",
                "step": record["step"] + 1,
                "loss": record["loss"],
                "learning_rate": record["learning_rate"],
                **_size(record),
                "rows": (record["step"] + 1) * self.rows_of_step,
                "seconds": self.earlier + now - self.begin,
                "engine_seconds": engine_seconds,
                "host_seconds": None if engine_seconds is None else now - self.last - engine_seconds,
                **({} if tangent is None else {"largest_tangent": tangent}),
            }
        )

    def _write_evaluation(self, record: Record) -> None:
        last = self.log.last("evaluation")
        if last is not None and last["step"] >= record["step"]:  # a loss of power took it from the journal
            return
        metrics = {name: record[name] for name in ("loss", *METRIC_NAMES) if name in record}
        self.log.metric(
            {
                "event": "evaluation",
                "split": "dev",
                "step": record["step"],
                **metrics,
                "rows": record["step"] * self.rows_of_step,
                "seconds": self.earlier + time.perf_counter() - self.begin,
            }
        )

    def _note_tangent(self, measurement: Measurement | None) -> float | None:
        """The step's largest derivative, where it was measured; the run's largest is kept."""
        tangent = measurement.largest_tangent if measurement is not None else None
        if tangent is not None:
            self.largest_tangent = max(tangent, self.largest_tangent or 0.0)
        return tangent

    def _summarize(self, status: str) -> None:
        manifest = self.inputs.bundle.manifest
        settings = {name: str(v) if v is not None else None for name, v in asdict(self.settings).items()}
        write_summary(
            self.settings.out,
            run={
                "status": status,
                "settings": settings,
                "bundle": self.inputs.bundle.sha256,
                "program": manifest["files"]["program.pte"],
                "model": manifest["model"],
                "quantization": manifest.get("quantization"),
                "engine": self.programs.engine,
                "threads": self.programs.threads,
            },
            train={
                "steps": self.steps,
                "seconds": self.earlier + time.perf_counter() - self.begin,
                "paused_seconds": self.paused,
                "rows": self.steps * self.rows_of_step,
                "largest_tangent": self.largest_tangent,
                "training_rows": len(self.inputs.train),
                "development_rows": len(self.inputs.dev),
                "trained_values": self.inputs.adapter.size,
                "last_evaluation": self.final or None,
                "memory": {**self.log.memory.report(), "proportional": proportional_memory()},
                "sensors": {**self.sensors, "last": Sensors().record()},
            },
        )


def _size(record: Record) -> Record:
    """How large the derivatives of a step are."""
    if "gradient" in record:
        return {"gradient_norm": float(np.linalg.norm(decode_array(record["gradient"])))}
    return {"scalar_deviation": float(np.std(record["scalars"]))}
