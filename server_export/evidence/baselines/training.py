"""One baseline from its rows to its result: model, method, loop, test rows, summary."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch._dynamo
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from prge.errors import DivergenceError
from prge.files.bundle import Bundle
from prge.files.curves import merit_of
from prge.files.journal import Record
from prge.files.run_folder import FINAL, reported
from prge.host.memory import resident_bytes
from prge.learning.checkpoint import Progress
from prge.learning.estimators.protocol import Measurement
from prge.learning.examples import Example, token_count
from prge.learning.optimizers import schedule
from prge.learning.sampling import Sampler, most_sequences
from prge.learning.training import loss_has_risen, train
from prge.rows.own_heads import head_of
from prge.rows.scoring import evaluate
from prge.running.watching import Watcher, graceful_stop
from server_export.evidence.baselines.inputs import BaselineInputs
from server_export.evidence.baselines.method import Method
from server_export.evidence.baselines.methods import METHODS
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BEST, BaselineSettings
from server_export.oracle import open_base
from server_export.quiet import quiet_libraries

# Imported before memory is looked at, so that what the libraries take isn't counted as the method's: models,
# and what torch's optimizers import with their first step.
_LOADED = (AutoModel, AutoModelForCausalLM, PreTrainedModel, torch._dynamo)


def train_baseline(settings: BaselineSettings, bundle: Bundle, inputs: BaselineInputs) -> None:
    """Train by the method of the settings and write the result.

    Raises:
        PrgeError: the model isn't the bundle's, the method doesn't fit, or the training diverged.
        KeyboardInterrupt: interrupted by the user.
    """
    quiet_libraries()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    entry = METHODS[settings.method]
    make = entry.load()
    idle_bytes = resident_bytes()
    widest = most_sequences(inputs.train)
    batch_size = settings.batch_size or max(bundle.chain.bounds.batch // widest, 1)
    base = open_base(bundle, settings.model)
    rows, seed = inputs.train, settings.seed
    head = head_of(bundle, bundle.adapter, inputs.task, rows[0].candidates)
    problem = ModelProblem(bundle, base, rows, inputs.pad, batch_size, seed, settings.head_folds, head)
    if not entry.adapts:
        problem.merge_adapter()
    learner = BaselineLearner(settings, inputs, make(problem, settings))

    def describe() -> tuple[Record, Record]:
        run = {
            "method": settings.method,
            **bundle.description,
            "engine": "pytorch",
            "threads": torch.get_num_threads(),
        }
        return run, {
            "training_rows": len(inputs.train),
            "training_tokens": token_count(inputs.train),
            "development_rows": len(inputs.dev),
            "trained_values": sum(parameter.numel() for parameter in learner.method.trained),
            "best": learner.best,
            "memory": {"baseline_bytes": idle_bytes},
        }

    watcher = Watcher(settings, 0, lambda _: learner.rows, describe)
    with watcher, graceful_stop(watcher):
        watcher.say(inputs.report)
        # There is no resuming, so that nothing is kept on the way.
        train(learner, settings.loop(checkpoint_every=0), watcher, lambda: watcher.stopped)
        if watcher.stopped and learner.progress.step < settings.steps:
            raise KeyboardInterrupt
        watcher.stop_clock()
        learner.take_best()
        if inputs.test:
            watcher.told["test"] = learner.score(inputs.test)
        learner.method.write(settings.out / FINAL)
        best = learner.best or {}
        watcher.say_final(best.get("step", watcher.steps), best)


class BaselineLearner:
    """Implements prge.learning.training.Learner: parameters of a model, by a method in PyTorch.

    `rows` are those that were computed.
    """

    def __init__(self, settings: BaselineSettings, inputs: BaselineInputs, method: Method) -> None:
        problem = method.problem
        # An encoder's heads are fitted before the first step.
        problem.prepare_heads()
        self.method = method
        self.progress = Progress()
        self.rows = method.prior_rows
        self._best: Record | None = None
        self._settings = settings
        self._inputs = inputs
        self._file = settings.out / BEST
        self._batch = Sampler(inputs.train, problem.batch_size, settings.seed).chosen
        self._rate = schedule(settings.schedule, settings.learning_rate, settings.steps, settings.rising)

    @property
    def best(self) -> Record | None:
        """The evaluation of the best step."""
        return self._best and {name: figure for name, figure in self._best.items() if name != "value"}

    def step(self) -> tuple[Record, Measurement]:
        """See Learner."""
        number = self.progress.step
        rate, examples, begin = self._rate(number), self._batch(number), time.perf_counter()
        result = self.method.step(examples, rate)
        seconds = time.perf_counter() - begin
        self.rows += result.rows
        if not math.isfinite(result.loss):
            problem = f"step {number}: the loss is {result.loss}"
        else:
            self.progress.count_step(result.loss)
            problem = loss_has_risen(self.progress, self._settings.divergence_ratio)
        if problem:
            raise DivergenceError(
                problem, remedy="start a new run with a lower learning rate", code="loss-risen"
            )
        figures = {"tokens": token_count(examples), "loss": result.loss, "learning_rate": rate}
        record = {"kind": "step", "step": number, **figures}
        return record, Measurement(result.loss, np.zeros(0), None, seconds)

    def evaluate(self) -> tuple[Record, bool] | None:
        """See Learner."""
        if not self._inputs.dev:
            return None
        scored = self.score(self._inputs.dev)
        record = {"step": self.progress.step, **scored}
        if self._best is None or merit_of(record) > merit_of(self._best):
            self._best = record
        return record, True

    def score(self, examples: Sequence[Example]) -> Record:
        """Score rows with the model as it is, by the driver's own code: a record as `evaluate` gives it."""
        problem, select, task = self.method.problem, self._settings.select, self._inputs.task
        head = problem.heads.head
        record, _ = evaluate(problem.engine, problem.adapter, examples, task, head=head, select=select)
        return record

    def save(self, best: bool = False) -> None:
        """See Learner; nothing but the best parameters is kept."""
        if best:
            with reported(self._file):
                torch.save([parameter.detach() for parameter in self.method.trained], self._file)

    def take_best(self) -> None:
        """Give the method the best parameters, if there are any."""
        if self.best is not None:
            stored = torch.load(self._file, weights_only=True, mmap=True)
            for parameter, value in zip(self.method.trained, stored, strict=True):
                parameter.data.copy_(value)
            self._file.unlink()
