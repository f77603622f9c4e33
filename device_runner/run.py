"""`prge run`: fine-tune a bundle's adapter in a run folder that can be resumed, replayed and reported.

config.yaml      the settings                     checkpoints/step-N/   PEFT folder and optimizer state
journal.jsonl    record of each step              final/                PEFT folder of the best step
metrics.jsonl    metrics to plot                  run.json, log.txt     description, machine, end
samples.jsonl    the model's answers to prompts
reference.json   preferences: scores of the rows with the start adapter; computed again if missing
trunk_cache/     outputs of the lower blocks for training rows; may be deleted at any time
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from device_runner.engines.opening import OpenEngine, open_engine
from device_runner.engines.trunk_cache import TrunkCache
from device_runner.reporting.next_steps import next_steps
from device_runner.session.gradient_noise import noise_note
from device_runner.session.heads import prepare_heads
from device_runner.session.inputs import (
    RunInputs,
    read_inputs,
)
from device_runner.session.memory import (
    describe_memory_use,
    rollout_budget,
    shape_of_scores,
    step_budget,
)
from device_runner.session.pauses import Pauses
from device_runner.session.plan import RunPlan, plan_run, resolve_settings
from device_runner.session.reference import load_or_compute_references
from device_runner.session.reward_inputs import read_reward_inputs
from device_runner.session.samples import Answerer, CandidateAnswerer, Samples, TextAnswerer
from device_runner.session.sensors import Sensors
from device_runner.session.settings import RunSettings, date_of_run
from prge.cli.settings import parse_settings, settings_to_yaml
from prge.errors import ConfigError, EngineError, RunError, format_value
from prge.formats.bundle import Bundle, open_bundle
from prge.formats.journal import Journal, Record
from prge.formats.run_folder import (
    FINAL,
    JOURNAL,
    TRUNK_CACHE,
    check_new_run,
    run_lock,
)
from prge.formats.signatures import DECODE, FORWARD, PREFILL
from prge.generation.loop import Generator
from prge.objectives.examples import token_count
from prge.objectives.preferences import Preference
from prge.rewards.opening import open_reward
from prge.rewards.prompt_examples import rollout_context
from prge.rewards.reward import Reward
from prge.rewards.rollouts import Rollouts
from prge.system.memory import PeakMemory, release_freed_memory, resident_bytes
from prge.system.terminal import best_effort
from prge.training.checkpoint import TrainingState
from prge.training.costs import Budget
from prge.training.estimators.rollouts import ROLLOUT_SLOTS
from prge.training.estimators.table import ESTIMATORS
from prge.training.evaluation import displacement_warning
from prge.training.monitor import RunMonitor, describe_changes, graceful_stop
from prge.training.sampler import Sampler
from prge.training.session import Session, SessionData, open_session
from prge.training.store import RunStore, settings_records


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge run --help`."""
    settings = parse_settings(RunSettings, argv, "prge run")
    final = run(settings)
    with best_effort(sys.stdout):
        print(final, flush=True)
    return 0


def run(settings: RunSettings) -> Path:
    """Train, and write everything into `settings.out`; return its `final/` folder.

    Raises:
        PrgeError: bad input, before anything is changed; or a run that can't continue, with its state saved.
        KeyboardInterrupt: interrupted by the user, with its state saved.
    """
    bundle = open_bundle(settings.bundle)
    settings = resolve_settings(settings, bundle)
    with run_lock(settings.out):
        _check_folder(settings)
        settings = replace(settings, date=settings.date or date_of_run(settings.resume)).with_date()
        read = read_inputs if settings.reward is None else read_reward_inputs
        inputs = read(bundle, settings)
        taken = resident_bytes() or 0
        release_freed_memory()
        plan = plan_run(bundle, inputs.train, settings, inputs.objective)
        budget = _budget(bundle, plan, inputs, taken)
        before = PeakMemory().peak
        with _opened_reward(settings) as reward, Journal(settings.out / JOURNAL) as journal:
            run = _open(plan, inputs, journal, budget)
            monitor = RunMonitor(run.settings, journal.steps, run.forward_passes, run.describe)
            monitor.catch_up(journal)
            with monitor, graceful_stop(monitor):
                monitor.note(inputs.report)
                if settings.epochs is not None:
                    monitor.note(f"{settings.epochs:g} epochs: {plan.settings.steps} steps")
                if run.opened.notes:
                    monitor.note(run.opened.notes)
                data = _data(run, monitor, _rollouts(run, reward))
                session = open_session(plan.recipe, run.opened.engine, data, run.store)
                samples = _train(run, session, monitor)
                final = _finish(run, session.state, samples, monitor)
                if budget is not None and (message := describe_memory_use(budget.limit, before)):
                    monitor.note(message)
                return final


