"""Shared measurements: random models, exports in processes of their own, and timed steps."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.session.plan import plan_run
from device_runner.session.settings import RunSettings
from prge.cli.subprocesses import verb_command
from prge.engine import Target, TokenSequence
from prge.formats.bundle import open_bundle, read_chain, read_manifest
from prge.formats.peft import read_peft
from prge.objectives.examples import Example
from prge.training.estimators.protocol import Estimator, Measurement, Step
from prge.training.estimators.table import EstimatorName, make_estimator


@contextmanager
def random_model(name: str, layers: int | None = None) -> Iterator[Path]:
    """Yield a temporary folder in which `model` is an architecture with random weights."""
    # Imported late: a measured process must not import the exporter.
    from server_export.checkpoint.random_models import save_random_model

    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder, "model"), name, layers)
        yield Path(folder)


def export(model: Path, out: Path, *flags: object) -> dict[str, float]:
    """Run `prge export`; return its seconds, processor seconds and peak memory."""
    begin = time.monotonic()
    command = verb_command("export", "--model", model, "--out", out, "--no-cache", *flags)
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"prge export ended with code {os.waitstatus_to_exitcode(status)}")
    return {
        "seconds": time.monotonic() - begin,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_mb": usage.ru_maxrss * 1024 / 1e6,
    }


def minimum_loaded_bytes(bundle: Path) -> int:
    """Return the minimum bytes of weights that must be loaded."""
    return max(_loaded_bytes(bundle))


def all_weights_bytes(bundle: Path) -> int:
    """Return the bytes of all weights, which leaves nothing for activations."""
    return sum(_loaded_bytes(bundle))


def _loaded_bytes(bundle: Path) -> list[int]:
    manifest = read_manifest(bundle)
    return read_chain(bundle, manifest).loaded_bytes(lambda name: int(manifest["files"][name]["bytes"]))


def folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


@dataclass
class TimedStep:
    """A repeatable step on an opened bundle."""

    opened: OpenEngine
    estimator: Estimator
    step: Step

    def __call__(self) -> tuple[float, Measurement]:
        """Take the step once; return seconds and the measurement."""
        begin = time.perf_counter()
        measurement = self.estimator.measure(self.opened.engine, self.step)
        return time.perf_counter() - begin, measurement

    def seconds(self) -> float:
        """Return the seconds of one step."""
        return self()[0]

    def with_loss(self) -> tuple[float, float]:
        """Return seconds and loss of one step."""
        seconds, measurement = self()
        return seconds, measurement.loss


def full_examples(rows: Sequence[Sequence[int]]) -> list[Example]:
    """Return examples of rows of tokens, in which all tokens after the first are targets."""
    return [
        Example(number, (TokenSequence(tuple(tokens), _all_targets(tokens)),), 1, None)
        for number, tokens in enumerate(rows)
    ]


def _all_targets(tokens: Sequence[int]) -> tuple[Target, ...]:
    weight = 1 / (len(tokens) - 1)
    return tuple(Target(position, token, weight, 0) for position, token in enumerate(tokens[1:]))


def timed_step(
    folder: Path,
    estimator: EstimatorName,
    rows: int,
    tokens: int,
    threads: int | None = None,
    queries: int = 4,
    loaded: int | None = None,
) -> TimedStep:
    """Return a step on random rows, all of whose tokens are targets.

    Args:
        folder: folder of a bundle.
        estimator: estimator as in `prge run`.
        rows: rows of the step.
        tokens: tokens of a row.
        threads: threads of the engine.
        queries: queries of an estimator that has any.
        loaded: maximum bytes of loaded weights and, if all are loaded, of saved activations.
    """
    settings_fields: dict[str, Any] = {"bundle": folder, "train": folder, "out": folder}
    if estimator != "exact":
        settings_fields["queries"] = queries
    settings = RunSettings(**settings_fields, estimator=estimator, batch_size=rows)
    bundle = open_bundle(folder)
    plan = plan_run(bundle, [], settings)
    opened = open_engine(bundle, plan.role, threads=threads, loaded=loaded)
    adapter = read_peft(bundle.adapter, bundle.chain.modules)
    random = np.random.default_rng(0)
    adapter.values[:] = random.standard_normal(adapter.size) * 0.01
    token_ids = [random.integers(0, bundle.chain.vocabulary_size, tokens).tolist() for _ in range(rows)]
    step = Step(adapter, full_examples(token_ids), 0, 0)
    return TimedStep(opened, make_estimator(plan.settings), step)
