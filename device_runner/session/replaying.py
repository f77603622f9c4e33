"""A run's state made again from its journal: no engine, no rows."""

from __future__ import annotations

from prge.errors import RunError
from prge.files.adapter import Adapter
from prge.files.journal import Journal, Record, decode_array
from prge.learning.checkpoint import TrainingState
from prge.learning.encoder_heads import Heads
from prge.learning.estimators.protocol import Estimator
from prge.model_spec import AdaptedModule
from prge.running.recipe import Recipe
from prge.running.store import estimator_of


def replay(journal: Journal, step: int | None = None) -> TrainingState:
    """The state after `step` steps, or after the best one, or the last one of a run without evaluations.

    Raises:
        RunError: the journal has no beginning, or fewer steps.
    """
    start = journal.first("start")
    if start is None:
        raise RunError(
            f"{journal.path} has no beginning", remedy="give the journal of a run", code="journal-empty"
        )
    with journal.reading(start):
        state = first_state(journal, start)
    for record in journal.records:
        if record["kind"] == "evaluation":
            with journal.reading(record):
                state.judge(record)
    if step is None:
        step = state.progress.best_step if state.progress.best_step >= 0 else journal.steps
    if step > journal.steps:
        raise RunError(
            f"the run has {journal.steps} steps, not {step}",
            remedy="give a smaller --step",
            code="step-out-of-bounds",
        )
    advance(state, journal, estimator_of(journal), step)
    return state


def advance(state: TrainingState, journal: Journal, estimator: Estimator, step: int) -> None:
    """Take the journal's steps until the state has taken `step` of them.

    Raises:
        RunError: the journal lacks a step, or what it has of one can't be used.
    """
    for number in range(state.step, step):
        taken = journal.step(number)
        if taken is None:
            raise RunError(
                f"{journal.path} lacks step {number}", remedy="restore it from a copy", code="step-missing"
            )
        if "seeds" in taken:
            raise RunError(
                f"{journal.path} is of a fleet whose devices had directions of their own, as none has now",
                remedy="take the adapter in its final/ or checkpoints/",
                code="journal-of-other-version",
            )
        with journal.reading(taken):
            gradient = estimator.gradient(taken, taken["seed"], number, state.adapter.modules)
            state.apply(taken, gradient)


def first_state(journal: Journal, start: Record) -> TrainingState:
    """The state before the first step, as the journal's first record describes it."""
    modules = [AdaptedModule(**module) for module in start["modules"]]
    adapter = Adapter.zeros(modules)
    if start["adapter"]:
        adapter.values[:] = decode_array(start["adapter"])
    heads = Heads.from_journal(journal, start["width"]) or Heads()
    return Recipe.from_record(start["settings"]).new_state(adapter, heads)
