"""The stages of a tuning, in order. Each writes files, and completed stages are not repeated.

rows/          train, dev and test as jsonl, with the columns that training reads
bundle/        the export, unless the user names a bundle
settings/      settings files of the verbs, for --config
search/        short runs, one for each learning rate and number of steps
run/           the final run
start/         for an encoder: the run before its first step, with the head that was fitted then
before.json    scores of the bundle's adapter, or of start/; after.json: scores of run/
adapter/       the PEFT folder
report.html    curves, samples, decisions and their reasons
"""

from __future__ import annotations

import math
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from prge.cli.main import main
from prge.cli.settings import is_config_of
from prge.cli.subprocesses import read_json, run_verb, run_verb_here, write_verb_config
from prge.data.readers.files import Row, read_rows
from prge.data.row_report import unknown_note
from prge.data.sources import Part
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.errors import PrgeError, RunError
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.run_folder import (
    CONFIG,
    DECISIONS,
    ENDED,
    JOURNAL,
    SUMMARY,
    check_new_run,
    read_metrics,
    run_lock,
)
from prge.formats.signatures import DECODE
from prge.formats.stored_settings import check_links
from prge.objectives.preferences import ObjectiveFlags
from prge.rewards.opening import check_roles, open_reward
from prge.system.atomic import check_writable_folder
from prge.system.progress import TimeLeft, format_duration
from prge.training.estimators.rewards import RewardFlags
from prge.training.estimators.table import EstimatorFlags
from server_export.tune import decisions
from server_export.tune.decisions import Decision, Pace, RowFacts
from server_export.tune.machines import LocalMachine, Machine, PhoneMachine
from server_export.tune.measured_decisions import DecisionMaker
from server_export.tune.prompt_rows import PromptFiles, PromptRows
from server_export.tune.rates import EPSILONS, Trial, longest_search, search_epsilons, search_rates
from server_export.tune.record import Record, status_of
from server_export.tune.row_files import SAMPLES, RowFiles
from server_export.tune.samples import sample_lines
from server_export.tune.settings import TuneSettings
from server_export.tune.user_rows import UserRows

# Maximum number of development rows in an evaluation during a run.
_DEV_ROWS = 200
_PILOT, _PILOT_STEPS = "search/pilot", 10
# Settings for building examples.
_EXAMPLES = ("append_eos", "control_tokens")
_OBJECTIVE = tuple(item.name for item in fields(ObjectiveFlags))
_REWARD = tuple(item.name for item in fields(RewardFlags))
# Share of the reward of a run's own completions in its figure, which decides between equal rewards of the
# most likely ones: these are common after a few steps.
_SAMPLED_SHARE = 1e-6
# Approximate seconds of the stages "adapter" and "report".
_SECONDS_AFTER = 8.0


def tune(settings: TuneSettings) -> dict[str, Any]:
    """Run all stages, and return scores, decisions, memory and seconds.

    Raises:
        PrgeError: input can't be used, or a stage failed. Completed stages stay, and `--resume` continues. If
            none is complete, no folder is made.
    """
    if settings.reward is not None:
        open_reward(settings.reward).close()  # refused now, and not after an export
    with ExitStack() as held:
        check_writable_folder(settings.out)
        if exists := (settings.out / DECISIONS).is_file():
            check_links(settings.out)  # the folder may come from a stranger
            held.enter_context(run_lock(settings.out))
        tuning = _Tuning(settings)
        tuning.check_folder(exists)
        stages: list[tuple[str, Callable[[], None]]] = [
            *([("phone", tuning.measure_phone)] if settings.on else []),
            ("rows", tuning.read),
            ("bundle", tuning.export),
            ("scores before", tuning.score_before),
            ("plan", tuning.plan),
            ("learning rate", tuning.search),
            ("training", tuning.train),
            ("scores after", tuning.score_after),
            ("adapter", tuning.publish),
            ("report", tuning.report),
        ]
        for number, (name, stage) in enumerate(stages, 1):
            if name == "bundle":
                if not exists:
                    held.enter_context(run_lock(settings.out))
                tuning.keep(exists)
            print(f"\n{number}/{len(stages)}  {name}", flush=True)
            stage()
        return tuning.result()


