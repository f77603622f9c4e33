"""Carry out a comparison in one folder: export, searches and runs; finished parts are kept.

config.yaml  settings     data/       the rows of all methods      runs/METHOD-SEED/           reported runs
bundle/      the export   measured/   a few steps of each method   search/METHOD-RATE/         trials
model/       random weights           result.json, report.*        figures/
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from prge.cli.settings import settings_to_yaml
from prge.cli.subprocesses import read_json, wait_until_free, write_verb_config
from prge.errors import PrgeError, RunError, format_value
from prge.formats.bundle import file_sha256, open_bundle
from prge.formats.documents import DocumentError, read_yaml
from prge.formats.run_folder import read_metrics
from prge.system.atomic import write_file
from server_export.evidence.compare.budget import evaluation_steps, steps_within
from server_export.evidence.compare.children import last_lines, run_verb
from server_export.evidence.compare.methods import (
    METHODS,
    ComparedMethod,
    PlannedRun,
    chosen_methods,
    export_settings,
    run_settings,
    test_settings,
)
from server_export.evidence.compare.records import (
    best_loss,
    is_finished,
    read_run,
    step_memory,
    step_seconds,
    summary_of,
)
from server_export.evidence.compare.rows import write_splits
from server_export.evidence.compare.settings import SEARCH_SEED, CompareSettings
from server_export.settings import ExportConfig
from server_export.tune.rates import best_rate, grid_losses, rates_around

CONFIG, RUN, OUTPUT, TEST = "config.yaml", "run", "output.txt", "test.json"
MEASURED_STEPS = 8
# Trials: number of evaluations, steps as a share of a reported run's, and the factor between two rates.
TRIAL_EVALUATIONS, TRIAL_SHARE, FACTOR = 4, 0.5, 3.0
# Settings that may change between calls; the others are fixed when a comparison begins.
_CHANGEABLE = ("out", "json", "preset", "methods", "seeds")

Verb = Callable[[list[str], Path], int]


class MethodError(PrgeError):
    """One method failed; the others can go on."""


class RunDivergedError(MethodError):
    """A run diverged; the learning rate is too high."""


class Comparison:
    """A comparison in its folder.

    `verb` runs `prge` with arguments, appends to a log file and returns the exit code.
    """

    def __init__(self, settings: CompareSettings, verb: Verb = run_verb) -> None:
        self.out = settings.out.resolve()
        self.settings = settings = _with_date(settings, self.out / CONFIG)
        self.methods = chosen_methods(settings.methods, settings.batch_size)
        self.verb = verb
        self.rows: dict[str, Path] = {}
        self._bundle = self.out / "bundle"
        # Refuse bad export settings before anything is written.
        ExportConfig(**export_settings(settings, self._bundle))

    def prepare(self) -> None:
        """Write the settings, the rows and the bundle, or check that the folder has the same ones.

        Raises:
            RunError: the folder holds other files or another comparison, or the export failed.
            DataError: the rows can't be used.
        """
        stored = self.out / CONFIG
        if stored.is_file():
            try:
                content = read_yaml(stored)
            except DocumentError as error:
                raise RunError(
                    f"Cannot read {stored}: {error}",
                    remedy="Give another folder with --out.",
                    code="file-unreadable",
                ) from None
            self._check(content if isinstance(content, dict) else {})
        elif self.out.is_dir() and any(path.name != "run.lock" for path in self.out.iterdir()):
            raise RunError(
                f"{self.out} is not empty and holds no comparison: it has no {CONFIG}.",
                remedy="Give an empty or new folder with --out.",
                code="not-a-comparison",
            )
        self.rows = write_splits(self.settings, self.out / "data")
        write_file(stored, settings_to_yaml(self.settings).encode())
        name = (self.settings.model or "").partition("random:")[2]
        if name and not (self.out / "model" / "config.json").is_file():
            from server_export.checkpoint.random_models import save_random_model
            from server_export.quiet_libraries import quiet_libraries

            quiet_libraries()
            _log(f"{name}: writing random weights")
            save_random_model(self.out / "model", name)
        if not self._bundle.is_dir():
            _log(f"{self._bundle.name}: exporting")
            log = self.out / "bundle.txt"
            verb_settings = export_settings(self.settings, self._bundle)
            code = self.verb(write_verb_config("export", verb_settings, log.with_suffix(".yaml")), log)
            if code:
                raise RunError(
                    f"`prge export` ended with code {code}: {last_lines(log)}",
                    remedy=_point_to_log(log),
                    code="verb-failed",
                )

    def measure(self) -> dict[str, dict[str, Any]]:
        """Do all searches and runs and return the result of every method, including failures.

        Runs go seed by seed, so that a machine that becomes slower slows all methods down.
        """
        results = {method.name: _empty_result(method) for method in self.methods}
        plans = {method.name: self._tune(method, results[method.name]) for method in self.methods}
        for seed in self.settings.seeds:
            for method in self.methods:
                plan = plans[method.name]
                if plan is not None:
                    self._run(method, dataclasses.replace(plan, seed=seed), results[method.name])
        return results

    def hashes(self) -> dict[str, Any]:
        """Return SHA-256 hashes of the rows of each split and of the bundle's manifest."""
        return {
            **{f"{split} rows": file_sha256(path) for split, path in self.rows.items()},
            "bundle": open_bundle(self._bundle).sha256,
        }

    def _tune(self, method: ComparedMethod, result: dict[str, Any]) -> PlannedRun | None:
        """Return the plan of a method's reported runs, or None if it failed before them."""
        try:
            steps = self._steps(method)
            result["learning_rate"] = rate = self._choose_rate(method, steps, result["search"])
        except MethodError as failure:
            _log(f"{method.name}: {failure.what}")
            result["failures"].append(str(failure))
            return None
        batch_size = self.settings.batch_size
        # The most expensive step of all methods, chosen or not: a later call may add its method.
        first = max(each.forward_passes(batch_size) for each in METHODS.values())
        eval_at = evaluation_steps(
            steps, method.forward_passes(batch_size), first, self.settings.evaluation_growth
        )
        return PlannedRun(steps, rate, self.settings.seeds[0], eval_at, with_test=True)

    def _run(self, method: ComparedMethod, plan: PlannedRun, result: dict[str, Any]) -> None:
        folder = self.out / "runs" / f"{method.name}-{plan.seed}"
        try:
            run = self._train(method, plan, folder)
            test = None if method.estimator is None else self._score(run, folder)
            examples = method.examples(self.settings.batch_size)
            memory = step_memory(self.out / "measured" / method.name / RUN)
            result["runs"].append({"seed": plan.seed, **read_run(run, examples, memory, test)})
        except MethodError as failure:
            _log(f"{method.name}: {failure.what}")
            result["failures"].append(f"seed {plan.seed}: {failure}")

    def _steps(self, method: ComparedMethod) -> int:
        """Return the steps of a reported run; a short run without evaluations measures time and memory."""
        settings, seconds = self.settings, None
        plan = PlannedRun(MEASURED_STEPS, self._centre(method), SEARCH_SEED)
        measured = self._train(method, plan, self.out / "measured" / method.name)
        if settings.budget == "seconds":
            # The first step warms up caches.
            seconds = statistics.median(list(step_seconds(read_metrics(measured)).values())[1:])
        return steps_within(
            settings.budget, settings.budget_value, method.forward_passes(settings.batch_size), seconds
        )

    def _choose_rate(self, method: ComparedMethod, steps: int, trials: list[dict[str, Any]]) -> float:
        """Return the learning rate of the best trial on development rows; trials are appended to `trials`.

        Raises:
            MethodError: a trial failed for another reason than divergence, or all diverged.
        """
        if self.settings.search_trials == 1:
            return self._centre(method)
        trial_steps = max(1, round(steps * TRIAL_SHARE))
        eval_at = (*range(0, trial_steps, -(-trial_steps // TRIAL_EVALUATIONS)), trial_steps)
        failures = ["no trial ended with a finite loss"]

        def loss(rate: float) -> float:
            plan = PlannedRun(trial_steps, rate, SEARCH_SEED, eval_at)
            try:
                trial_loss = best_loss(
                    self._train(method, plan, self.out / "search" / f"{method.name}-{rate:g}")
                )
            except RunDivergedError as failure:
                failures.append(str(failure))
                trial_loss = None
            trials.append({"learning_rate": rate, "loss": trial_loss, "steps": trial_steps})
            return math.inf if trial_loss is None else trial_loss

        rates = rates_around(self._centre(method), FACTOR, self.settings.search_trials)
        rate = best_rate(grid_losses(loss, rates, FACTOR, max_extra=1))
        trials.sort(key=lambda trial: float(trial["learning_rate"]))
        if rate is None:
            raise MethodError(failures[-1], code="all-rates-diverged")
        return rate

    def _train(self, method: ComparedMethod, plan: PlannedRun, folder: Path) -> Path:
        """Finish, resume or start a run in `folder` and return its run folder.

        Raises:
            MethodError: the command failed; the message has its last lines.
        """
        run, name = folder / RUN, folder.relative_to(self.out)
        if is_finished(run):
            return run
        wait_until_free(run)
        if method.estimator is not None and (run / CONFIG).is_file():
            arguments = ["run", "--resume", str(run)]
        else:
            shutil.rmtree(run, ignore_errors=True)
            verb = "baseline" if method.estimator is None else "run"
            verb_settings = run_settings(method, self.settings, plan, self._bundle, self.rows, run)
            arguments = write_verb_config(verb, verb_settings, folder / f"{verb}.yaml")
        _log(f"{name}: {plan.steps} steps with learning rate {plan.learning_rate:g}")
        log = folder / OUTPUT
        code = self.verb(arguments, log)
        if summary_of(run).get("run", {}).get("status") == "diverged":
            raise RunDivergedError(
                f"{name} diverged: {last_lines(log)}", remedy=_point_to_log(log), code="diverged"
            )
        if code or not is_finished(run):
            raise _failed_error(name, arguments[0], code, log)
        return run

    def _score(self, run: Path, folder: Path) -> dict[str, Any]:
        """Return the test figures of an engine run; PyTorch runs have them in their summary."""
        path, partial = folder / TEST, folder / f".{TEST}"
        if not path.is_file():
            verb_settings = test_settings(self.settings, self._bundle, self.rows["test"], run, partial)
            code = self.verb(write_verb_config("eval", verb_settings, folder / "eval.yaml"), folder / OUTPUT)
            if code:
                raise _failed_error(folder.relative_to(self.out), "eval", code, folder / OUTPUT)
            partial.rename(path)
        return read_json(path)

    def _centre(self, method: ComparedMethod) -> float:
        return self.settings.learning_rates.get(method.name, method.learning_rate)

    def _check(self, stored: Mapping[str, Any]) -> None:
        now = yaml.safe_load(settings_to_yaml(self.settings))
        changed = [
            f"{name} was {format_value(stored.get(name))}, is {format_value(value)}"
            for name, value in now.items()
            if name not in _CHANGEABLE and stored.get(name) != value
        ]
        if changed:
            raise RunError(
                "\n  - ".join([f"{self.out} holds another comparison:", *changed]),
                remedy="Give another folder with --out, or the settings that it was begun with.",
                code="settings-changed",
            )


def _with_date(settings: CompareSettings, stored: Path) -> CompareSettings:
    """Return the settings with the date of the existing comparison, or with today's for a new one."""
    if settings.date or not stored.is_file():
        return settings.with_date()
    try:
        content = read_yaml(stored)
    except (OSError, DocumentError):
        return settings
    date = content.get("date") if isinstance(content, dict) else None
    return dataclasses.replace(settings, date=date)


def _log(text: str) -> None:
    # Flushed for files and pipes: a comparison takes long.
    print(text, flush=True)


def _failed_error(name: Path, verb: str, code: int, log: Path) -> MethodError:
    message = f"{name}: `prge {verb}` ended with code {code}: {last_lines(log)}"
    return MethodError(message, remedy=_point_to_log(log), code="verb-failed")


def _point_to_log(log: Path) -> str:
    return f"see {log} for its whole output"


def _empty_result(method: ComparedMethod) -> dict[str, Any]:
    return {
        "title": method.title,
        "family": "pytorch" if method.estimator is None else "engine",
        "forward_only": method.forward_only,
        "optimizer": method.run.get("optimizer"),
        "learning_rate": None,
        "search": [],
        "runs": [],
        "failures": [],
    }
