"""The state of a run, computed again from its journal without an engine or data."""

from __future__ import annotations

from prge.errors import RunError
from prge.formats.adapter import Adapter
from prge.formats.journal import Journal, Record, decode_array
from prge.model_spec import AdaptedModule
from prge.training.checkpoint import TrainingState
from prge.training.encoder_heads import Heads
from prge.training.estimators.protocol import Estimator
from prge.training.recipe import Recipe
from prge.training.store import load_estimator


def replay(journal: Journal, step: int | None = None) -> TrainingState:
    """Return the state after `step` steps; by default after the best one, or after all of them.

    Raises:
        RunError: the journal has no first record, or fewer steps.
    """
    start = journal.first("start")
    if start is None:
        raise RunError(
            f"{journal.path} has no first record.", remedy="Use the journal of a run.", code="journal-empty"
        )
    with journal.reading(start):
        state = first_state(journal, start)
    for record in journal.records:
        if record["type"] == "evaluation":
            with journal.reading(record):
                state.judge(record)
    if step is None:
        step = state.progress.best_step if state.progress.best_step >= 0 else journal.steps
    if step > journal.steps:
        raise RunError(
            f"The run has {journal.steps} steps, not {step}.",
            remedy="Use a smaller --step.",
            code="step-out-of-bounds",
        )
    advance(state, journal, load_estimator(journal), step)
    return state


def advance(state: TrainingState, journal: Journal, estimator: Estimator, step: int) -> None:
    """Apply the journal's steps until the state has taken `step` of them.

    Raises:
        RunError: the journal lacks a step, or the record of a step can't be used.
    """
    for number in range(state.step, step):
        record = journal.step(number)
        if record is None:
            raise RunError(
                f"{journal.path} lacks step {number}.", remedy="Restore it from a copy.", code="step-missing"
            )
        if "seeds" in record:
            raise RunError(
                f"{journal.path} is of an earlier version's fleet, whose devices had their own directions.",
                remedy="Use the adapter in its final/ or checkpoints/.",
                code="journal-of-other-version",
            )
        with journal.reading(record):
            gradient = estimator.gradient(record, record["seed"], number, state.adapter.modules)
            state.apply(record, gradient)


def first_state(journal: Journal, start: Record) -> TrainingState:
    """Return the state before the first step, from the journal's first record."""
    modules = [AdaptedModule(**module) for module in start["modules"]]
    adapter = Adapter.zeros(modules)
    if start["adapter"]:
        adapter.values[:] = decode_array(start["adapter"])
    heads = Heads.from_journal(journal, start["width"]) or Heads()
    return Recipe.from_record(start["settings"]).new_state(adapter, heads)
