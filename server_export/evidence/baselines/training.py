"""Run one baseline: open the model, prepare the method, train, score test rows and write the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch._dynamo
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from prge.errors import DivergenceError
from prge.formats.bundle import Bundle
from prge.formats.curves import merit_of
from prge.formats.journal import Record
from prge.formats.run_folder import FINAL, as_run_error
from prge.objectives.examples import Example, token_count
from prge.system.memory import resident_bytes
from prge.training.checkpoint import TrainingProgress
from prge.training.checkpoint_heads import load_head
from prge.training.estimators.protocol import Measurement
from prge.training.evaluation import evaluate
from prge.training.loop import loss_has_risen, train
from prge.training.monitor import RunMonitor, graceful_stop
from prge.training.optimizers import schedule
from prge.training.sampler import Sampler, max_sequences
from server_export.evidence.baselines.inputs import BaselineInputs
from server_export.evidence.baselines.method import TrainingMethod
from server_export.evidence.baselines.methods import METHODS
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BEST, BaselineSettings
from server_export.oracle import load_base_model
from server_export.quiet_libraries import quiet_libraries

# Imported before memory is measured, so that the libraries' memory isn't counted as the method's: the models,
# and the modules that torch's optimizers import in their first step.
_LOADED = (AutoModel, AutoModelForCausalLM, PreTrainedModel, torch._dynamo)


def train_baseline(settings: BaselineSettings, bundle: Bundle, inputs: BaselineInputs) -> None:
    """Train with the method of the settings and write the result.

    Raises:
        PrgeError: the model isn't the bundle's, the method can't train it, or the training diverged.
        KeyboardInterrupt: the user interrupted the run.
    """
    quiet_libraries()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    entry = METHODS[settings.method]
    make = entry.load()
    idle_bytes = resident_bytes()
    widest = max_sequences(inputs.train)
    batch_size = settings.batch_size or max(bundle.chain.bounds.batch // widest, 1)
    base = load_base_model(bundle, settings.model)
    rows, seed = inputs.train, settings.seed
    head = load_head(bundle, bundle.adapter, inputs.task, rows[0].candidates)
    problem = ModelProblem(bundle, base, rows, inputs.pad, batch_size, seed, settings.head_folds, head)
    if settings.dtype == "bfloat16":
        problem.engine.to(torch.bfloat16)
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

    monitor = RunMonitor(settings, 0, lambda _: learner.forward_passes, describe)
    with monitor, graceful_stop(monitor):
        monitor.note(inputs.report)
        # Baselines can't be resumed, so no checkpoints are written.
        train(learner, settings.loop_settings(save_steps=0), monitor, lambda: monitor.stopped)
        if monitor.stopped and learner.progress.step < settings.steps:
            raise KeyboardInterrupt
        monitor.stop_clock()
        learner.load_best()
        if inputs.test:
            monitor.summary_facts["test"] = learner.score(inputs.test)
        learner.method.write(settings.out / FINAL)
        best = learner.best or {}
        monitor.report_final(best.get("step", monitor.steps), best)


class BaselineLearner:
    """Implements prge.training.loop.Learner for a method in PyTorch.

    `forward_passes` counts the forward passes that were computed.
    """

    def __init__(self, settings: BaselineSettings, inputs: BaselineInputs, method: TrainingMethod) -> None:
        problem = method.problem
        # Heads of an encoder must be fitted on the untrained model.
        problem.prepare_heads()
        self.method = method
        self.progress = TrainingProgress()
        self.forward_passes = method.prior_passes
        self._best: Record | None = None
        self._settings = settings
        self._inputs = inputs
        self._file = settings.out / BEST
        self._batch = Sampler(inputs.train, problem.batch_size, settings.seed).examples_at
        self._rate = schedule(
            settings.lr_scheduler_type, settings.learning_rate, settings.steps, settings.resolved_warmup_steps
        )

    @property
    def best(self) -> Record | None:
        """The evaluation of the best step, or None before the first one."""
        return self._best and {name: figure for name, figure in self._best.items() if name != "value"}

    def step(self) -> tuple[Record, Measurement]:
        """See Learner."""
        number = self.progress.step
        rate, examples, begin = self._rate(number), self._batch(number), time.perf_counter()
        result = self.method.step(examples, rate)
        seconds = time.perf_counter() - begin
        self.forward_passes += result.forward_passes
        if not math.isfinite(result.loss):
            problem = f"step {number}: the loss is {result.loss}"
        else:
            self.progress.count_step(result.loss)
            problem = loss_has_risen(self.progress, self._settings.divergence_ratio)
        if problem:
            raise DivergenceError(
                problem, remedy="Start a new run with a lower learning rate.", code="loss-risen"
            )
        figures = {"tokens": token_count(examples), "loss": result.loss, "learning_rate": rate}
        record = {"type": "step", "step": number, **figures}
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
        """Score rows with the current model by the driver's code and return a record of metrics."""
        problem, select, task = self.method.problem, self._settings.select, self._inputs.task
        head = problem.heads.head
        record, _ = evaluate(problem.engine, problem.adapter, examples, task, head=head, select=select)
        return record

    def save(self, best: bool = False) -> None:
        """See Learner; only the best parameters are saved."""
        if best:
            with as_run_error(self._file):
                torch.save([parameter.detach() for parameter in self.method.trained], self._file)

    def load_best(self) -> None:
        """Load the best parameters into the method, if any were saved."""
        if self.best is not None:
            stored = torch.load(self._file, weights_only=True, mmap=True)
            for parameter, value in zip(self.method.trained, stored, strict=True):
                parameter.data.copy_(value)
            self._file.unlink()
