"""The work of a comparison: bundles, searches and runs in one folder, whatever is there already left alone.

config.yaml  settings     data/       the rows of all methods      runs/METHOD-SEED/           reported runs
bundles/     exports      measured/   a few steps a method         search/METHOD-RATE/         trials
model/       random weights           result.json, report.*        figures/
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from prge.errors import PrgeError, RunError, shown
from prge.files.bundle import file_sha256, open_bundle
from prge.files.documents import DocumentError, read_yaml
from prge.files.run_folder import read_metrics
from prge.host.atomic import write_file
from prge.verbs.settings import settings_to_yaml
from prge.verbs.starting import configured, wait_until_free
from server_export.evidence.compare.agenda import Agenda
from server_export.evidence.compare.budget import evenly, growing, steps_within
from server_export.evidence.compare.children import last_words, run_verb
from server_export.evidence.compare.methods import (
    METHODS,
    Method,
    Plan,
    check_exports,
    chosen_methods,
    export_settings,
    run_settings,
    test_settings,
)
from server_export.evidence.compare.records import (
    curve,
    is_finished,
    read_run,
    step_memory,
    step_seconds,
    summary_of,
)
from server_export.evidence.compare.rows import write_splits
from server_export.evidence.compare.settings import CompareSettings
from server_export.tune.rates import best_rate, grid_losses, rates_around

CONFIG, RUN, OUTPUT, TEST = "config.yaml", "run", "output.txt", "test.json"
MEASURED_STEPS = 8
TRIAL_EVALUATIONS = 4
# What may change between calls: the rest of a comparison stays what it was begun as.
_FREE = ("out", "json", "preset", "methods", "seeds")

Verb = Callable[[list[str], Path], int]
Say = Callable[[str], None]


def _say(text: str) -> None:
    # Into a file or pipe too at once: a comparison takes long.
    print(text, flush=True)


class MethodError(PrgeError):
    """One method can't go on; the others can."""


class RunDivergedError(MethodError):
    """A run ended because its loss grew: the learning rate's fault."""


