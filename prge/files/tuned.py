"""A folder of `prge tune` in the place of a bundle, an adapter or a run: what of it is meant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prge.errors import RunError
from prge.files.documents import DocumentError, read_yaml
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
        """The bundle that it trains, its own or a given one; raises RunError if it has none yet."""
        try:
            settings = read_yaml(self.folder / CONFIG)
            given = settings.get("bundle") if isinstance(settings, dict) else None
        except (OSError, DocumentError) as error:
            raise RunError(f"{self.folder / CONFIG} can't be read: {error}") from None
        return Path(str(given)) if given else self._there("bundle", "bundle")

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
            )
        return self.folder / name


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
