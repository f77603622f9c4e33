"""A folder of `prge tune` in the place of a bundle, an adapter or a run: what of it is meant."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prge.errors import RunError, shown
from prge.files.documents import MOST_YAML_BYTES, DocumentError, mapping, parse_yaml, read_document
from prge.files.own_settings import is_own, leads_out
from prge.files.run_folder import CONFIG, DECISIONS, FINAL, JOURNAL, METRICS, SUMMARY


@dataclass(frozen=True)
class Tuning:
    """A folder that `prge tune` wrote, finished or not."""

    folder: Path

    @property
    def name(self) -> str:
        """What its model is called."""
        return self.folder.resolve().name

    @property
    def bundle(self) -> Path:
        """The bundle that it trains, its own or a given one.

        Raises:
            RunError: it has none yet, or settings that aren't the user's own name one elsewhere.
        """
        try:
            given = bundle_in(self.folder / CONFIG)
        except (OSError, DocumentError) as error:
            raise RunError(
                f"{self.folder / CONFIG} can't be read: {error}", code="settings-unreadable"
            ) from None
        return given or self._there("bundle", "bundle")

    @property
    def rows(self) -> Path:
        """The folder with its rows by part; raises RunError if there is none yet."""
        return self._there("rows", "rows")

    @property
    def run(self) -> Path:
        """Its final run, finished or not; raises RunError if it hasn't begun."""
        return self._there("run", "run")

    @property
    def adapter(self) -> Path:
        """The PEFT folder that its run ended with; raises RunError if there is none yet."""
        return self._there(f"run/{FINAL}", "trained adapter")

    def _there(self, name: str, what: str) -> Path:
        if not (self.folder / name).is_dir():
            raise RunError(
                f"{self.folder} is a tuning that has no {what} yet",
                remedy=f"finish it with `prge tune --resume {self.folder}`",
                code="tuning-unfinished",
            )
        if leads_out(self.folder, str(self.folder / name), is_written=True):
            raise RunError(
                f"{self.folder / name} is a link to a place outside of {self.folder}",
                remedy="put what it leads to in its place",
                code="link-outside",
            )
        return self.folder / name


def bundle_in(config: Path) -> Path | None:
    """The bundle that settings in the folder of a run or a tuning name; None if they name none.

    Raises:
        OSError, DocumentError: they can't be read.
        RunError: they aren't the user's own, and the bundle lies elsewhere; see `prge.files.own_settings`.
    """
    content = read_document(config, MOST_YAML_BYTES)
    given = mapping(parse_yaml(content)).get("bundle")
    if not given:
        return None
    is_there = os.path.lexists(str(given))
    if is_there and leads_out(config.parent, str(given)) and not is_own(content, config.name):
        raise RunError(
            f"{config} names the bundle {shown(given)}, outside of its folder, "
            "and isn't as your prge wrote it",
            remedy=f"where that is the bundle that you want, give --bundle {given}; and {config.parent} with "
            "--adapter to verbs that generate or score",
            code="path-outside",
        )
    return Path(str(given))


def tuning_at(folder: Path) -> Tuning | None:
    """The tuning whose folder this is; None where it is anything else."""
    is_run = any((folder / name).exists() for name in (JOURNAL, METRICS, SUMMARY))
    return Tuning(folder) if (folder / DECISIONS).is_file() and not is_run else None


def bundle_at(folder: Path) -> Path:
    """The bundle that a user names by its folder or by a tuning's; raises RunError."""
    tuning = tuning_at(folder)
    return folder if tuning is None else tuning.bundle


def run_at(folder: Path) -> Path:
    """The run that a user names by its folder or by a tuning's; raises RunError."""
    tuning = tuning_at(folder)
    return folder if tuning is None else tuning.run