@dataclass(frozen=True)
class _OpenRun:
    """A run with an open engine and a started journal; `sensors` are the readings at the start."""

    plan: RunPlan
    inputs: RunInputs
    opened: OpenEngine
    store: RunStore
    sensors: Record
    budget: Budget | None

    @property
    def settings(self) -> RunSettings:
        """All settings, resolved."""
        return self.plan.settings

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler of each step's examples."""
        return self.plan.recipe.sampler(self.inputs.train)

    def forward_passes(self, steps: int) -> int:
        """Return the forward passes of single sequences that a number of steps costs."""
        if self.settings.estimator is None:
            raise ValueError("the estimator is not resolved")
        passes = ESTIMATORS[self.settings.estimator].passes(self.settings.queries)
        return passes * self.sampler.sequences(steps)

    def describe(self) -> tuple[Record, Record]:
        """Return the blocks `run` and `train` of run.json, except for what the monitor adds."""
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
    """Open the engine, and start the journal or compare the run with it."""
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
        save_steps=settings.save_steps,
        keep_gradients=settings.keep_gradients,
    )
    config = settings_to_yaml(replace(settings.resolved(), change_estimator=False))
    changes = settings.change_estimator
    store.begin(inputs.identity(settings), config, date=settings.date, may_change=changes)
    return _OpenRun(plan, inputs, opened, store, Sensors().record(), budget)


def _budget(bundle: Bundle, plan: RunPlan, inputs: RunInputs, taken: int) -> Budget | None:
    """Return what `--memory` leaves for the run; raises ConfigError if it is too little.

    `taken` is the memory of reading the inputs, some of which may be free again.
    """
    settings, shape, examples = plan.settings, plan.shape, [*inputs.train, *inputs.dev]
    limit, engine = settings.memory, settings.engine
    if settings.reward is None:
        shapes = [shape, shape_of_scores(bundle, examples)]
        return step_budget(bundle, shapes, limit, engine, taken=taken)
    context = rollout_context(examples, settings.max_completion_length)
    if settings.objective == "es":
        return rollout_budget(bundle, limit, engine, context=context, adapters=shape.copies)
    scores = replace(shape, role=FORWARD, copies=1, queries=0)
    return rollout_budget(bundle, limit, engine, context=context, steps=[shape, scores])


def _opened_reward(settings: RunSettings) -> AbstractContextManager[Reward | None]:
    """Open the reward of a run, if it has one; raises ConfigError if it can't be used."""
    return nullcontext() if settings.reward is None else closing(open_reward(settings.reward))


def _rollouts(run: _OpenRun, reward: Reward | None) -> Rollouts | None:
    """Return the source of completions of a run that learns from a reward."""
    if reward is None:
        return None
    settings, inputs = run.settings, run.inputs
    assert inputs.tokenizer is not None
    context = rollout_context([*inputs.train, *inputs.dev], settings.max_completion_length)
    engine = run.opened.generation_engine(ROLLOUT_SLOTS, context)
    return Rollouts(
        Generator(engine, inputs.tokenizer),
        reward,
        inputs.adapter.values.copy(),
        settings.max_completion_length,
        settings.temperature,
        run.store.journal,
    )


def _data(run: _OpenRun, monitor: RunMonitor, rollouts: Rollouts | None) -> SessionData:
    """Return the training data, with reference scores of preferences and heads of encoders."""
    inputs, engine = run.inputs, run.opened.engine
    train, dev = inputs.train, inputs.dev
    if isinstance(inputs.objective, Preference) and (inputs.objective.needs_reference or dev):
        count = len(train) if inputs.objective.needs_reference else 0
        examples, message = load_or_compute_references(
            run.settings.out, inputs.bundle.sha256, engine, inputs.adapter, [*train[:count], *dev]
        )
        if message:
            monitor.note(message)
        train, dev = examples[:count] or train, examples[count:]
    begin = time.perf_counter()
    heads, message = prepare_heads(run.settings, inputs, engine, run.store.journal)
    if message:
        seconds = monitor.summary_facts["head_seconds"] = time.perf_counter() - begin
        monitor.note(f"heads: {message}, {seconds:.1f} s")
    return SessionData(
        train=train,
        dev=dev,
        task=inputs.task,
        objective=inputs.objective,
        adapter=inputs.adapter,
        heads=heads,
        rollouts=rollouts,
    )


def _train(run: _OpenRun, session: Session, monitor: RunMonitor) -> Samples | None:
    """Train, and answer sample prompts in between.

    Raises:
        DivergenceError: see prge.training.loop.Learner.step.
        KeyboardInterrupt: interrupted, with the state saved.
    """
    settings, state, shape = run.settings, session.state, run.plan.shape
    if steps := run.store.journal.steps:
        monitor.note(f"resuming after step {steps} of {settings.steps}")
    pauses = Pauses(settings.constraints())
    _check_batch(run)
    if settings.resume is None:
        _note_noise(run, session, monitor)
    answerer = _answerer(run.inputs, run.opened)
    samples = Samples(answerer, state, settings.sample_every, monitor) if answerer else None
    monitor.note(_plan(run))
    if run.opened.store.residual_bytes is not None:
        monitor.note(run.opened.store.describe_residuals(shape.states, shape.rows * shape.targets))
    session.train(samples or monitor, lambda: pauses.wait(monitor))
    if monitor.stopped and state.step < settings.steps:
        monitor.note(f"stopped after step {state.step}; resume with: prge run --resume {settings.out}")
        raise KeyboardInterrupt
    return samples


