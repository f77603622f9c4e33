"""One baseline from its rows to its result: model, method, loop, test rows, summary."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from types import TracebackType

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM

from prge.adapter import Adapter
from prge.atomic import new_folder
from prge.checkpoint import HEAD, head_arrays
from prge.encoder_heads import Heads
from prge.errors import DivergenceError, PrgeError
from prge.examples import Example
from prge.head import CrossFittedHeads, Head
from prge.memory import proportional_memory, resident_bytes
from prge.optimizers import schedule
from prge.peft import CONFIG, read_arrays, read_config, write_config
from prge.progress import Progress
from prge.rows.scoring import METRIC_NAMES, evaluate, extract_answers, mean_token_f1
from prge.run_folder import FINAL, RunLog, write_summary
from prge.sampling import Sampler
from server_export.baselines.inputs import BaselineInputs
from server_export.baselines.loop import BEST, CHECKPOINT, Checkpoints, LoopSettings, LoopState, Record, train
from server_export.baselines.method import Method, Problem, Saving, StepResult
from server_export.baselines.methods import find_method
from server_export.baselines.problem import ModelProblem, open_problem
from server_export.baselines.settings import BaselineSettings
from server_export.quiet import quiet_libraries

PARAMETERS = "parameters.safetensors"
_HEADS = "heads"
# Imported before memory is looked at, so that what the libraries take isn't counted as the method's.
_LOADED = (AutoModel, AutoModelForCausalLM, peft)


def train_baseline(settings: BaselineSettings, inputs: BaselineInputs) -> None:
    """Train by the method of the settings and write the result, or go on with what was begun.

    Raises:
        PrgeError: the model isn't the bundle's, or the training diverged.
    """
    quiet_libraries()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    entry = find_method(settings.method)
    importlib.import_module(entry.module)
    baseline_bytes = resident_bytes()
    batch_rows = settings.batch_size or inputs.bundle.contract.batch_size
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
    with Watcher(settings, inputs, baseline_bytes) as watcher:
        watcher.say(inputs.report)
        _heads_of(settings.out, problem)
        if not entry.adapts:
            problem.merge_adapter()
        method = prepare(problem, settings)
        _fit_heads(settings.out, problem)
        checkpoints = Checkpoints(settings.out)
        state = checkpoints.load(method)
        if not state.progress.step:
            state.rows = method.prior_rows
        watcher.start(state, method)
        rows = _Scoring(settings, inputs, problem)
        train(
            method,
            sampler.chosen,
            schedule(settings.schedule, settings.learning_rate, settings.steps, settings.warmup),
            state,
            LoopSettings(
                settings.steps,
                settings.evaluate_every,
                settings.checkpoint_every,
                settings.patience,
                settings.divergence_ratio,
            ),
            checkpoints,
            watcher,
            lambda: _constants(problem, method),
            (lambda: rows(inputs.dev)) if inputs.dev else None,
        )
        # What comes now is no part of training.
        watcher.finish()
        checkpoints.load_best(method)
        if inputs.test:
            watcher.test = _test(inputs, problem, rows)
        _write_final(settings.out / FINAL, problem, method)
    for name in (CHECKPOINT, BEST, _HEADS):
        shutil.rmtree(settings.out / name, ignore_errors=True)


def prepare(problem: Problem, settings: BaselineSettings) -> Method:
    """The method that settings name, ready for its first step on a problem."""
    module = importlib.import_module(find_method(settings.method).module)
    own = getattr(module, "settings_of", None)
    method: Method = module.prepare(problem, own(settings) if own else settings)
    return method


class Watcher:
    """Progress on the terminal, metrics and summary in the run folder; implements the loop's `Observer`."""

    def __init__(
        self, settings: BaselineSettings, inputs: BaselineInputs, baseline_bytes: int | None
    ) -> None:
        self.settings = settings
        self.inputs = inputs
        self.baseline_bytes = baseline_bytes
        self.state = LoopState()
        self.trained_values = 0
        self.test: Record | None = None
        self.memory: Record | None = None
        self.progress = Progress(settings.steps, quiet=settings.quiet)
        self.log: RunLog | None = None
        self._texts: list[str] = []
        self._written: set[tuple[str, int]] = set()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.close()
        if error is None:
            whole = self.state.progress.step == self.settings.steps
            self._summarize("completed" if whole else "stopped early")
        else:
            status = "diverged" if isinstance(error, DivergenceError) else "failed"
            self._summarize("interrupted" if isinstance(error, KeyboardInterrupt) else status)
        if self.log is not None:
            if isinstance(error, PrgeError):
                self.log.text(f"error: {error}")
            self.log.close()

    def say(self, text: str) -> None:
        """Tell the user, and the log once it is open."""
        self.progress.note(text)
        for line in text.splitlines():
            if self.log is None:
                self._texts.append(line)
            else:
                self.log.text(line)

    def start(self, state: LoopState, method: Method) -> None:
        """Open metrics and log at the step that the run goes on from."""
        self.state = state
        self.trained_values = sum(parameter.numel() for parameter in method.parameters())
        self.log = RunLog(self.settings.out, keep_through=state.progress.step)
        for line in self._texts:
            self.log.text(line)
        self._written = {(record["event"], record["step"]) for record in self.log.records}
        self.progress.skip(state.progress.step)
        self._summarize("running")

    def finish(self) -> None:
        """Look at memory for the last time: training is over."""
        assert self.log is not None
        self.memory = self.log.memory.report()

    def on_step(self, state: LoopState, result: StepResult, learning_rate: float) -> None:
        """See loop.Observer."""
        step = state.progress.step
        figures = {"loss": result.loss, "learning_rate": learning_rate}
        self._metric({"event": "step", "step": step, **figures})
        self.progress.update(step, result.rows, loss=result.loss)

    def on_evaluation(self, state: LoopState, record: Record) -> None:
        """See loop.Observer."""
        metrics = {name: record[name] for name in ("loss", *METRIC_NAMES) if name in record}
        self._metric({"event": "evaluation", "split": "dev", "step": record["step"], **metrics})
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say(f"step {record['step']}: development rows: {shown}")

    def _metric(self, record: Record) -> None:
        assert self.log is not None
        if (record["event"], record["step"]) not in self._written:
            times = {"seconds": self.state.seconds, "evaluation_seconds": self.state.evaluation_seconds}
            self.log.metric({**record, "rows": self.state.rows, **times})

    def _summarize(self, status: str) -> None:
        manifest, state = self.inputs.bundle.manifest, self.state
        settings = {name: None if v is None else str(v) for name, v in asdict(self.settings).items()}
        memory = self.memory or (self.log.memory.report() if self.log is not None else {"peak_bytes": None})
        write_summary(
            self.settings.out,
            run={
                "status": status,
                "method": self.settings.method,
                "settings": settings,
                "bundle": self.inputs.bundle.sha256,
                "program": manifest["files"]["program.pte"],
                "model": manifest["model"],
                "quantization": manifest.get("quantization"),
                "engine": "pytorch",
                "threads": torch.get_num_threads(),
            },
            train={
                "steps": state.progress.step,
                "seconds": state.seconds,
                "evaluation_seconds": state.evaluation_seconds,
                "rows": state.rows,
                "training_rows": len(self.inputs.train),
                "development_rows": len(self.inputs.dev),
                "trained_values": self.trained_values,
                "activation_bytes": state.activation_bytes,
                "last_evaluation": state.last,
                "best": state.best,
                "test": self.test,
                "memory": {
                    **memory,
                    "baseline_bytes": self.baseline_bytes,
                    "proportional": proportional_memory(),
                },
            },
        )


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
        found, _ = evaluate(
            self.problem.engine(),
            self.adapter,
            examples,
            self.inputs.task,
            head,
            self.problem.pad,
            self.settings.select,
        )
        return found


def _test(inputs: BaselineInputs, problem: ModelProblem, rows: _Scoring) -> Record:
    """Loss and metric of the test rows, as `prge eval` has them."""
    found = rows(inputs.test)
    del found["value"]
    task = inputs.task
    if task is not None and task.is_completion and task.metric == "f1_answer" and "passage" in task.columns:
        answers = extract_answers(problem.engine(), rows.adapter, inputs.test, inputs.tokenizer, task)
        found["f1"] = mean_token_f1(answers, inputs.test)
    return found


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
    template = read_config(problem.bundle.adapter)
    names = ("base_model_name_or_path", "revision")
    write_config(folder, read_config(folder) | {name: template.get(name) for name in names})
