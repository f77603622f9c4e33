"""`prge run`: fine-tune a bundle's adapter in a run folder that can be resumed, replayed and reported.

config.yaml      the settings            checkpoints/step-N/   PEFT folder and optimizer state
journal.jsonl    what each step learnt   final/                PEFT folder of the best step
metrics.jsonl    what to plot            run.json, log.txt     what, where, how it ended
samples.jsonl    what the model said to prompts
reference.json   of preferences: how the adapter of the start scores the rows; made again where it is missing
trunk_cache/     what lower blocks made of training rows; may be deleted at any time
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.engines.trunk_cache import TrunkCache
from device_runner.reporting.next_steps import next_steps
from device_runner.session.gates import Gates
from device_runner.session.heads import prepare_heads
from device_runner.session.inputs import (
    RunInputs,
    read_inputs,
)
from device_runner.session.memory import budget_of_steps, outcome, shape_of_scores
from device_runner.session.noise import noise_note
from device_runner.session.planning import RunPlan, plan_run, settled
from device_runner.session.reference import with_references
from device_runner.session.samples import Answerer, Chooser, Samples, Writer
from device_runner.session.sensors import Sensors
from device_runner.session.settings import RunSettings, date_of_run
from prge.errors import ConfigError, RunError, shown
from prge.files.bundle import open_bundle
from prge.files.journal import Journal, Record
from prge.files.run_folder import (
    FINAL,
    JOURNAL,
    TRUNK_CACHE,
    check_new_run,
    run_lock,
)
from prge.files.signatures import DECODE, PREFILL, STACK
from prge.host.memory import PeakMemory
from prge.host.terminal import best_effort
from prge.learning.checkpoint import TrainingState
from prge.learning.costs import Budget
from prge.learning.estimators.table import ESTIMATORS
from prge.learning.examples import token_count
from prge.learning.preferences import Preference
from prge.learning.sampling import Sampler
from prge.rows.scoring import displacement
from prge.running.session import Session, SessionData, open_session
from prge.running.store import RunStore, settings_records
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
            run = _open(plan, inputs, journal, budget)
            watcher = Watcher(run.settings, journal.steps, run.forward_passes, run.describe)
            watcher.catch_up(journal)
            with watcher, graceful_stop(watcher):
                watcher.say(inputs.report)
                if settings.epochs is not None:
                    watcher.say(f"{settings.epochs:g} epochs: {plan.settings.steps} steps")
                if run.opened.notes:
                    watcher.say(run.opened.notes)
                session = open_session(plan.recipe, run.opened.engine, _data(run, watcher), run.store)
                samples = _train(run, session, watcher)
                final = _finish(run, session.state, samples, watcher)
                if budget is not None and (told := outcome(budget.limit, before)):
                    watcher.say(told)
                return final


@dataclass(frozen=True)
class _OpenRun:
    """A run whose engine is open and whose journal says what it is; `sensors` are those of the start."""

    plan: RunPlan
    inputs: RunInputs
    opened: OpenEngine
    store: RunStore
    sensors: Record
    budget: Budget | None

    @property
    def settings(self) -> RunSettings:
        """All of them, decided."""
        return self.plan.settings

    @cached_property
    def sampler(self) -> Sampler:
        """The examples of each step."""
        return self.plan.recipe.sampler(self.inputs.train)

    def forward_passes(self, steps: int) -> int:
        """Forward passes of single sequences that so many steps cost."""
        if self.settings.estimator is None:
            raise ValueError("which estimator is not settled")
        passes = ESTIMATORS[self.settings.estimator].passes(self.settings.queries)
        return passes * self.sampler.sequences(steps)

    def describe(self) -> tuple[Record, Record]:
        """The blocks `run` and `train` of run.json, but for what a watcher knows."""
        inputs, estimators, journal = self.inputs, [], self.store.journal
        for record in settings_records(journal):
            with journal.reading(record):
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


def _open(plan: RunPlan, inputs: RunInputs, journal: Journal, budget: Budget | None) -> _OpenRun:
    """Open the engine, and write down what a run is, or compare it with what it was begun as."""
    settings, trunk = plan.settings, None
    if settings.trunk_cache_bytes:
        folder = settings.out / TRUNK_CACHE
        trunk = TrunkCache(folder, settings.trunk_cache_bytes, settings.trunk_cache_dtype)
    opened = open_engine(
        inputs.bundle,
        plan.role,
        threads=settings.threads,
        engine=settings.engine,
        loaded=None if budget is None else budget.loaded,
        folder=settings.out,
        checkpoint_dtype=settings.checkpoint_dtype,
        trunk=trunk,
    )
    store = RunStore(
        folder=settings.out,
        journal=journal,
        template=inputs.bundle.adapter,
        checkpoint_every=settings.checkpoint_every,
        keep_gradients=settings.keep_gradients,
    )
    config = settings_to_yaml(replace(settings.resolved(), change_estimator=False))
    changes = settings.change_estimator
    store.begin(inputs.identity(settings), config, date=settings.date, may_change=changes)
    return _OpenRun(plan, inputs, opened, store, Sensors().record(), budget)


def _data(run: _OpenRun, watcher: Watcher) -> SessionData:
    """What the run trains, with what the engine makes of it: references of preferences, encoders' heads."""
    inputs, engine = run.inputs, run.opened.engine
    train, dev = inputs.train, inputs.dev
    if isinstance(inputs.objective, Preference) and (inputs.objective.compares or dev):
        count = len(train) if inputs.objective.compares else 0
        examples, told = with_references(
            run.settings.out, inputs.bundle.sha256, engine, inputs.adapter, [*train[:count], *dev]
        )
        if told:
            watcher.say(told)
        train, dev = examples[:count] or train, examples[count:]
    begin = time.perf_counter()
    heads, told = prepare_heads(run.settings, inputs, engine, run.store.journal)
    if told:
        seconds = watcher.told["head_seconds"] = time.perf_counter() - begin
        watcher.say(f"heads: {told}, {seconds:.1f} s")
    return SessionData(
        train=train,
        dev=dev,
        task=inputs.task,
        objective=inputs.objective,
        adapter=inputs.adapter,
        heads=heads,
    )


