"""Where a session keeps what it learns: the journal of its steps, and checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from prge.errors import ConfigError
from prge.files.journal import Journal, Record
from prge.files.own_settings import holds_own, write_settings
from prge.files.run_folder import CHECKPOINTS, CONFIG, FINAL
from prge.learning.checkpoint import TrainingState, keep_state, load_best, load_latest, write_result
from prge.learning.estimators.protocol import Estimator, InTurn
from prge.learning.estimators.table import EstimatorFlags
from prge.running.recipe import Recipe

# What may change with the estimator of a run, and the journal's record of it.
CHANGEABLE = frozenset({"learning_rate", *(item.name for item in fields(EstimatorFlags))})
CHANGE = "change"


class Store(Protocol):
    """What a session needs of it."""

    @property
    def journal(self) -> Journal:
        """What every step has learnt; a step that it holds is not computed again."""
        ...

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints; 0: none."""
        ...

    def estimator(self, recipe: Recipe) -> Estimator:
        """Makes the gradients of the session's steps."""
        ...

    def resume(self, first: TrainingState) -> TrainingState:
        """The state to go on from; `first` is that of a recipe before its first step."""
        ...

    def save(self, state: TrainingState) -> None:
        """Keep a state."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunStore:
    """Implements Store in the folder of a run.

    Attributes:
        folder: of the run, with `checkpoints/` and `final/`.
        journal: of the run.
        template: PEFT folder of the bundle's adapter.
        checkpoint_every: steps between checkpoints; 0: none.
        keep_gradients: whether the journal keeps gradients of steps before the newest checkpoint.
    """

    folder: Path
    journal: Journal
    template: Path
    checkpoint_every: int
    keep_gradients: bool = False

    def begin(self, identity: Record, config: str, *, date: str | None, may_change: bool) -> None:
        """Write down what a new run is, or compare a resumed one with what it was begun as, or changed to.

        Args:
            identity: of the run: its recipe and hashes of its inputs.
            config: its settings as YAML, for `config.yaml`.
            date: the day that chat templates take for today.
            may_change: whether estimator and learning rate may differ from then on.

        Raises:
            ConfigError: every setting and input that differs.
        """
        stored = self.journal.first("start")
        if stored is None:
            # In this order: what has a journal can be resumed, whenever the process ends.
            write_settings(self.folder / CONFIG, config)
            self.journal.append(identity)
            return
        last = settings_records(self.journal)[-1]
        with self.journal.reading(last):
            before, now = Recipe.from_record(last["settings"]).to_record(), identity["settings"]
            changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
            refused = changed - (CHANGEABLE if may_change else set())
            problems = [f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in sorted(refused)]
        with self.journal.reading(stored):
            problems += [
                f"the {name} is another one"
                for name in ("bundle", "train", "dev", "task", "adapter")
                if stored[name] != identity[name]
            ]
            if stored.get("tokens", identity["tokens"]) != identity["tokens"]:
                problems.append(f"the rows have other tokens; chat templates took today for {date}")
            # As JSON reads it back; earlier versions had one objective.
            if stored.get("objective") != json.loads(json.dumps(identity["objective"])):
                problems.append("the objective is another one")
        if problems:
            raise ConfigError(
                "the run was begun with other settings:",
                problems,
                remedy="resume without them, or start a new run in another folder"
                + ("; --change-estimator lets these differ" if changed and refused <= CHANGEABLE else ""),
                code="settings-changed",
            )
        # Settings that were somebody else's are the user's from now on.
        if changed or not holds_own(self.folder / CONFIG):
            write_settings(self.folder / CONFIG, config)
        if changed:
            self.journal.append(
                {"kind": CHANGE, "step": self.journal.steps, "settings": identity["settings"]}
            )

    def estimator(self, recipe: Recipe) -> Estimator:
        """See Store; a step that the journal holds is replayed by the estimator that it was taken with."""
        return estimator_of(self.journal)

    def resume(self, first: TrainingState) -> TrainingState:
        """See Store; reads the newest checkpoint into `first`."""
        load_latest(self.folder / CHECKPOINTS, first, newest=self.journal.steps)
        return first

    def save(self, state: TrainingState) -> None:
        """See Store; checkpoints that nobody needs any more are dropped."""
        keep_state(
            self.folder, state, self.template, self.journal, self.checkpoint_every, self.keep_gradients
        )

    def write_result(self, state: TrainingState) -> Path:
        """Write the adapter of the best step; returns its folder."""
        load_best(self.folder / CHECKPOINTS, state)
        write_result(self.folder / FINAL, state, self.template, overwrite=True)
        return self.folder / FINAL


def settings_records(journal: Journal) -> list[Record]:
    """The records of a journal that have settings: of its start, and of every change."""
    return [record for record in journal.records if record["kind"] in ("start", CHANGE)]


def estimator_of(journal: Journal) -> Estimator:
    """The estimator of a journal's run; it replays a step by that which the step was taken with."""
    since = []
    for record in settings_records(journal):
        with journal.reading(record):
            since.append((record.get("step", 0), Recipe.from_record(record["settings"]).new_estimator()))
    return since[0][1] if len(since) == 1 else InTurn(since)
