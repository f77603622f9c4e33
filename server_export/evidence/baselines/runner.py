"""One baseline from its rows to its result: model, method, loop, test rows, summary."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM

from prge.files.adapter import Adapter
from prge.files.journal import Record
from prge.files.peft import CONFIG, read_arrays, read_config, write_config
from prge.files.run_folder import FINAL
from prge.host.atomic import new_folder
from prge.host.memory import resident_bytes
from prge.learning.checkpoint import HEAD, head_arrays
from prge.learning.encoder_heads import Heads
from prge.learning.examples import Example, token_count
from prge.learning.head import CrossFittedHeads, Head
from prge.learning.optimizers import schedule
from prge.learning.sampling import Sampler
from prge.learning.training import train
from prge.rows.scoring import evaluate, extract_answers, text_metrics
from prge.running.watching import Watcher, graceful_stop
from server_export.evidence.baselines.inputs import BaselineInputs
from server_export.evidence.baselines.learner import (
    BEST,
    CHECKPOINT,
    BaselineLearner,
    BaselineState,
    Checkpoints,
)
from server_export.evidence.baselines.method import Method, Problem, Saving
from server_export.evidence.baselines.methods import find_method
from server_export.evidence.baselines.problem import ModelProblem, open_problem
from server_export.evidence.baselines.settings import BaselineSettings
from server_export.quiet import quiet_libraries

PARAMETERS = "parameters.safetensors"
_HEADS = "heads"
# Imported before memory is looked at, so that what the libraries take isn't counted as the method's.
_LOADED = (AutoModel, AutoModelForCausalLM, peft)


def train_baseline(settings: BaselineSettings, inputs: BaselineInputs) -> None:
    """Train by the method of the settings and write the result, or go on with what was begun.

    Raises:
        PrgeError: the model isn't the bundle's, or the training diverged.
        KeyboardInterrupt: interrupted by the user, with the newest checkpoint kept.
    """
    quiet_libraries()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    entry = find_method(settings.method)
    importlib.import_module(entry.module)
    facts = _Facts(settings, inputs, resident_bytes())
    widest = max(len(example.sequences) for example in inputs.train)
    batch_rows = settings.batch_size or max(inputs.bundle.chain.bounds.batch, widest)
    problem = open_problem(
        inputs.bundle,
        settings.model,
        inputs.train,
        inputs.tokenizer.pad_id,
        batch_rows,
        settings.seed,
        settings.head_folds,
    )
    sampler = Sampler(inputs.train, problem.contract, settings.seed, pad=problem.pad)
    checkpoints = Checkpoints(settings.out)
    watcher = Watcher(settings, checkpoints.step, lambda _: facts.state.rows, facts)
    with watcher, graceful_stop(watcher):
        watcher.say(inputs.report)
        _heads_of(settings.out, problem)
        if not entry.adapts:
            problem.merge_adapter()
        method = prepare(problem, settings)
        _fit_heads(settings.out, problem)
        facts.method, facts.state = method, checkpoints.load(method)
        if watcher.steps:
            watcher.say(f"going on after step {watcher.steps} of {settings.steps}")
        if not facts.state.progress.step:
            facts.state.rows = method.prior_rows
        score = _Scoring(settings, inputs, problem)
        learner = BaselineLearner(
            method,
            sampler.chosen,
            schedule(settings.schedule, settings.learning_rate, settings.steps, settings.warmup),
            facts.state,
            settings.divergence_ratio,
            checkpoints,
            lambda: _constants(problem, method),
            (lambda: score(inputs.dev)) if inputs.dev else None,
        )
        watcher.start_clock()
        train(learner, settings.of_loop, watcher, lambda: watcher.stopped)
        if watcher.stopped and learner.progress.step < settings.steps:
            watcher.say(f"stopped after step {learner.progress.step}; the same command goes on with it")
            raise KeyboardInterrupt
        watcher.stop_clock()
        checkpoints.load_best(method)
        if inputs.test:
            facts.test = _test(inputs, problem, score)
        _write_final(settings.out / FINAL, problem, method)
        best = facts.state.best or {}
        watcher.say_final(best.get("step", watcher.steps), best)
    for name in (CHECKPOINT, BEST, _HEADS):
        shutil.rmtree(settings.out / name, ignore_errors=True)


@dataclass
class _Facts:
    """What run.json says of a baseline, as far as it is known."""

    settings: BaselineSettings
    inputs: BaselineInputs
    baseline_bytes: int | None
    method: Method | None = None
    state: BaselineState = field(default_factory=BaselineState)
    test: Record | None = None

    def __call__(self) -> tuple[Record, Record]:
        """The blocks `run` and `train`."""
        trained = self.method.parameters() if self.method is not None else []
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
            "activation_bytes": self.state.activation_bytes,
            "best": self.state.best,
            "test": self.test,
            "memory": {"baseline_bytes": self.baseline_bytes},
        }


def prepare(problem: Problem, settings: BaselineSettings) -> Method:
    """The method that settings name, ready for its first step on a problem."""
    module = importlib.import_module(find_method(settings.method).module)
    method: Method = module.prepare(problem, settings)
    return method


class _Scoring:
    """Scores rows with the model as it is, by the driver's own code."""

    def __init__(self, settings: BaselineSettings, inputs: BaselineInputs, problem: ModelProblem) -> None:
        self.settings = settings
        self.inputs = inputs
        self.problem = problem
        self.adapter = Adapter.zeros(problem.modules)

    def __call__(self, examples: Sequence[Example]) -> Record:
        """A record with `loss`, `examples`, the metric, and `value`, where more is better."""
        head = self.problem.heads.head
        record, _ = evaluate(
            self.problem.engine(),
            self.adapter,
            examples,
            self.inputs.task,
            head,
            self.problem.pad,
            self.settings.select,
        )
        return record


def _test(inputs: BaselineInputs, problem: ModelProblem, rows: _Scoring) -> Record:
    """Loss and metric of the test rows, as `prge eval` has them."""
    record = rows(inputs.test)
    del record["value"]
    task = inputs.task
    if task is not None and task.answers_in_passage:
        answers = extract_answers(problem.engine(), rows.adapter, inputs.test, inputs.tokenizer, task)
        record |= text_metrics(task, answers, inputs.test)
    return record


def _constants(problem: ModelProblem, method: Method) -> Iterator[torch.Tensor]:
    return chain(problem.model.parameters(), problem.model.buffers(), method.parameters())


def _fit_heads(out: Path, problem: ModelProblem) -> None:
    """Fit an encoder's heads before the first step, and keep them for who goes on with the run."""
    folder = out / _HEADS
    heads = problem.prepare_heads()
    if heads.head is None or folder.is_dir():
        return
    folds = heads.cross_fitted.heads if heads.cross_fitted else ()
    with new_folder(folder) as partial:
        for index, head in enumerate((heads.head, *folds)):
            arrays = {name: torch.from_numpy(array) for name, array in head_arrays(head).items()}
            save_file(arrays, partial / f"{index:03d}.safetensors")


def _heads_of(out: Path, problem: ModelProblem) -> None:
    """Read the heads that a run was begun with."""
    heads = []
    for path in sorted((out / _HEADS).glob("*.safetensors")):
        arrays = read_arrays(path)
        head = Head(*arrays["weight"].shape)
        head.weight[:], head.bias[:] = arrays["weight"], arrays["bias"]
        heads.append(head)
    if heads:
        problem.heads = Heads(heads[0], CrossFittedHeads(heads[1:]) if heads[1:] else None)


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
