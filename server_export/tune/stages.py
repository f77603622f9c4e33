"""The stages of a tuning, in order. Each leaves files; one that is done is not done again.

rows/          train, dev and test as jsonl, with the columns that are read
bundle/        the export, unless one is given
settings/      what each verb was started with, as its --config reads it
search/        short runs, one for each learning rate and number of steps
run/           the final run
start/         of an encoder: its run before the first step, with the head that was fitted then
before.json    scores of the bundle's adapter, or of start/; and of the run's: after.json
adapter/       the PEFT folder
report.html    curves, samples, what was chosen and why
"""

from __future__ import annotations

import math
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from prge.cli import main
from prge.errors import PrgeError, RunError
from prge.files.bundle import Bundle, open_bundle
from prge.files.own_settings import check_links
from prge.files.run_folder import (
    CONFIG,
    DECISIONS,
    ENDED,
    JOURNAL,
    SUMMARY,
    check_new_run,
    read_metrics,
    run_lock,
)
from prge.files.signatures import DECODE
from prge.host.atomic import check_place
from prge.host.progress import TimeLeft, duration
from prge.learning.preferences import ObjectiveFlags
from prge.rows.readers.files import Row, read_rows
from prge.rows.report import unknown_note
from prge.rows.sources import Part
from prge.rows.tokenization.tokenizer import bundle_tokenizer
from prge.verbs.settings import is_config_of
from prge.verbs.starting import configured, json_of, run_verb, run_verb_here
from server_export.tune import decisions
from server_export.tune.choosing import Choosing
from server_export.tune.decisions import Decision, Pace, RowFacts
from server_export.tune.named_rows import NamedRows
from server_export.tune.places import Here, Phone, Place
from server_export.tune.rates import longest_search, search_rates
from server_export.tune.record import Record, status_of
from server_export.tune.row_files import SAMPLES, RowFiles
from server_export.tune.samples import sample_lines
from server_export.tune.settings import TuneSettings

# Development rows that a run's evaluations read.
_DEV_ROWS = 200
_PILOT, _PILOT_STEPS = "search/pilot", 10
# How rows become examples.
_EXAMPLES = ("append_eos", "control_tokens")
_OBJECTIVE = tuple(item.name for item in fields(ObjectiveFlags))
# Of the adapter and the report, about.
_SECONDS_AFTER = 8.0


