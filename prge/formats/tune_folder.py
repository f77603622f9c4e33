"""Folders of `prge tune` given in place of a bundle, an adapter or a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prge.errors import RunError, format_value
from prge.formats.documents import MAX_YAML_BYTES, DocumentError, mapping, parse_yaml, read_document
from prge.formats.run_folder import CONFIG, DECISIONS, FINAL, JOURNAL, METRICS, SUMMARY
from prge.formats.stored_settings import has_own_signature, is_outside


@dataclass(frozen=True)
class Tuning:
    """A folder that `prge tune` wrote, finished or unfinished."""

    folder: Path

    @property
    def name(self) -> str:
        """Name of its model: the name of the folder."""
        return self.folder.resolve().name

    @property
    def bundle(self) -> Path:
        """The bundle that it trains: its own one, or the one in its settings.

        Raises:
            RunError: it has no bundle yet, or its settings aren't the user's own and name a bundle elsewhere.
        """
        try:
            path = read_bundle_path(self.folder / CONFIG)
        except (OSError, DocumentError) as error:
            raise RunError(
                f"{self.folder / CONFIG} can't be read: {error}", code="settings-unreadable"
            ) from None
        return path or self._subfolder("bundle", "bundle")

    @property
    def rows(self) -> Path:
        """Folder of its rows by split; raises RunError if it doesn't exist yet."""
        return self._subfolder("rows", "rows")

    @property
    def run(self) -> Path:
        """Folder of its final run, finished or not; raises RunError if it doesn't exist yet."""
        return self._subfolder("run", "run")

    @property
    def adapter(self) -> Path:
        """PEFT folder of its trained adapter; raises RunError if it doesn't exist yet."""
        return self._subfolder(f"run/{FINAL}", "trained adapter")

    def _subfolder(self, name: str, what: str) -> Path:
        if not (self.folder / name).is_dir():
            raise RunError(
                f"{self.folder} is a tuning that has no {what} yet.",
                remedy=f"Finish it with `prge tune --resume {self.folder}`.",
                code="tuning-unfinished",
            )
        if is_outside(self.folder, str(self.folder / name), is_written=True):
            raise RunError(
                f"{self.folder / name} is a link to a place outside of {self.folder}.",
                remedy="Put what it leads to in its place.",
                code="link-outside",
            )
        return self.folder / name


def read_bundle_path(config: Path) -> Path | None:
    """Read the path of the bundle from the settings of a run or a tuning; None if they have none.

    Raises:
        OSError, DocumentError: the settings can't be read.
        RunError: the settings aren't the user's own, and the bundle is outside of their folder; see
            `prge.formats.stored_settings`.
    """
    content = read_document(config, MAX_YAML_BYTES)
    bundle = mapping(parse_yaml(content)).get("bundle")
    if not bundle:
        return None
    exists = os.path.lexists(str(bundle))
    if exists and is_outside(config.parent, str(bundle)) and not has_own_signature(content, config.name):
        raise RunError(
            f"{config} names the bundle {format_value(bundle)}, outside of its folder, "
            "and isn't as your prge wrote it.",
            remedy=f"If that is the bundle that you want, give --bundle {bundle}; and {config.parent} with "
            "--adapter to verbs that generate or score.",
            code="path-outside",
        )
    return Path(str(bundle))


def find_tuning(folder: Path) -> Tuning | None:
    """Return the tuning of a folder; None if it isn't the folder of a tuning."""
    is_run = any((folder / name).exists() for name in (JOURNAL, METRICS, SUMMARY))
    return Tuning(folder) if (folder / DECISIONS).is_file() and not is_run else None


def resolve_bundle(folder: Path) -> Path:
    """Return the folder of a bundle or of a tuning's bundle; raises RunError if there is none."""
    tuning = find_tuning(folder)
    return folder if tuning is None else tuning.bundle


def resolve_run(folder: Path) -> Path:
    """Return the run folder for a path to a run or to a tuning; raises RunError if that has no run."""
    tuning = find_tuning(folder)
    return folder if tuning is None else tuning.run
