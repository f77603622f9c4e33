"""`prge run`: fine-tune a bundle's adapter in a run folder that can be resumed, replayed and reported.

config.yaml      the settings            checkpoints/step-N/   PEFT folder and optimizer state
journal.jsonl    what each step learnt   final/                PEFT folder of the best step
metrics.jsonl    what to plot            run.json, log.txt     what, where, how it ended
samples.jsonl    what the model said to prompts
reference.json   of preferences: how the adapter of the start scores the rows; made again where it is missing
trunk_cache/     what lower blocks made of training rows; may be deleted at any time
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.engines.trunk_cache import TrunkCache
from device_runner.reporting.next_steps import next_steps
from device_runner.session.gates import Gates
from device_runner.session.inputs import (
    CHANGE,
    CHANGEABLE,
    RunInputs,
    estimator_of,
    read_inputs,
    settings_records,
)
from device_runner.session.memory import budget_of_steps, outcome, shape_of_scores
from device_runner.session.noise import noise_note
from device_runner.session.planning import RunPlan, plan_run, settled
from device_runner.session.reference import with_references
from device_runner.session.samples import Answerer, Chooser, Samples, Writer
from device_runner.session.sensors import Sensors
from device_runner.session.settings import RunSettings, date_of_run
from prge.engine import Engine
from prge.errors import ConfigError, RunError, shown
from prge.files.bundle import open_bundle
from prge.files.journal import Journal, Record
from prge.files.own_settings import holds_own, write_settings
from prge.files.run_folder import (
    CHECKPOINTS,
    CONFIG,
    FINAL,
    JOURNAL,
    TRUNK_CACHE,
    check_new_run,
    run_lock,
)
from prge.files.signatures import DECODE, PREFILL, STACK
from prge.host.memory import PeakMemory
from prge.host.terminal import best_effort
from prge.learning.checkpoint import TrainingState, keep_state, load_best, load_latest, write_result
from prge.learning.costs import Budget
from prge.learning.encoder_heads import Heads, digest_of, fit_heads
from prge.learning.estimators.protocol import Estimator
from prge.learning.estimators.table import ESTIMATORS
from prge.learning.examples import token_count
from prge.learning.preferences import Preference
from prge.learning.sampling import Sampler
from prge.learning.training import AdapterLearner, train
from prge.rows.own_heads import refused_labels
from prge.rows.scoring import displacement, evaluate
from prge.running.recipe import Recipe
from prge.running.watching import Watcher, describe_changes, graceful_stop
from prge.text.loop import Generator
from prge.verbs.settings import parse_settings, settings_to_yaml


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge run --help`."""
    settings = parse_settings(RunSettings, argv, "prge run")
    final = run(settings)
    with best_effort(sys.stdout):
        print(final, flush=True)
    return 0


def run(settings: RunSettings) -> Path:
    """Train, and write everything into `settings.out`; returns its `final/` folder.

    Raises:
        PrgeError: bad input, before anything is changed; or a run that can't go on, with its state saved.
        KeyboardInterrupt: interrupted by the user, with its state saved.
    """
    bundle = open_bundle(settings.bundle)
    settings = settled(settings, bundle)
    with run_lock(settings.out):
        _check_folder(settings)
        settings = replace(settings, date=settings.date or date_of_run(settings.resume)).dated()
        inputs = read_inputs(bundle, settings)
        plan = plan_run(bundle, inputs.train, settings, inputs.objective)
        shapes = [plan.shape, shape_of_scores(bundle, [*inputs.train, *inputs.dev])]
        budget = budget_of_steps(bundle, shapes, settings.memory, settings.engine)
        before = PeakMemory().peak
        with Journal(settings.out / JOURNAL) as journal:
            opened = open_run(plan, inputs, journal, budget)
            watcher = Watcher(plan.settings, journal.steps, opened.rows, opened.describe)
            watcher.catch_up(journal)
            with watcher, graceful_stop(watcher):
                watcher.say(inputs.report)
                if settings.epochs is not None:
                    watcher.say(f"{settings.epochs:g} epochs: {plan.settings.steps} steps")
                if opened.opened.notes:
                    watcher.say(opened.opened.notes)
                state, samples = train_run(opened, watcher)
                final = finish_run(opened, state, samples, watcher)
                if budget is not None and (told := outcome(budget.limit, before)):
                    watcher.say(told)
                return final