class _Tuning:
    """The stages of a tuning, which read their inputs from the folder and the record."""

    def __init__(self, settings: TuneSettings) -> None:
        self._record = Record(settings)
        date = self._record.fact("date", lambda: settings.with_date().date)
        self._settings = settings = replace(settings, date=date)
        self._rows = RowFiles.of(settings) if settings.reward is None else PromptFiles.of(settings)
        self._parts: dict[Part, list[Row]] = {}
        self._notes: list[str] | None = None
        self._folder = settings.bundle or settings.out / "bundle"
        self._decision_maker = DecisionMaker(settings, self._record)
        self._verbs = settings.out / "settings"
        self._machine: Machine = LocalMachine(self._verbs)

    @cached_property
    def _bundle(self) -> Bundle:
        """The bundle of the user or of the export."""
        return open_bundle(self._folder)

    def keep(self, exists: bool) -> None:
        """Write the rows that this call has read, and the decisions for them, to the folder.

        Args:
            exists: whether the folder holds a tuning already.

        Raises:
            RunError: the folder holds something else, which stays as it is.
        """
        out = self._settings.out
        if self._notes is None:
            return
        self.check_folder(exists)
        self._record.keep()
        (out / "before.json").unlink(missing_ok=True)
        self._rows.write(self._parts)
        self._record.fact("rows", lambda: self._notes)

    def check_folder(self, exists: bool) -> None:
        """Raise RunError if the folder holds anything but a tuning."""
        out = self._settings.out
        if exists:
            return
        if any((out / name).exists() for name in (DECISIONS, "rows", "search", "run")):
            raise RunError(
                f"{out} is not empty, and holds no tuning.",
                remedy="Give another folder with --out.",
                code="folder-occupied",
            )
        if not is_config_of(TuneSettings, out / CONFIG):
            check_new_run(out, ("settings", "start", "before.json", "after.json", "adapter", "report.html"))

    def measure_phone(self) -> None:
        """Measure the phone of the runs, and record it, so that later calls use the same one."""
        settings, record = self._settings, self._record
        name = record.fact("name_on_phone", lambda: f"tune-{secrets.token_hex(4)}")
        facts = record.fact(
            "phone",
            lambda: asdict(PhoneMachine(settings.serial, settings.phone_folder, name, self._verbs).facts()),
        )
        self._machine = PhoneMachine(facts["serial"], settings.phone_folder, name, self._verbs)
        print(f"{facts['name']}; its runs have the names {name}-...")
        free = facts["free_bytes"]
        if free is not None or settings.memory is not None:
            self._decision_maker.decide("memory", settings.memory, lambda: decisions.memory(free))

    def read(self) -> None:
        """Read, check and split the rows, for an existing bundle or for the export."""
        notes = self._record.recorded_fact("rows")
        if notes is None:
            settings = self._settings
            rows = UserRows(settings) if settings.reward is None else PromptRows(settings)
            if settings.bundle is None:
                self._parts = self._decision_maker.for_export(rows)
            else:
                bundle = self._bundle
                tokenizer, model = load_bundle_tokenizer(bundle), bundle.chain.model
                if settings.reward is not None:
                    check_roles(bundle.chain.roles)
                if settings.is_evolution:  # no program of training reads these rows
                    model = replace(model, sequence_length=bundle.chain.bounds.context)
                rows.check(tokenizer, model)
                self._parts = rows.split(tokenizer, model)
            notes = self._notes = rows.notes
        print("\n".join(notes))

    def export(self) -> None:
        """Export the model, unless there is a bundle."""
        settings = self._settings
        if settings.bundle is None and not self._folder.is_dir():
            names = (
                *("target_modules", "adapter", "rank", "init", "roles"),
                *("quantize", "sequence_length", "chat_template", "prepend_bos"),
            )
            values = {name: self._record.value(name) for name in names}
            decided = self._changed_settings("target_modules", "adapt_layers")
            decided |= {name: value for name, value in values.items() if value is not None}
            if decided.get("init") == "eva":
                decided |= {"init_rows": self._rows.train, "init_task": settings.task}
            if decided.get("quantize") == "8da4w":
                decided |= {"calibration_rows": self._rows.train, "calibration_task": settings.task}
            # In this process: a process of its own would need ten seconds for imports.
            words = write_verb_config(
                "export",
                {"model": settings.model, "out": self._folder, **decided},
                self._verbs / "export.yaml",
            )
            run_verb_here(main, *words)
        print(f"bundle {self._bundle.folder}")

    def plan(self) -> None:
        """Decide the settings of runs."""
        settings, record, bundle = self._settings, self._record, self._bundle
        facts = self._decision_maker.for_runs(bundle, self._rows)
        if settings.minutes is not None or settings.on:
            self._measure_pace(bundle)
        for decision in record.decisions:
            print(f"{decision.name:<16} {decision.value!s:<12} {decision.why}")
        if facts.unknown:
            print(unknown_note(facts.unknown, facts.targets))

    def _measure_pace(self, bundle: Bundle) -> None:
        """Measure a few steps, reduce the steps for `--minutes` if necessary, and print the time left."""
        settings, record = self._settings, self._record
        most = next(each for each in record.decisions if each.name == "steps")
        searched = settings.learning_rate is None and self._rows.dev is not None
        with_epsilons = settings.is_evolution and settings.epsilon is None

        def measured() -> dict[str, float]:
            self._machine.send_bundle(self._folder)
            shutil.rmtree(settings.out / _PILOT, ignore_errors=True)  # a resumed run would have another pace
            begin = time.perf_counter()
            summary = self._run(_PILOT, steps=min(_PILOT_STEPS, most.value), is_short=True)
            train = summary["train"]
            records = [each for each in read_metrics(settings.out / _PILOT) if each["event"] == "step"]
            pace = decisions.pace(
                [record["seconds"] for record in records],
                train.get("head_seconds") or 0.0,
                train["evaluation_seconds"],
                time.perf_counter() - begin,
            )
            if settings.minutes is not None:
                spent = record.seconds + self._seconds_after(bundle, pace)
                steps = decisions.steps_in(settings.minutes, spent, pace, most, searched, with_epsilons)
                record.decide(*steps)
            return asdict(pace)

        pace = Pace(**record.fact("pace", measured))
        searched = searched and record.value("learning_rate") is None
        rest = decisions.training_seconds(record.value("steps"), pace, searched, with_epsilons)
        print(f"a step takes {pace.step:.3g} s; training with the search takes about {format_duration(rest)}")

    def _seconds_after(self, bundle: Bundle, pace: Pace) -> float:
        """Return the seconds of the stages after the final run: scores, adapter, report."""
        if bundle.chain.is_encoder:
            dev, scored = (len(read_rows(path)) if path else 0 for path in (self._rows.dev, self._scored))
            return _SECONDS_AFTER + 2 * (pace.start + pace.evaluation * scored / max(min(dev, _DEV_ROWS), 1))
        return _SECONDS_AFTER + float(self._record.recorded_fact("scoring_seconds"))

    @property
    def _scored(self) -> Path | None:
        """File of the rows that are scored before and after training."""
        return self._rows.test or self._rows.dev

    def score_before(self) -> None:
        """Score the test rows, or the development rows, with the bundle's initial adapter."""
        if self._bundle.chain.is_encoder:
            print("an encoder's head is fitted when its run begins, so it is scored after the run")
        else:
            self._score("before", None)

    def score_after(self) -> None:
        """Score the rows with the trained adapter; an encoder's also with the head before the first step."""
        run = self._settings.out / "run"
        if self._bundle.chain.is_encoder:
            start = self._settings.out / "start"
            if not start.is_dir():
                self._verb("replay", {"run": run, "step": 0, "out": start})
            self._score("before", start)
        self._score("after", run)

    def _score(self, name: str, adapter: Path | None) -> None:
        """Score the rows with an adapter, and write `name`.json, unless it exists."""
        path, rows = self._settings.out / f"{name}.json", self._scored
        begin = time.perf_counter()
        if rows is None:
            print("there are no rows to score")
        elif not path.is_file():
            partial = path.with_suffix(".partial")
            eval_settings: dict[str, Any] = {"bundle": self._folder, "data": rows, "adapter": adapter}
            eval_settings |= {
                "task": self._settings.task,
                **self._changed_settings("date", "overflow", "threads", *_EXAMPLES, *_OBJECTIVE),
                **self._changed_settings("reward", "max_completion_length"),
                "beta": self._record.value("beta"),
            }
            if self._settings.on is None:  # the limit of a phone doesn't apply to scoring on this machine
                eval_settings["memory"] = self._settings.memory
            self._verb("eval", {**eval_settings, "json": partial}, name)
            partial.rename(path)
        self._record.fact("scoring_seconds", lambda: time.perf_counter() - begin)

    def _changed_settings(self, *names: str) -> dict[str, Any]:
        """Return those of these settings that differ from their defaults."""
        values = {name: getattr(self._settings, name) for name in names}
        return {name: value for name, value in values.items() if value != getattr(TuneSettings, name)}

    def search(self) -> None:
        """Search for the learning rate, unless the user gave one, and for the epsilon of `es` with it."""
        settings, record = self._settings, self._record
        with_epsilons, is_reward = settings.is_evolution and settings.epsilon is None, bool(settings.reward)
        if settings.epsilon is not None:
            self._decision_maker.decide("epsilon", settings.epsilon, lambda: None)

        def best() -> Decision:
            if self._rows.dev is None:
                return Decision(
                    "learning_rate", decisions.RATES[1], "there are no development rows to choose by"
                )
            steps = record.value("steps")
            runs = longest_search(len(decisions.RATES), steps, with_epsilons)
            print(f"short runs with different rates: at most {len(runs)}, with {sum(runs):,} steps in total")
            trial = partial(self._trial, TimeLeft(sum(runs)), (decisions.RATES[0], runs[0]))
            trials = search_rates(trial, decisions.RATES, steps)
            record.fact("trials", lambda: [each for each in trials if math.isfinite(each[2])])
            return decisions.best_rate(trials, is_reward)

        self._decision_maker.decide("learning_rate", settings.learning_rate, best)
        print(f"learning rate {record.value('learning_rate'):g}")
        if with_epsilons and (trials := record.recorded_fact("trials")):
            self._decision_maker.decide("epsilon", None, lambda: self._best_epsilon(trials))
            print(f"epsilon {record.value('epsilon'):g}")

    def _best_epsilon(self, trials: Sequence[Trial]) -> Decision:
        """Search for the size of perturbations with the chosen learning rate."""
        rate, steps = self._record.value("learning_rate"), max(steps for _, steps, _ in trials)
        left = TimeLeft(steps * (EPSILONS - 1))
        trial = partial(self._trial, left, (math.nan, 0), rate, steps)
        return decisions.best_epsilon(search_epsilons(trial, EstimatorFlags.epsilon))

    def _trial(
        self, left: TimeLeft, first: tuple[float, int], rate: float, steps: int, epsilon: float | None = None
    ) -> float:
        """Execute a short run, and return its loss of development rows, which is infinite if it diverged.

        The first run also samples completions, so that the user soon sees what the model learns.

        Args:
            left: estimates the remaining time.
            first: learning rate and steps of the first run.
            rate: learning rate of this run.
            steps: steps of this run.
            epsilon: size of perturbations of this run; None: the default.
        """
        changed = epsilon if epsilon != EstimatorFlags.epsilon else None
        name = f"search/{rate:.4g}-{steps}" + (f"-{changed:g}" if changed else "")
        begin, is_done = time.perf_counter(), status_of(self._settings.out / name) in ENDED
        own = self._samples() if (rate, steps) == first else {}
        own |= {"epsilon": changed} if changed else {}
        summary = self._run(name, learning_rate=rate, steps=steps, eval_steps=steps, is_short=True, **own)
        train = summary["train"]
        evaluation = train["last_evaluation"] or {}
        is_complete = summary["run"]["status"] == "completed" and evaluation.get("step") == steps
        # The selection metric: the loss; for preferences, with a penalty for less likely chosen completions.
        loss = -float(train["last_value"]) if is_complete and train["last_value"] is not None else math.inf
        if self._settings.reward is not None and math.isfinite(loss):
            loss -= _SAMPLED_SHARE * self._sampled_reward(name)
        rest = left.count(steps, None if is_done else time.perf_counter() - begin)
        figure = f"loss of development rows {loss:.4g}"
        if self._settings.reward is not None:
            figure = f"reward of development prompts {0.0 - loss:.4g}"
        which = f"  {rate:<8.4g} {steps:>5} steps" + (f", epsilon {epsilon:<8.4g}" if epsilon else "")
        result = f"{which}   {figure}"
        samples = (train.get("samples") or {}) if math.isfinite(loss) else {}
        print("\n".join(["; ".join(filter(None, [result, rest])), *sample_lines(samples)]), flush=True)
        return loss

    def _sampled_reward(self, name: str) -> float:
        """Return the mean reward of the completions that a run sampled."""
        rewards = [
            record["reward"]
            for record in read_metrics(self._settings.out / name)
            if record["event"] == "step" and "reward" in record
        ]
        return math.fsum(rewards) / max(len(rewards), 1)

    def train(self) -> None:
        """Execute the final run, and a second one if a run of the search was better."""
        record, settings, run = self._record, self._settings, self._settings.out / "run"
        summary = self._final()
        is_given = settings.learning_rate or settings.steps or settings.epochs
        if is_given or isinstance(self._machine, PhoneMachine):
            return  # the phone already has a run of this name
        train = summary["train"]
        best = None if train["best_value"] is None else -float(train["best_value"])
        trials, is_reward = record.recorded_fact("trials") or [], settings.reward is not None
        again = decisions.shorter(trials, best, train["steps"], is_reward)
        if again and not record.recorded_fact("first_run"):
            record.decide(*again)
            print(f"a shorter run was better: {again[0].why}")
            record.fact("first_run", lambda: str(run.rename(settings.out / "search" / "first-run")))
            self._final()

    def _final(self) -> dict[str, Any]:
        """Execute the final run, and return its summary.

        Raises:
            PrgeError: the run diverged.
        """
        count, rate = self._record.value("steps"), self._record.value("learning_rate")
        every = decisions.eval_steps(count)
        summary = self._run(
            "run",
            learning_rate=rate,
            steps=count,
            eval_steps=every,
            save_steps=every,
            sample_every=3 * every,
            **self._samples(),
        )
        if summary["run"]["status"] == "diverged":
            raise PrgeError(
                "The final run diverged.", remedy=f"Give a --learning-rate below {rate:g}.", code="diverged"
            )
        return summary

    def _samples(self) -> dict[str, Any]:
        """Return the settings of a run for sampling completions."""
        bundle = self._bundle
        if DECODE in bundle.chain.roles and self._rows.is_generative:
            return {"sample_prompts": self._rows.write_prompts(load_bundle_tokenizer(bundle))}
        return {"sample_rows": SAMPLES} if self._rows.dev and self._rows.has_candidates else {}

    def _run(self, name: str, *, is_short: bool = False, **settings: Any) -> dict[str, Any]:
        """Start or resume a run, and return its summary, even if it diverged."""
        folder = self._settings.out / name
        summary = folder / SUMMARY
        if status_of(folder) not in ENDED:
            try:
                run_settings = {**self._shared_settings(), **settings, "quiet": is_short or None}
                self._machine.run(folder, run_settings, is_short)
            except PrgeError:
                if status_of(folder) != "diverged":
                    raise
        if RowFacts(**self._record.recorded_fact("facts")).fewest is not None:
            self._record.fact("heads", lambda: f"{name}/{JOURNAL}")
        return read_json(summary)

    def _shared_settings(self) -> dict[str, Any]:
        """Return the settings that all runs share."""
        value, rows = self._record.value, self._rows
        heads = self._settings.out / (self._record.recorded_fact("heads") or "")
        return {
            **self._changed_settings("overflow", "max_dropped", "weight_decay", *_EXAMPLES, *_OBJECTIVE),
            **self._changed_settings("reward", *_REWARD),
            "epsilon": value("epsilon"),
            "beta": value("beta"),
            "heads_of": heads if heads.is_file() else None,
            "bundle": self._folder,
            "train": rows.train,
            "dev": rows.dev,
            "task": self._settings.task,
            "date": self._settings.date,
            "dev_limit": None if rows.dev is None else _DEV_ROWS,
            "estimator": value("estimator"),
            "head_folds": value("head_folds"),
            "batch_size": value("batch_size"),
            "memory": self._settings.memory or value("memory"),
            # With few development rows, other metrics are often equal for many steps.
            "select": "loss",
            "seed": self._settings.seed,
            "threads": self._settings.threads,
            "eval_steps": 0,
        }

    def publish(self) -> None:
        """Write the PEFT folder."""
        out = self._settings.out / "adapter"
        if not out.is_dir():
            source = {"source": self._settings.out / "run", "bundle": self._folder}
            self._verb("publish", {**source, "model": self._settings.model, "out": out})

    def report(self) -> None:
        """Write the report."""
        out = self._settings.out
        self._verb("report", {"runs": [out / "run"], "out": out / "report.html"})

    def _verb(self, verb: str, settings: Mapping[str, Any], name: str = "") -> None:
        """Run a verb with a settings file `name`.yaml, by default with the verb's name."""
        run_verb(*write_verb_config(verb, settings, self._verbs / f"{name or verb}.yaml"))

    def result(self) -> dict[str, Any]:
        """Return scores, decisions, memory and seconds."""
        out = self._settings.out
        runs = [read_json(path) for path in (*out.glob("search/*/run.json"), out / "run" / SUMMARY)]
        peaks = [run["train"]["memory"].get("peak_bytes") for run in runs]
        scores = {name: out / f"{name}.json" for name in ("before", "after")}
        return {
            **{f"score_{name}": read_json(path) if path.is_file() else None for name, path in scores.items()},
            "scored_rows": "test" if self._rows.test else "dev",
            "chosen": {each.name: {"value": each.value, "why": each.why} for each in self._record.decisions},
            "peak_mb": max(filter(None, peaks), default=0) / 1e6 or None,
            "seconds": self._record.seconds,
            "final_step": runs[-1]["train"].get("final_step"),
            "bundle": str(self._folder),
            "quantization": self._bundle.quantization,
            "run_on_phone": self._machine.run_name(out / "run")
            if isinstance(self._machine, PhoneMachine)
            else None,
            "samples": runs[-1]["train"].get("samples"),
            "next": shlex.join(["prge", *self._next()]),
        }

    def _next(self) -> list[str]:
        """Return the words of a command of prge that uses the tuned model."""
        out = str(self._settings.out)
        if self._rows.has_candidates:
            task = ["--task", self._settings.task] if self._settings.task else []
            return ["eval", out, *task, "--data", "TEST_ROWS"]
        if self._rows.has_messages and load_bundle_tokenizer(self._bundle).chat_template:
            return ["chat", out]
        return ["generate", out, "--prompt", "PROMPT"]