def tune(settings: TuneSettings) -> dict[str, Any]:
    """Go through all stages; returns scores, decisions, memory and seconds.

    Raises:
        PrgeError: bad input, or a stage that failed. What is done stays: `--resume` goes on. A folder that
            nothing was made for isn't begun.
    """
    with ExitStack() as held:
        check_place(settings.out)
        if is_there := (settings.out / DECISIONS).is_file():
            check_links(settings.out)  # the same command again goes on with a folder, whoever made it
            held.enter_context(run_lock(settings.out))
        tuning = _Tuning(settings)
        tuning.check_folder(is_there)
        stages: list[tuple[str, Callable[[], None]]] = [
            *([("phone", tuning.meet_phone)] if settings.on else []),
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
                if not is_there:
                    held.enter_context(run_lock(settings.out))
                tuning.keep(is_there)
            print(f"\n{number}/{len(stages)}  {name}", flush=True)
            stage()
        return tuning.result()


class _Tuning:
    """The stages; each finds what it needs in the folder and the record."""

    def __init__(self, settings: TuneSettings) -> None:
        self._record = Record(settings)
        date = self._record.found("date", lambda: settings.dated().date)
        self._settings = settings = replace(settings, date=date)
        self._rows = RowFiles(
            settings.out / "rows",
            settings.task,
            settings.objective,
            settings.append_eos,
            settings.control_tokens,
            date,
        )
        self._parts: dict[Part, list[Row]] = {}
        self._notes: list[str] | None = None
        self._folder = settings.bundle or settings.out / "bundle"
        self._choosing = Choosing(settings, self._record)
        self._verbs = settings.out / "settings"
        self._place: Place = Here(self._verbs)

    @cached_property
    def _bundle(self) -> Bundle:
        """The bundle that is there or was exported, opened once."""
        return open_bundle(self._folder)

    def keep(self, is_there: bool) -> None:
        """Write rows that were just read, and what was decided by them, into the folder.

        Args:
            is_there: whether the folder holds a tuning already.

        Raises:
            RunError: it holds something else, which stays as it is.
        """
        out = self._settings.out
        if self._notes is None:
            return
        self.check_folder(is_there)
        self._record.keep()
        (out / "before.json").unlink(missing_ok=True)
        self._rows.write(self._parts)
        self._record.found("rows", lambda: self._notes)

    def check_folder(self, is_there: bool) -> None:
        """Raise RunError if the folder holds something else than a tuning."""
        out = self._settings.out
        if is_there:
            return
        if any((out / name).exists() for name in (DECISIONS, "rows", "search", "run")):
            raise RunError(
                f"{out} holds something already",
                remedy="give another folder with --out",
                code="folder-occupied",
            )
        if not is_config_of(TuneSettings, out / CONFIG):
            check_new_run(out, ("settings", "start", "before.json", "after.json", "adapter", "report.html"))

    def meet_phone(self) -> None:
        """Measure the phone that runs take place on; from then on it is this one."""
        settings, record = self._settings, self._record
        name = record.found("name_on_phone", lambda: f"tune-{secrets.token_hex(4)}")
        facts = record.found(
            "phone", lambda: asdict(Phone(settings.serial, settings.phone_folder, name, self._verbs).facts())
        )
        self._place = Phone(facts["serial"], settings.phone_folder, name, self._verbs)
        print(f"{facts['name']}; its runs are called {name}-...")
        free = facts["free_bytes"]
        if free is not None or settings.memory is not None:
            self._choosing.decide("memory", settings.memory, lambda: decisions.memory(free))

    def read(self) -> None:
        """Read, check and split the rows, for the bundle that is there or will be."""

        notes = self._record.known("rows")
        if notes is None:
            rows = NamedRows(self._settings)
            if self._settings.bundle is None:
                self._parts = self._choosing.for_export(rows)
            else:
                bundle = self._bundle
                tokenizer, model = bundle_tokenizer(bundle), bundle.chain.model
                rows.check(tokenizer, model)
                self._parts = rows.split(tokenizer, model)
            notes = self._notes = rows.notes
        print("\n".join(notes))

    def export(self) -> None:
        """Export, unless a bundle is there."""
        settings = self._settings
        if settings.bundle is None and not self._folder.is_dir():
            names = (
                *("target_modules", "adapter", "rank", "init", "roles"),
                *("quantize", "sequence_length", "chat_template", "prepend_bos"),
            )
            values = {name: self._record.value(name) for name in names}
            decided = self._given("target_modules", "adapt_layers")
            decided |= {name: value for name, value in values.items() if value is not None}
            if decided.get("init") == "eva":
                decided |= {"init_rows": self._rows.train, "init_task": settings.task}
            if decided.get("quantize") == "8da4w":
                decided |= {"calibration_rows": self._rows.train, "calibration_task": settings.task}
            # This process has imported already what takes a verb of its own ten seconds.
            words = configured(
                "export",
                {"model": settings.model, "out": self._folder, **decided},
                self._verbs / "export.yaml",
            )
            run_verb_here(main, *words)
        print(f"bundle {self._bundle.folder}")

    def plan(self) -> None:
        """Decide how runs of the bundle go."""
        settings, record, bundle = self._settings, self._record, self._bundle
        facts = self._choosing.for_runs(bundle, self._rows)
        if settings.minutes is not None or settings.on:
            self._pace(bundle)
        for each in record.decisions:
            print(f"{each.name:<16} {each.value!s:<12} {each.why}")
        if facts.unknown:
            print(unknown_note(facts.unknown, facts.targets))

    def _pace(self, bundle: Bundle) -> None:
        """Measure a few steps and tell how long the rest takes; `--minutes` may ask for fewer steps."""
        settings, record = self._settings, self._record
        most = next(each for each in record.decisions if each.name == "steps")
        searched = settings.learning_rate is None and self._rows.dev is not None

        def measured() -> dict[str, float]:
            self._place.bring(self._folder)
            shutil.rmtree(settings.out / _PILOT, ignore_errors=True)  # of which a part may be done
            begin = time.perf_counter()
            summary = self._run(_PILOT, steps=min(_PILOT_STEPS, most.value), is_short=True)
            train = summary["train"]
            taken = [each for each in read_metrics(settings.out / _PILOT) if each["event"] == "step"]
            pace = decisions.pace(
                [each["seconds"] for each in taken],
                train.get("head_seconds") or 0.0,
                train["evaluation_seconds"],
                time.perf_counter() - begin,
            )
            if settings.minutes is not None:
                spent = record.seconds + self._ending(bundle, pace)
                record.decide(*decisions.steps_in(settings.minutes, spent, pace, most, searched))
            return asdict(pace)

        pace = Pace(**record.found("pace", measured))
        searched = searched and record.value("learning_rate") is None
        rest = decisions.training_seconds(record.value("steps"), pace, searched)
        print(f"a step takes {pace.step:.3g} s; training, the search included, takes about {duration(rest)}")

    def _ending(self, bundle: Bundle, pace: Pace) -> float:
        """Seconds of what comes after the final run: scores, adapter, report."""
        if bundle.chain.is_encoder:
            dev, scored = (len(read_rows(path)) if path else 0 for path in (self._rows.dev, self._scored))
            return _SECONDS_AFTER + 2 * (pace.start + pace.evaluation * scored / max(min(dev, _DEV_ROWS), 1))
        return _SECONDS_AFTER + float(self._record.known("scoring_seconds"))

    @property
    def _scored(self) -> Path | None:
        """The rows that are scored before and after."""
        return self._rows.test or self._rows.dev

    def score_before(self) -> None:
        """Score the test rows, or the development rows, with the adapter that the bundle came with."""
        if self._bundle.chain.is_encoder:
            print("an encoder's classes are fitted when its run begins: scored after it")
        else:
            self._score("before", None)

    def score_after(self) -> None:
        """Score them with the result; an encoder's also as they were before the first step."""
        run = self._settings.out / "run"
        if self._bundle.chain.is_encoder:
            start = self._settings.out / "start"
            if not start.is_dir():
                self._verb("replay", {"run": run, "step": 0, "out": start})
            self._score("before", start)
        self._score("after", run)

    def _score(self, name: str, adapter: Path | None) -> None:
        path, rows = self._settings.out / f"{name}.json", self._scored
        begin = time.perf_counter()
        if rows is None:
            print("there are no rows to score")
        elif not path.is_file():
            partial = path.with_suffix(".partial")
            scored: dict[str, Any] = {"bundle": self._folder, "data": rows, "adapter": adapter}
            scored |= {
                "task": self._settings.task,
                **self._given("date", "overflow", "threads", *_EXAMPLES, *_OBJECTIVE),
                "beta": self._record.value("beta"),
            }
            if self._settings.on is None:  # else it is of the phone, and rows are scored here
                scored["memory"] = self._settings.memory
            self._verb("eval", {**scored, "json": partial}, name)
            partial.rename(path)
        self._record.found("scoring_seconds", lambda: time.perf_counter() - begin)

    def _given(self, *names: str) -> dict[str, Any]:
        """Settings that a user has changed."""
        pairs = {name: getattr(self._settings, name) for name in names}
        return {name: value for name, value in pairs.items() if value != getattr(TuneSettings, name)}

    def search(self) -> None:
        """Find the learning rate."""

        def best() -> Decision:
            if self._rows.dev is None:
                return Decision(
                    "learning_rate", decisions.RATES[1], "there are no development rows to choose by"
                )
            steps = self._record.value("steps")
            runs = longest_search(len(decisions.RATES), steps)
            print(f"short runs with other rates: at most {len(runs)}, of {sum(runs):,} steps in all")
            trial = partial(self._trial, TimeLeft(sum(runs)), (decisions.RATES[0], runs[0]))
            trials = search_rates(trial, decisions.RATES, steps)
            self._record.found("trials", lambda: [each for each in trials if math.isfinite(each[2])])
            return decisions.best_rate(trials)

        self._choosing.decide("learning_rate", self._settings.learning_rate, best)
        print(f"learning rate {self._record.value('learning_rate'):g}")

    def _trial(self, left: TimeLeft, first: tuple[float, int], rate: float, steps: int) -> float:
        """Loss of development rows after a short run; infinite if it diverged.

        Answers are shown after the first one, so that a user soon sees what is learnt.
        """
        name = f"search/{rate:.4g}-{steps}"
        begin, is_done = time.perf_counter(), status_of(self._settings.out / name) in ENDED
        samples = self._samples() if (rate, steps) == first else {}
        summary = self._run(
            name, learning_rate=rate, steps=steps, evaluate_every=steps, is_short=True, **samples
        )
        train = summary["train"]
        found = train["last_evaluation"] or {}
        is_whole = summary["run"]["status"] == "completed" and found.get("step") == steps
        # What steps are judged by: the loss, of preferences with the harm to what is chosen.
        loss = -float(train["last_value"]) if is_whole and train["last_value"] is not None else math.inf
        rest = left.count(steps, None if is_done else time.perf_counter() - begin)
        told = f"  {rate:<8.4g} {steps:>5} steps   loss of development rows {loss:.4g}"
        shown = (train.get("samples") or {}) if math.isfinite(loss) else {}
        print("\n".join(["; ".join(filter(None, [told, rest])), *sample_lines(shown)]), flush=True)
        return loss

    def train(self) -> None:
        """The final run; a second one where a run of the search was better."""
        record, settings, run = self._record, self._settings, self._settings.out / "run"
        summary = self._final()
        is_given = settings.learning_rate or settings.steps or settings.epochs
        if is_given or isinstance(self._place, Phone):
            return  # a phone keeps the first one under the same name
        train = summary["train"]
        best = None if train["best_value"] is None else -float(train["best_value"])
        again = decisions.shorter(record.known("trials") or [], best, train["steps"])
        if again and not record.known("first_run"):
            record.decide(*again)
            print(f"a shorter run was better: {again[0].why}")
            record.found("first_run", lambda: str(run.rename(settings.out / "search" / "first-run")))
            self._final()

    def _final(self) -> dict[str, Any]:
        """The final run's summary.

        Raises:
            PrgeError: it diverged.
        """
        count, rate = self._record.value("steps"), self._record.value("learning_rate")
        every = decisions.evaluate_every(count)
        summary = self._run(
            "run",
            learning_rate=rate,
            steps=count,
            evaluate_every=every,
            checkpoint_every=every,
            sample_every=3 * every,
            **self._samples(),
        )
        if summary["run"]["status"] == "diverged":
            raise PrgeError(
                "the final run diverged", remedy=f"give a --learning-rate below {rate:g}", code="diverged"
            )
        return summary

    def _samples(self) -> dict[str, Any]:
        """What the model of a run is to answer, as settings of the run."""
        bundle = self._bundle
        if DECODE in bundle.chain.roles and self._rows.are_texts:
            return {"sample_prompts": self._rows.write_prompts(bundle_tokenizer(bundle))}
        return {"sample_rows": SAMPLES} if self._rows.dev and self._rows.have_candidates else {}

    def _run(self, name: str, *, is_short: bool = False, **settings: Any) -> dict[str, Any]:
        """A run, begun or gone on with; returns its summary, also where it diverged."""
        folder = self._settings.out / name
        summary = folder / SUMMARY
        if status_of(folder) not in ENDED:
            try:
                given = {**self._shared(), **settings, "quiet": is_short or None}
                self._place.run(folder, given, is_short)
            except PrgeError:
                if status_of(folder) != "diverged":
                    raise
        if RowFacts(**self._record.known("facts")).fewest is not None:
            self._record.found("heads", lambda: f"{name}/{JOURNAL}")
        return json_of(summary)

    def _shared(self) -> dict[str, Any]:
        """Settings of every run."""
        value, rows = self._record.value, self._rows
        heads = self._settings.out / (self._record.known("heads") or "")
        return {
            **self._given("overflow", "max_dropped", "weight_decay", *_EXAMPLES, *_OBJECTIVE),
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
            # Of few development rows a metric is often the same.
            "select": "loss",
            "seed": self._settings.seed,
            "threads": self._settings.threads,
            "evaluate_every": 0,
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
        """Run a verb by a file in the folder: `name`.yaml, by default the verb's."""
        run_verb(*configured(verb, settings, self._verbs / f"{name or verb}.yaml"))

    def result(self) -> dict[str, Any]:
        """Scores, decisions, memory and seconds."""
        out = self._settings.out
        runs = [json_of(path) for path in (*out.glob("search/*/run.json"), out / "run" / SUMMARY)]
        peaks = [run["train"]["memory"].get("peak_bytes") for run in runs]
        scores = {name: out / f"{name}.json" for name in ("before", "after")}
        return {
            **{f"score_{name}": json_of(path) if path.is_file() else None for name, path in scores.items()},
            "scored_rows": "test" if self._rows.test else "dev",
            "chosen": {each.name: {"value": each.value, "why": each.why} for each in self._record.decisions},
            "peak_mb": max(filter(None, peaks), default=0) / 1e6 or None,
            "seconds": self._record.seconds,
            "final_step": runs[-1]["train"].get("final_step"),
            "bundle": str(self._folder),
            "quantization": self._bundle.quantization,
            "run_on_phone": self._place.run_name(out / "run") if isinstance(self._place, Phone) else None,
            "samples": runs[-1]["train"].get("samples"),
            "next": shlex.join(["prge", *self._next()]),
        }

    def _next(self) -> list[str]:
        """What a user may want to type now, for what the model has learnt."""
        out = str(self._settings.out)
        if self._rows.have_candidates:
            task = ["--task", self._settings.task] if self._settings.task else []
            return ["eval", out, *task, "--data", "TEST_ROWS"]
        if self._rows.are_messages and bundle_tokenizer(self._bundle).chat_template:
            return ["chat", out]
        return ["generate", out, "--prompt", "PROMPT"]