@dataclass(frozen=True)
class OpenRun:
    """A run whose engine is open and whose journal says what it is; `sensors` are those of the start."""

    plan: RunPlan
    inputs: RunInputs
    opened: OpenEngine
    journal: Journal
    sampler: Sampler
    estimator: Estimator
    cache: TrunkCache | None
    sensors: Record
    budget: Budget | None = None

    @property
    def settings(self) -> RunSettings:
        """All of them, decided."""
        return self.plan.settings

    def rows(self, steps: int) -> int:
        """Forward passes of single sequences that so many steps cost."""
        if self.settings.estimator is None:
            raise ValueError("which estimator is not settled")
        passes = ESTIMATORS[self.settings.estimator].passes(self.settings.queries)
        return passes * self.sampler.sequences(steps)

    def keep(self, state: TrainingState) -> None:
        """Save a checkpoint, and drop those that nobody needs any more."""
        settings, template = self.settings, self.inputs.bundle.adapter
        every, gradients = settings.checkpoint_every, settings.keep_gradients
        keep_state(settings.out, state, template, self.journal, every, gradients)

    def score(self, state: TrainingState) -> Record:
        """Scores of the development rows."""
        inputs, settings = self.inputs, self.settings
        return evaluate(
            self.opened.engine,
            state.adapter,
            inputs.dev,
            inputs.task,
            head=state.head,
            select=settings.select,
            objective=inputs.objective,
            normalisation=settings.loss_normalisation,
        )[0]

    def describe(self) -> tuple[Record, Record]:
        """The blocks `run` and `train` of run.json, but for what a watcher knows."""
        inputs, estimators = self.inputs, []
        for record in settings_records(self.journal):
            with self.journal.reading(record):
                estimator = record["settings"]["estimator"]
                estimators.append({"since": record.get("step", 0), "estimator": estimator})
        run = {
            **inputs.bundle.description,
            "roles": list(inputs.bundle.chain.roles),
            "estimators": estimators,
            "objective": inputs.origin["objective"],
            "engine": self.opened.name,
            "threads": self.opened.threads,
        }
        return run, {
            "data": inputs.data,
            "training_rows": len(inputs.train),
            "training_tokens": token_count(inputs.train),
            "development_rows": len(inputs.dev),
            "trained_values": inputs.adapter.size,
            "sensors": {"start": self.sensors, "last": Sensors().record()},
            "memory": {} if self.budget is None else self.budget.to_json(),
        }


def open_run(plan: RunPlan, inputs: RunInputs, journal: Journal, budget: Budget | None = None) -> OpenRun:
    """Open the engine, and write down what a run is, or compare it with what it was begun as."""
    settings, cache = plan.settings, None
    loaded = None if budget is None else budget.loaded
    if settings.trunk_cache_bytes:
        folder = settings.out / TRUNK_CACHE
        cache = TrunkCache(folder, settings.trunk_cache_bytes, settings.trunk_cache_dtype)
    opened = open_engine(
        inputs.bundle,
        plan.role,
        threads=settings.threads,
        engine=settings.engine,
        loaded=loaded,
        folder=settings.out,
        checkpoint_dtype=settings.checkpoint_dtype,
        trunk=cache,
    )
    begin(journal, inputs.identity(settings), settings)
    sampler, estimator = plan.recipe.sampler(inputs.train), estimator_of(journal)
    return OpenRun(plan, inputs, opened, journal, sampler, estimator, cache, Sensors().record(), budget)


def train_run(run: OpenRun, watcher: Watcher) -> tuple[TrainingState, Samples | None]:
    """Train until the last step, an early stop, or an interruption.

    Raises:
        DivergenceError: see prge.learning.training.Learner.step.
        KeyboardInterrupt: interrupted, with the state saved.
    """
    run = _referring(run, watcher)
    settings, inputs, opened, journal = run.settings, run.inputs, run.opened, run.journal
    state = _first_state(run, watcher)
    load_latest(settings.out / CHECKPOINTS, state, newest=journal.steps)
    if journal.steps:
        watcher.say(f"going on after step {journal.steps} of {settings.steps}")
    gates = Gates(settings.conditions())
    sampler = run.sampler
    _check_batch(run, sampler)
    if settings.resume is None:
        _tell_noise(run, state, watcher)
    learner = AdapterLearner(
        engine=opened.engine,
        sampler=sampler,
        estimator=run.estimator,
        learning_rates=run.plan.recipe.learning_rates(),
        state=state,
        settings=settings.of_loop,
        journal=journal,
        keep=run.keep,
        score=run.score if inputs.dev else None,
        objective=inputs.objective,
    )
    answerer = _answerer(inputs, opened)
    samples = Samples(answerer, state, settings.sample_every, watcher) if answerer else None
    watcher.say(_plan(run))
    if opened.store.residual_bytes is not None:
        shape = run.plan.shape
        watcher.say(opened.store.describe_residuals(shape.states, shape.rows * shape.targets))
    train(learner, settings.of_loop, samples or watcher, lambda: gates.hold(watcher))
    if watcher.stopped and state.step < settings.steps:
        watcher.say(f"stopped after step {state.step}; go on with: prge run --resume {settings.out}")
        raise KeyboardInterrupt
    return state, samples


