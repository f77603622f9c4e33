"""One baseline from its rows to its result: model, method, loop, test rows, summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM

from prge.files.adapter import Adapter
from prge.files.journal import Record
from prge.files.peft import CONFIG, read_config, write_config
from prge.files.run_folder import FINAL
from prge.host.atomic import new_folder
from prge.host.memory import resident_bytes
from prge.learning.checkpoint import HEAD, head_arrays
from prge.learning.examples import Example, token_count
from prge.learning.optimizers import schedule
from prge.learning.sampling import Sampler
from prge.learning.training import train
from prge.rows.scoring import evaluate
from prge.running.watching import Watcher, graceful_stop
from server_export.evidence.baselines.inputs import BaselineInputs
from server_export.evidence.baselines.learner import BaselineLearner
from server_export.evidence.baselines.method import Method, Problem, Saving
from server_export.evidence.baselines.methods import find_method
from server_export.evidence.baselines.problem import ModelProblem, open_problem
from server_export.evidence.baselines.settings import BEST, BaselineSettings
from server_export.quiet import quiet_libraries

PARAMETERS = "parameters.safetensors"
# Imported before memory is looked at, so that what the libraries take isn't counted as the method's.
_LOADED = (AutoModel, AutoModelForCausalLM, peft)


def train_baseline(settings: BaselineSettings, inputs: BaselineInputs) -> None:
    """Train by the method of the settings and write the result.

    Raises:
        PrgeError: the model isn't the bundle's, or the training diverged.
        KeyboardInterrupt: interrupted by the user.
    """
    quiet_libraries()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    find_method(settings.method).load()
    facts = _Facts(settings, inputs, resident_bytes())
    problem = _problem(settings, inputs)
    watcher = Watcher(settings, 0, lambda _: facts.learner.rows if facts.learner else 0, facts)
    with watcher, graceful_stop(watcher):
        watcher.say(inputs.report)
        facts.learner = learner = _learner(settings, inputs, problem)
        watcher.start_clock()
        # There is no resuming, so that nothing is kept on the way.
        train(learner, replace(settings.of_loop, checkpoint_every=0), watcher, lambda: watcher.stopped)
        if watcher.stopped and learner.progress.step < settings.steps:
            raise KeyboardInterrupt
        watcher.stop_clock()
        learner.take_best()
        if inputs.test:
            facts.test = _test(settings, inputs, problem)
        _write_final(settings.out / FINAL, problem, learner.method)
        best = learner.best or {}
        watcher.say_final(best.get("step", watcher.steps), best)


@dataclass
class _Facts:
    """What run.json says of a baseline, as far as it is known."""

    settings: BaselineSettings
    inputs: BaselineInputs
    baseline_bytes: int | None
    learner: BaselineLearner | None = None
    test: Record | None = None

    def __call__(self) -> tuple[Record, Record]:
        """The blocks `run` and `train`."""
        learner = self.learner
        trained = learner.method.parameters() if learner is not None else []
        run = {
            "method": self.settings.method,
            **self.inputs.bundle.description,
            "engine": "pytorch",
            "threads": torch.get_num_threads(),
        }
        return run, {
            "training_rows": len(self.inputs.train),
            "training_tokens": token_count(self.inputs.train),
            "development_rows": len(self.inputs.dev),
            "trained_values": sum(parameter.numel() for parameter in trained),
            "activation_bytes": learner.activation_bytes if learner is not None else 0,
            "best": learner.best if learner is not None else None,
            "test": self.test,
            "memory": {"baseline_bytes": self.baseline_bytes},
        }


def _problem(settings: BaselineSettings, inputs: BaselineInputs) -> ModelProblem:
    widest = max(len(example.sequences) for example in inputs.train)
    return open_problem(
        inputs.bundle,
        settings.model,
        inputs.train,
        inputs.tokenizer.pad_id,
        settings.batch_size or max(inputs.bundle.chain.bounds.batch, widest),
        settings.seed,
        settings.head_folds,
    )


def _learner(settings: BaselineSettings, inputs: BaselineInputs, problem: ModelProblem) -> BaselineLearner:
    if not find_method(settings.method).adapts:
        problem.merge_adapter()
    method = prepare(problem, settings)
    # An encoder's heads are fitted before the first step.
    problem.prepare_heads()
    return BaselineLearner(
        method,
        Sampler(inputs.train, problem.contract, settings.seed, pad=problem.pad).chosen,
        schedule(settings.schedule, settings.learning_rate, settings.steps, settings.rising),
        settings.divergence_ratio,
        settings.out / BEST,
        lambda: chain(problem.model.parameters(), problem.model.buffers(), method.parameters()),
        (lambda: _score(settings, inputs, problem, inputs.dev)) if inputs.dev else None,
    )


def prepare(problem: Problem, settings: BaselineSettings) -> Method:
    """The method that settings name, ready for its first step on a problem."""
    method: Method = find_method(settings.method).load().prepare(problem, settings)
    return method


def _score(
    settings: BaselineSettings, inputs: BaselineInputs, problem: ModelProblem, examples: Sequence[Example]
) -> Record:
    """Score rows with the model as it is, by the driver's own code.

    Returns:
        A record with `loss`, `examples`, the metric, and `value`, where more is better.
    """
    adapter, head = Adapter.zeros(problem.modules), problem.heads.head
    record, _ = evaluate(problem.engine(), adapter, examples, inputs.task, head, problem.pad, settings.select)
    return record


def _test(settings: BaselineSettings, inputs: BaselineInputs, problem: ModelProblem) -> Record:
    """Loss and metric of the test rows, as `prge eval` has them."""
    record = _score(settings, inputs, problem, inputs.test)
    del record["value"]
    return record


def _write_final(final: Path, problem: ModelProblem, method: Method) -> None:
    """The result as the method writes it, or its parameters by name; with an encoder's head."""
    with new_folder(final, overwrite=True) as folder:
        if isinstance(method, Saving):
            method.save(folder)
            _name_base(folder, problem)
        else:
            names = {id(parameter): name for name, parameter in problem.model.named_parameters()}
            values = {
                names.get(id(parameter), f"parameter.{index}"): parameter.detach().contiguous()
                for index, parameter in enumerate(method.parameters())
            }
            save_file(values, folder / PARAMETERS)
        if problem.heads.head is not None:
            arrays = head_arrays(problem.heads.head)
            save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / HEAD)


def _name_base(folder: Path, problem: ModelProblem) -> None:
    """Name the base model as the bundle's adapter does: PEFT names the folder that it was loaded from."""
    if not (folder / CONFIG).is_file():
        return
    template, config = read_config(problem.bundle.adapter), read_config(folder)
    base = {name: template.get(name) for name in ("base_model_name_or_path", "revision")}
    if any(config.get(name) != value for name, value in base.items()):
        write_config(folder, config | base)