def _finish(run: _OpenRun, state: TrainingState, samples: Samples | None, monitor: RunMonitor) -> Path:
    """Write and report the result, and suggest next steps; return the `final/` folder."""
    final, journal, trunk = run.store.write_result(state), run.store.journal, run.opened.store.trunk
    if samples is not None:
        samples.take()
    best = journal.evaluation(state.step) or {}
    with journal.reading(best):
        monitor.report_final(state.step, best)
    for record in (best, monitor.newest):
        if warning := displacement_warning(record):
            monitor.note(f"note: at step {record['step']} {warning}")
            break
    monitor.note(_closing(run.settings, run.inputs, samples))
    if trunk is not None:
        monitor.note(f"trunk: {trunk.computed} rows computed, {trunk.reused} from the cache")
    return final


def _check_batch(run: _OpenRun) -> None:
    """Refuse to resume a run whose steps had another number of examples.

    Raises:
        ConfigError: an earlier version started it, whose `--batch-size` counted sequences.
    """
    first = run.store.journal.step(0)
    examples = len(first.get("rows", ())) if first is not None else 0
    if examples not in (0, run.sampler.batch_size):
        raise ConfigError(
            "The run can't be resumed:",
            [f"its steps had {examples} examples, its settings now request {run.sampler.batch_size}"],
            remedy="Resume it with the version that run.json names, whose --batch-size counted the "
            "sequences of a call, or start a new run.",
            code="batch-of-other-version",
        )


def _answerer(inputs: RunInputs, opened: OpenEngine) -> Answerer | None:
    """Return the answerer of sample prompts; None if there are no prompts."""
    if inputs.tokenizer is None:
        return None
    if prompts := inputs.sample_prompts:
        return TextAnswerer(prompts, Generator(opened.generation_engine(len(prompts)), inputs.tokenizer))
    if inputs.sample_rows:
        return CandidateAnswerer(inputs.sample_rows, opened.engine, inputs.tokenizer)
    return None


def _plan(run: _OpenRun) -> str:
    """Describe the training in a line."""
    settings, inputs, opened, count = run.settings, run.inputs, run.opened, run.sampler.batch_size
    examples = settings.steps / settings.steps_per_batch * count
    threads = "1 thread" if opened.threads == 1 else f"{opened.threads} threads"
    method = f"{settings.objective}, {settings.estimator}" if settings.reward else settings.estimator
    return (
        f"training: {method}, {settings.steps:,} steps of {count} examples "
        f"({examples / len(inputs.train):.1f} epochs), {inputs.adapter.size:,} trainable parameters, "
        f"{opened.name} engine, {threads}"
    )


def _closing(settings: RunSettings, inputs: RunInputs, samples: Samples | None) -> str:
    """Describe the answers before and after training, where the results are, and what to run next."""
    lines = []
    if samples is not None:
        answers = samples.summary()
        for before, after in zip(answers["before"], answers["after"], strict=False):
            lines += [
                f"prompt  {format_value(after['prompt'])}",
                f"  before  {format_value(before['text'])}",
                f"  after   {format_value(after['text'])}",
                *([f"  right   {format_value(after['right'])}"] if "right" in after else []),
            ]
        texts = [[each["text"] for each in answers[time]] for time in ("before", "after")]
        lines += filter(None, [describe_changes(*texts)])
    lines.append(f"adapter: {settings.out / FINAL}")
    can_generate = {PREFILL, DECODE} <= set(inputs.bundle.chain.roles)
    steps = next_steps(settings.out, asdict(settings), finished=True, writes=can_generate)
    return "\n".join([*lines, "next:", *(f"  {step.command}" for step in steps)])


def _note_noise(run: _OpenRun, session: Session, monitor: RunMonitor) -> None:
    """Report how noisy differences of losses are with quantized activations, unless the engine fails."""
    has_losses = run.plan.role == FORWARD and run.settings.reward is None
    if not has_losses or run.inputs.bundle.quantization is None:
        return
    try:
        state, sampler = session.state, session.sampler
        classifier, objective = state.training_classifier, run.inputs.objective
        engine = run.opened.engine
        monitor.note(noise_note(run.settings, engine, state.adapter, sampler, classifier, objective))
    except EngineError as error:
        monitor.note(f"the noise of differences was not measured: {error}")


def _check_folder(settings: RunSettings) -> None:
    has_run = (settings.out / JOURNAL).is_file() and (settings.out / JOURNAL).stat().st_size > 0
    if has_run and settings.resume is None:
        raise RunError(
            f"{settings.out} holds a run already.",
            remedy=f"Resume it with: prge run --resume {settings.out}; or set --out to another folder.",
            code="run-exists",
        )
    if settings.resume is None and not os.path.lexists(settings.out / JOURNAL):
        check_new_run(settings.out)