def finish_run(run: OpenRun, state: TrainingState, samples: Samples | None, watcher: Watcher) -> Path:
    """Write the result, and tell what came out and what to do next; returns the `final/` folder."""
    final = run.settings.out / FINAL
    load_best(run.settings.out / CHECKPOINTS, state)
    write_result(final, state, run.inputs.bundle.adapter, overwrite=True)
    if samples is not None:
        samples.take()
    best = run.journal.evaluation(state.step) or {}
    with run.journal.reading(best):
        watcher.say_final(state.step, best)
    for record in (best, watcher.newest):
        if fallen := displacement(record):
            watcher.say(f"note: at step {record['step']} {fallen}")
            break
    watcher.say(_closing(run.settings, run.inputs, samples))
    if run.cache is not None:
        watcher.say(f"trunk: {run.cache.computed} rows computed, {run.cache.reused} from the cache")
    return final


def _first_state(run: OpenRun, watcher: Watcher) -> TrainingState:
    """The state before the first step, an encoder's with heads."""
    begin = time.perf_counter()
    heads, told = prepare_heads(run.settings, run.inputs, run.opened.engine, run.journal)
    if told:
        seconds = watcher.told["head_seconds"] = time.perf_counter() - begin
        watcher.say(f"heads: {told}, {seconds:.1f} s")
    return run.plan.recipe.new_state(run.inputs.adapter, heads)


def _referring(run: OpenRun, watcher: Watcher) -> OpenRun:
    """The run with the reference of rows that are preferences: those of training if the loss asks for it."""
    inputs, objective = run.inputs, run.inputs.objective
    if not isinstance(objective, Preference) or not (objective.compares or inputs.dev):
        return run
    train = inputs.train if objective.compares else []
    examples, told = with_references(
        run.settings.out, inputs.bundle.sha256, run.opened.engine, inputs.adapter, [*train, *inputs.dev]
    )
    if told:
        watcher.say(told)
    train, dev = examples[: len(train)] or inputs.train, examples[len(train) :]
    return replace(run, inputs=replace(inputs, train=train, dev=dev), sampler=run.plan.recipe.sampler(train))


def _check_batch(run: OpenRun, sampler: Sampler) -> None:
    """Refuse to go on with a run whose steps had another number of examples.

    Raises:
        ConfigError: an earlier version, whose `--batch-size` counted sequences, began it.
    """
    first = run.journal.step(0)
    taken = len(first.get("rows", ())) if first is not None else 0
    if taken not in (0, sampler.batch_size):
        raise ConfigError(
            "the run can't go on:",
            [f"its steps had {taken} examples, its settings now ask for {sampler.batch_size}"],
            remedy="go on with it in the version that run.json names, whose --batch-size counted the "
            "sequences of a call, or start a new run",
        )


def _answerer(inputs: RunInputs, opened: OpenEngine) -> Answerer | None:
    """Who makes the samples; None if none are asked for."""
    if prompts := inputs.sample_prompts:
        return Writer(prompts, Generator(opened.speaker(len(prompts)), inputs.tokenizer))
    if inputs.sample_rows:
        return Chooser(inputs.sample_rows, opened.engine, inputs.tokenizer)
    return None


def _plan(run: OpenRun) -> str:
    """What is about to happen, in a line."""
    settings, inputs, opened, count = run.settings, run.inputs, run.opened, run.sampler.batch_size
    examples = settings.steps * count
    threads = "1 thread" if opened.threads == 1 else f"{opened.threads} threads"
    return (
        f"training: {settings.estimator}, {settings.steps:,} steps of {count} examples "
        f"({examples / len(inputs.train):.1f} epochs), {inputs.adapter.size:,} trained numbers, "
        f"{opened.name} engine, {threads}"
    )


def _closing(settings: RunSettings, inputs: RunInputs, samples: Samples | None) -> str:
    """What the model writes before and after, where things are, and what to type next."""
    lines = []
    if samples is not None:
        answers = samples.summary()
        for before, after in zip(answers["before"], answers["after"], strict=False):
            lines += [
                f"prompt  {shown(after['prompt'])}",
                f"  before  {shown(before['text'])}",
                f"  after   {shown(after['text'])}",
                *([f"  right   {shown(after['right'])}"] if "right" in after else []),
            ]
        texts = [[each["text"] for each in answers[time]] for time in ("before", "after")]
        lines += filter(None, [describe_changes(*texts)])
    lines.append(f"adapter: {settings.out / FINAL}")
    writes = {PREFILL, DECODE} <= set(inputs.bundle.chain.roles)
    steps = next_steps(settings.out, asdict(settings), finished=True, writes=writes)
    return "\n".join([*lines, "next:", *(f"  {step.command}" for step in steps)])