class Comparison:
    """One comparison in its folder.

    `verb` runs `prge` with some words, appends to a log file and returns the exit code.
    """

    def __init__(self, settings: CompareSettings, verb: Verb = run_verb, say: Say = _say) -> None:
        self.settings = settings
        self.out = settings.out.resolve()
        self.methods = chosen_methods(settings.methods, settings.batch_size)
        check_exports(self.methods, settings)
        self._measured = self.out / "measured"
        self.verb = verb
        self.say = say
        self.rows: dict[str, Path] = {}
        self.agenda = Agenda({method.name: self._shares() for method in self.methods})

    def prepare(self) -> None:
        """Write the settings and the rows, or check that they are those of the folder.

        Raises:
            RunError: the folder holds something else, or another comparison.
            DataError: the rows can't be used.
        """
        stored = self.out / CONFIG
        if stored.is_file():
            try:
                content = read_yaml(stored)
            except DocumentError as error:
                raise RunError(
                    f"{stored} can't be read: {error}", remedy="give another folder with --out"
                ) from None
            self._check(content if isinstance(content, dict) else {})
        elif self.out.is_dir() and any(path.name != "run.lock" for path in self.out.iterdir()):
            raise RunError(
                f"{self.out} holds something that is no comparison: it has no {CONFIG}",
                remedy="give an empty or new folder with --out",
            )
        self.rows = write_splits(self.settings, self.out / "data")
        write_file(stored, settings_to_yaml(self.settings).encode())
        name = (self.settings.model or "").partition("random:")[2]
        if name and not (self.out / "model" / "config.json").is_file():
            from server_export.model.random_models import save_random_model
            from server_export.quiet import quiet_libraries

            quiet_libraries()
            self.say(f"random weights for {name}")
            save_random_model(self.out / "model", name)

    def measure(self) -> dict[str, dict[str, Any]]:
        """All searches, then all runs: what the result keeps of every method, failures among it.

        Seed by seed, so that a machine that becomes slower does so for every method.
        """
        results = {method.name: _blank(method) for method in self.methods}
        plans = {method.name: self._tune(method, results[method.name]) for method in self.methods}
        for seed in self.settings.seeds:
            for method in self.methods:
                plan = plans[method.name]
                if plan is not None:
                    self._run(method, dataclasses.replace(plan, seed=seed), results[method.name])
        return results

    def _tune(self, method: Method, result: dict[str, Any]) -> Plan | None:
        """What the reported runs of a method are to do; None where it can't be known."""
        try:
            steps = self.steps(method)
            result["learning_rate"] = rate = self.choose_rate(method, steps, result["search"])
        except MethodError as failure:
            self.say(f"{method.name}: {failure.what}")
            result["failures"].append(str(failure))
            self.agenda.drop(method.name)
            return None
        batch_size = self.settings.batch_size
        # The step that computes most, whether its method takes part or not: later calls may bring it in.
        first = max(each.rows(batch_size) for each in METHODS.values())
        evaluate_at = growing(steps, method.rows(batch_size), first, self.settings.evaluation_growth)
        return Plan(steps, rate, self.settings.seeds[0], evaluate_at, share=1.0, with_test=True)

    def _run(self, method: Method, plan: Plan, result: dict[str, Any]) -> None:
        folder = self.out / "runs" / f"{method.name}-{plan.seed}"
        try:
            run = self.train(method, plan, folder)
            test = self.score(method, run, folder)
            examples = method.examples(self.settings.batch_size)
            memory = step_memory(self._measured / method.name / RUN)
            result["runs"].append({"seed": plan.seed, **read_run(run, examples, memory, test)})
        except MethodError as failure:
            self.say(f"{method.name}: {failure.what}")
            result["failures"].append(f"seed {plan.seed}: {failure}")

    def measured(self, method: Method) -> Path:
        """A run of a few steps without evaluations, whose time and memory are those of steps alone."""
        plan = Plan(MEASURED_STEPS, self._centre(method), self.settings.search_seed)
        return self.train(method, plan, self._measured / method.name)

    def steps(self, method: Method) -> int:
        """Steps of a reported run."""
        settings, seconds = self.settings, None
        measured = self.measured(method)
        if settings.budget == "seconds":
            # The first step warms caches up.
            seconds = statistics.median(list(step_seconds(read_metrics(measured)).values())[1:])
        return steps_within(settings.budget, settings.budget_value, method.rows(settings.batch_size), seconds)

    def choose_rate(self, method: Method, steps: int, trials: list[dict[str, Any]]) -> float:
        """The learning rate of the best trial on development rows; `trials` takes what was tried.

        Raises:
            MethodError: a trial failed otherwise than by divergence, or all diverged.
        """
        settings = self.settings
        if settings.search_trials == 1:
            return self._centre(method)
        trial_steps = max(1, round(steps * settings.search_share))
        messages: list[str] = []

        def loss(rate: float) -> float:
            evaluate_at = evenly(trial_steps, TRIAL_EVALUATIONS)
            plan = Plan(trial_steps, rate, settings.search_seed, evaluate_at, settings.search_share)
            try:
                run = self.train(method, plan, self.out / "search" / f"{method.name}-{rate:g}")
            except RunDivergedError as failure:
                messages.append(str(failure))
                return math.inf
            return self._cost(run)

        factor = settings.search_factor
        rates = rates_around(self._centre(method), factor, settings.search_trials)
        losses = grid_losses(loss, rates, factor, most=1)
        rate = best_rate(losses)
        trials += [
            {"learning_rate": tried, settings.quality: _stored(cost, settings.quality), "steps": trial_steps}
            for tried, cost in sorted(losses.items())
        ]
        if rate is None:
            raise MethodError(messages[-1] if messages else "no trial ended with a finite loss")
        return rate

    def train(self, method: Method, plan: Plan, folder: Path) -> Path:
        """A finished run in `folder`, from before, gone on with, or new; returns its run folder.

        Raises:
            MethodError: with the last words of the failed command.
        """
        run, log = folder / RUN, folder / OUTPUT
        place = folder.relative_to(self.out)
        which = self.agenda.begin(method.name, plan.share)
        if is_finished(run):
            return run
        bundle = self.bundle(method)
        wait_until_free(run)
        if method.family == "engine" and (run / CONFIG).is_file():
            words = ["run", "--resume", str(run)]
        else:
            shutil.rmtree(run, ignore_errors=True)
            chosen = run_settings(method, self.settings, plan, bundle, self.rows, run)
            words = configured(method.verb, chosen, folder / f"{method.verb}.yaml")
        self.say(f"[{which}] {place}: {plan.steps} steps at {plan.learning_rate:g}")
        begin = time.monotonic()
        code = self.verb(words, log)
        self.agenda.end(method.name, plan.share, time.monotonic() - begin)
        if code or not is_finished(run):
            diverged = summary_of(run).get("run", {}).get("status") == "diverged"
            kind, what = (
                (RunDivergedError, "it diverged")
                if diverged
                else (MethodError, f"`prge {words[0]}` ended with code {code}")
            )
            raise kind(f"{place}: {what}: {last_words(log, 2)}", remedy=f"all it said: {log}")
        return run

    def score(self, method: Method, run: Path, folder: Path) -> dict[str, Any] | None:
        """Test figures of an engine run; None for methods whose runs have them."""
        if method.family == "pytorch":
            return None
        path = folder / TEST
        if not path.is_file():
            partial = folder / f".{TEST}"
            chosen = test_settings(self.settings, self.bundle(method), self.rows["test"], run, partial)
            code = self.verb(configured("eval", chosen, folder / "eval.yaml"), folder / OUTPUT)
            if code:
                raise MethodError(
                    f"{folder.relative_to(self.out)}: `prge eval` ended with code {code}: "
                    f"{last_words(folder / OUTPUT, 2)}"
                )
            partial.rename(path)
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return record

    def bundle(self, method: Method) -> Path:
        """The bundle that a method runs on, exported unless it is there; equal ones are shared.

        Raises:
            MethodError: the export failed.
        """
        place = self.out / "bundles" / _bundle_name(method)
        if not place.is_dir():
            self.say(f"{place.relative_to(self.out)}: exporting")
            log = self.out / "bundles" / f"{place.name}.txt"
            chosen = {**export_settings(method, self.settings), "out": place}
            code = self.verb(configured("export", chosen, log.with_suffix(".yaml")), log)
            if code:
                raise MethodError(
                    f"`prge export` ended with code {code}: {last_words(log, 2)}",
                    remedy=f"all it said: {log}",
                )
        return place

    def hashes(self) -> dict[str, Any]:
        """SHA-256 of the rows of each split and of each bundle's manifest."""
        bundles = sorted((self.out / "bundles").glob("*/manifest.json"))
        return {
            "rows": {split: file_sha256(path) for split, path in self.rows.items()},
            "bundles": {path.parent.name: open_bundle(path.parent).sha256 for path in bundles},
        }

    def _shares(self) -> list[float]:
        """What the runs of a method take of a reported run's budget: measured, trials, reported ones."""
        settings = self.settings
        trials = settings.search_trials if settings.search_trials > 1 else 0
        return [0.0, *[settings.search_share] * trials, *[1.0] * len(settings.seeds)]

    def _centre(self, method: Method) -> float:
        return self.settings.learning_rates.get(method.name, method.learning_rate)

    def _cost(self, run: Path) -> float:
        """The best evaluation of a trial, lower is better."""
        sign = 1 if self.settings.quality == "loss" else -1
        values = [sign * point.value(self.settings.quality) for point in curve(read_metrics(run))]
        return min((value for value in values if math.isfinite(value)), default=math.inf)

    def _check(self, stored: Mapping[str, Any]) -> None:
        now = yaml.safe_load(settings_to_yaml(self.settings))
        names = [field.name for field in dataclasses.fields(self.settings) if field.name not in _FREE]
        changed = [
            f"{name} was {shown(stored.get(name))}, is {shown(now[name])}"
            for name in names
            if stored.get(name) != now[name]
        ]
        if changed:
            raise RunError(
                "\n  - ".join([f"{self.out} holds another comparison:", *changed]),
                remedy="give another folder with --out, or the settings that it was begun with",
            )


def _blank(method: Method) -> dict[str, Any]:
    return {
        "title": method.title,
        "family": method.family,
        "forward_only": method.forward_only,
        "optimizer": method.optimizer,
        "learning_rate": None,
        "search": [],
        "runs": [],
        "failures": [],
    }


def _bundle_name(method: Method) -> str:
    """A name that tells the bundles of one comparison apart."""
    return method.name if method.export else "shared"


def _stored(cost: float, quality: str) -> float | None:
    if not math.isfinite(cost):
        return None
    return cost if quality == "loss" else -cost