def _train(run: _OpenRun, session: Session, watcher: Watcher) -> Samples | None:
    """Train, and answer sample prompts on the way.

    Raises:
        DivergenceError: see prge.learning.training.Learner.step.
        KeyboardInterrupt: interrupted, with the state saved.
    """
    settings, state, shape = run.settings, session.state, run.plan.shape
    if steps := run.store.journal.steps:
        watcher.say(f"going on after step {steps} of {settings.steps}")
    gates = Gates(settings.conditions())
    _check_batch(run)
    if settings.resume is None:
        _tell_noise(run, session, watcher)
    answerer = _answerer(run.inputs, run.opened)
    samples = Samples(answerer, state, settings.sample_every, watcher) if answerer else None
    watcher.say(_plan(run))
    if run.opened.store.residual_bytes is not None:
        watcher.say(run.opened.store.describe_residuals(shape.states, shape.rows * shape.targets))
    session.train(samples or watcher, lambda: gates.hold(watcher))
    if watcher.stopped and state.step < settings.steps:
        watcher.say(f"stopped after step {state.step}; go on with: prge run --resume {settings.out}")
        raise KeyboardInterrupt
    return samples


def _finish(run: _OpenRun, state: TrainingState, samples: Samples | None, watcher: Watcher) -> Path:
    """Write the result, and tell what came out and what to do next; returns the `final/` folder."""
    final, journal, trunk = run.store.write_result(state), run.store.journal, run.opened.store.trunk
    if samples is not None:
        samples.take()
    best = journal.evaluation(state.step) or {}
    with journal.reading(best):
        watcher.say_final(state.step, best)
    for record in (best, watcher.newest):
        if fallen := displacement(record):
            watcher.say(f"note: at step {record['step']} {fallen}")
            break
    watcher.say(_closing(run.settings, run.inputs, samples))
    if trunk is not None:
        watcher.say(f"trunk: {trunk.computed} rows computed, {trunk.reused} from the cache")
    return final


def _check_batch(run: _OpenRun) -> None:
    """Refuse to go on with a run whose steps had another number of examples.

    Raises:
        ConfigError: an earlier version, whose `--batch-size` counted sequences, began it.
    """
    first = run.store.journal.step(0)
    taken = len(first.get("rows", ())) if first is not None else 0
    if taken not in (0, run.sampler.batch_size):
        raise ConfigError(
            "the run can't go on:",
            [f"its steps had {taken} examples, its settings now ask for {run.sampler.batch_size}"],
            remedy="go on with it in the version that run.json names, whose --batch-size counted the "
            "sequences of a call, or start a new run",
            code="batch-of-other-version",
        )


def _answerer(inputs: RunInputs, opened: OpenEngine) -> Answerer | None:
    """Who makes the samples; None if none are asked for."""
    if prompts := inputs.sample_prompts:
        return Writer(prompts, Generator(opened.speaker(len(prompts)), inputs.tokenizer))
    if inputs.sample_rows:
        return Chooser(inputs.sample_rows, opened.engine, inputs.tokenizer)
    return None


def _plan(run: _OpenRun) -> str:
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


def _tell_noise(run: _OpenRun, session: Session, watcher: Watcher) -> None:
    """Say how noisy differences in quantized activations are; a run goes on without the answer too."""
    if run.plan.role != STACK or run.inputs.bundle.quantization is None:
        return
    try:
        state, sampler = session.state, session.sampler
        classifier, objective = state.training_classifier, run.inputs.objective
        engine = run.opened.engine
        watcher.say(noise_note(run.settings, engine, state.adapter, sampler, classifier, objective))
    except Exception as error:
        watcher.say(f"the noise of differences was not measured: {error}")


def _check_folder(settings: RunSettings) -> None:
    begun = (settings.out / JOURNAL).is_file() and (settings.out / JOURNAL).stat().st_size > 0
    if begun and settings.resume is None:
        raise RunError(
            f"{settings.out} holds a run already",
            remedy=f"go on with it: prge run --resume {settings.out}; or give another folder with --out",
            code="run-exists",
        )
    if settings.resume is None and not os.path.lexists(settings.out / JOURNAL):
        check_new_run(settings.out)
