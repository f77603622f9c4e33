"""Storage of a training session: the journal of its steps, and checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from prge.errors import ConfigError
from prge.formats.journal import Journal, Record
from prge.formats.run_folder import CHECKPOINTS, CONFIG, FINAL
from prge.formats.stored_settings import is_signed_file, write_settings
from prge.training.checkpoint import TrainingState, load_best, load_latest, save_and_prune, write_result
from prge.training.estimators.protocol import Estimator, EstimatorSequence
from prge.training.estimators.table import EstimatorFlags
from prge.training.recipe import Recipe

# The settings that --change-estimator allows to change, and the type of the journal record of a change.
CHANGEABLE = frozenset({"learning_rate", *(item.name for item in fields(EstimatorFlags))})
CHANGE = "change"


class Store(Protocol):
    """Stores the steps and checkpoints of a session."""

    @property
    def journal(self) -> Journal:
        """The journal; the steps and evaluations that it holds aren't computed again."""
        ...

    @property
    def save_steps(self) -> int:
        """Steps between checkpoints; 0: none."""
        ...

    def estimator(self, recipe: Recipe) -> Estimator:
        """Return the estimator of the session's steps."""
        ...

    def resume(self, first: TrainingState) -> TrainingState:
        """Return the state to continue from; `first` is the recipe's state before the first step."""
        ...

    def save(self, state: TrainingState) -> None:
        """Save a checkpoint of the state."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunStore:
    """Implements Store in a run folder.

    Attributes:
        folder: the run folder, with `checkpoints/` and `final/`.
        journal: the run's journal.
        template: PEFT folder of the bundle's adapter.
        save_steps: steps between checkpoints; 0: none.
        keep_gradients: whether the journal keeps the gradients of steps before the newest checkpoint.
    """

    folder: Path
    journal: Journal
    template: Path
    save_steps: int
    keep_gradients: bool = False

    def begin(self, identity: Record, config: str, *, date: str | None, may_change: bool) -> None:
        """Record the identity of a new run, or compare a resumed run with the recorded identity.

        Args:
            identity: the run's start record, with its recipe and the hashes of its inputs.
            config: settings as YAML, for `config.yaml`.
            date: the date that chat templates get as today's.
            may_change: whether estimator and learning rate may differ from now on.

        Raises:
            ConfigError: a setting or an input differs; the message lists all differences.
        """
        stored = self.journal.first("start")
        if stored is None:
            # In this order, because a folder with a journal must be resumable if the process is killed here.
            write_settings(self.folder / CONFIG, config)
            self.journal.append(identity)
            return
        last = settings_records(self.journal)[-1]
        with self.journal.reading(last):
            old, new = Recipe.from_record(last["settings"]).to_record(), identity["settings"]
            changed = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
            refused = changed - (CHANGEABLE if may_change else set())
            problems = [f"{name} was {old.get(name)!r}, is {new.get(name)!r}" for name in sorted(refused)]
        with self.journal.reading(stored):
            problems += [
                f"the {name} is different"
                for name in ("bundle", "train", "dev", "task", "adapter", "reward")
                if stored.get(name) != identity.get(name)
            ]
            if stored.get("tokens", identity["tokens"]) != identity["tokens"]:
                problems.append(f"the rows have other tokens; chat templates got {date} as today's date")
            # Compared as JSON returns it; records of earlier versions have no objective.
            if stored.get("objective") != json.loads(json.dumps(identity["objective"])):
                problems.append("the objective is different")
        if problems:
            raise ConfigError(
                "The run was started with other settings:",
                problems,
                remedy="Resume without them, or start a new run in another folder"
                + ("; --change-estimator lets these differ." if changed and refused <= CHANGEABLE else "."),
                code="settings-changed",
            )
        # Once a user resumes a run of another machine with its settings, they are signed as the user's own.
        if changed or not is_signed_file(self.folder / CONFIG):
            write_settings(self.folder / CONFIG, config)
        if changed:
            self.journal.append(
                {"type": CHANGE, "step": self.journal.steps, "settings": identity["settings"]}
            )

    def estimator(self, recipe: Recipe) -> Estimator:
        """See Store; steps of the journal are replayed with the estimator that they were computed with."""
        return load_estimator(self.journal)

    def resume(self, first: TrainingState) -> TrainingState:
        """See Store; loads the newest checkpoint into `first`."""
        load_latest(self.folder / CHECKPOINTS, first, newest=self.journal.steps)
        return first

    def save(self, state: TrainingState) -> None:
        """See Store; checkpoints that are no longer needed are removed."""
        save_and_prune(self.folder, state, self.template, self.journal, self.save_steps, self.keep_gradients)

    def write_result(self, state: TrainingState) -> Path:
        """Write the adapter of the best step to `final/`; return that folder."""
        load_best(self.folder / CHECKPOINTS, state)
        write_result(self.folder / FINAL, state, self.template, overwrite=True)
        return self.folder / FINAL


def settings_records(journal: Journal) -> list[Record]:
    """Return the records of a journal that hold settings: the start and all changes."""
    return [record for record in journal.records if record["type"] in ("start", CHANGE)]


def load_estimator(journal: Journal) -> Estimator:
    """Return the estimator of a journal's run, which uses for each step the estimator that took it."""
    since = []
    for record in settings_records(journal):
        with journal.reading(record):
            since.append((record.get("step", 0), Recipe.from_record(record["settings"]).new_estimator()))
    return since[0][1] if len(since) == 1 else EstimatorSequence(since)