def _tell_noise(run: OpenRun, state: TrainingState, watcher: Watcher) -> None:
    """Say how noisy differences in quantized activations are; a run goes on without the answer too."""
    if run.plan.role != STACK or run.inputs.bundle.quantization is None:
        return
    try:
        classifier, objective = state.training_classifier, run.inputs.objective
        engine, sampler = run.opened.engine, run.sampler
        watcher.say(noise_note(run.settings, engine, state.adapter, sampler, classifier, objective))
    except Exception as error:
        watcher.say(f"the noise of differences was not measured: {error}")


def begin(journal: Journal, identity: Record, settings: RunSettings) -> None:
    """Write down what a new run is, or compare a resumed one with what it was begun as, or changed to.

    Raises:
        ConfigError: every setting and input that differs.
    """
    config = settings_to_yaml(replace(settings.resolved(), change_estimator=False))
    stored = journal.first("start")
    if stored is None:
        # In this order: what has a journal can be resumed, whenever the process ends.
        write_settings(settings.out / CONFIG, config)
        journal.append(identity)
        return
    last = settings_records(journal)[-1]
    with journal.reading(last):
        before, now = Recipe.from_record(last["settings"]).to_record(), identity["settings"]
        changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
        refused = changed - (CHANGEABLE if settings.change_estimator else set())
        problems = [f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in sorted(refused)]
    with journal.reading(stored):
        problems += [
            f"the {name} is another one"
            for name in ("bundle", "train", "dev", "task", "adapter")
            if stored[name] != identity[name]
        ]
        if stored.get("tokens", identity["tokens"]) != identity["tokens"]:
            problems.append(f"the rows have other tokens; chat templates took today for {settings.date}")
        # As JSON reads it back; earlier versions had one objective.
        if stored.get("objective") != json.loads(json.dumps(identity["objective"])):
            problems.append("the objective is another one")
    if problems:
        raise ConfigError(
            "the run was begun with other settings:",
            problems,
            remedy="resume without them, or start a new run in another folder"
            + ("; --change-estimator lets these differ" if changed and refused <= CHANGEABLE else ""),
        )
    # Settings that were somebody else's are the user's from now on.
    if changed or not holds_own(settings.out / CONFIG):
        write_settings(settings.out / CONFIG, config)
    if changed:
        journal.append({"kind": CHANGE, "step": journal.steps, "settings": identity["settings"]})


def prepare_heads(
    settings: RunSettings, inputs: RunInputs, engine: Engine, journal: Journal
) -> tuple[Heads, str]:
    """An encoder's heads, and in words where new ones come from.

    They are the journal's, the start adapter's, another run's, or fitted on the training rows.
    """
    model = engine.model
    if not model.is_encoder:
        return Heads(), ""
    heads = Heads.from_journal(journal, model.width)
    if heads is not None:
        return heads, ""
    folds = 0 if settings.head_learning_rate else settings.head_folds
    digest, told = digest_of(inputs.bundle.sha256, inputs.adapter, inputs.train, folds), "the adapter's"
    if inputs.start_head:
        heads = Heads(inputs.start_head)
        if inputs.bundle.labels and settings.adapter is None:
            told = f"the checkpoint's own, of {', '.join(inputs.bundle.labels)}"
    elif settings.heads_of:
        if not settings.heads_of.is_file():
            raise RunError(
                f"--heads-of is {settings.heads_of}: there is no such file",
                remedy="give the journal.jsonl of a run, or leave it out",
            )
        other = Journal(settings.heads_of, writable=False)
        heads, told = Heads.from_journal(other, model.width, digest), f"those of {settings.heads_of}"
    if heads is None:
        heads = fit_heads(engine, inputs.adapter, inputs.train, folds)
        told = f"fitted on {len(inputs.train):,} rows"
        if refused := refused_labels(inputs.bundle):
            told += f"; {refused}"
    journal.append(heads.to_record(digest))
    return heads, told


def _check_folder(settings: RunSettings) -> None:
    begun = (settings.out / JOURNAL).is_file() and (settings.out / JOURNAL).stat().st_size > 0
    if begun and settings.resume is None:
        raise RunError(
            f"{settings.out} holds a run already",
            remedy=f"go on with it: prge run --resume {settings.out}; or give another folder with --out",
        )
    if settings.resume is None and not os.path.lexists(settings.out / JOURNAL):
        check_new_run(settings.out)
