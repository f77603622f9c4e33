"""The record of a tuning's decisions and facts in `tune.json` of its folder, rewritten after every change."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from prge.cli.settings import PATH_LIKE_SETTINGS, settings_to_yaml
from prge.errors import ConfigError, RunError, format_value
from prge.formats.documents import mapping
from prge.formats.run_folder import CONFIG, DECISIONS, JOURNAL, LOCK, SUMMARY
from prge.formats.stored_settings import is_outside, write_settings
from prge.system.atomic import write_file
from prge.training.estimators.rewards import RewardFlags
from server_export.tune.decisions import Decision
from server_export.tune.settings import TuneSettings

# Settings that may change between calls.
_NOT_IDENTITY = {"out", "resume", "json", "threads"}
# The first stage that depends on a setting or decision; `bundle` for all others.
_OF_SEARCH = (
    *("minutes", "steps", "epochs", "batch_size", "head_folds", "seed", "on", "phone_folder", "memory"),
    *("loss_normalisation", "weight_decay", "reward", "epsilon"),
    *(item.name for item in fields(RewardFlags) if item.name != "max_completion_length"),
)
_STAGE_OF = {**dict.fromkeys(_OF_SEARCH, "search"), "learning_rate": "run"}


class Record:
    """The record of a tuning's folder; a new record stays in memory until `keep`.

    Settings may have changed since the tuning began if no completed stage depends on them. Decisions that
    depend on them are forgotten.

    Args:
        settings: settings of the tuning.

    Attributes:
        is_kept: whether the record is written to the folder.

    Raises:
        ConfigError: settings have changed that completed stages depend on.
        RunError: the record of the folder is damaged.
    """

    def __init__(self, settings: TuneSettings) -> None:
        self._settings = settings
        self._path = settings.out / DECISIONS
        current = _plain(settings.resolved())
        began = {"began": time.time(), "seconds": 0.0}
        self._content: dict[str, Any] = {"settings": current, "decisions": [], "found": {}, **began}
        self.is_kept = False
        if not self._path.is_file():
            return
        content = _read(self._path)
        self._check_paths(content)
        # Settings that an earlier version lacked had their default values.
        defaults = {item.name: item.default for item in fields(TuneSettings) if item.default is not MISSING}
        before = json.loads(json.dumps(defaults, default=str)) | content["settings"]
        changed = {
            name: _STAGE_OF.get(name, "bundle")
            for name in sorted((before.keys() | current.keys()) - _NOT_IDENTITY)
            if before.get(name) != current.get(name)
        }
        done = _done(settings)
        problems = [
            f"{name} was {before.get(name)!r}, is {current.get(name)!r}"
            for name, stage in changed.items()
            if stage in done
        ]
        if problems:
            is_exported = (settings.out / "bundle").is_dir() and "bundle" not in {
                stage for stage in changed.values() if stage in done
            }
            reuse = f", with --bundle {settings.out / 'bundle'} instead of --model, which saves the export"
            raise ConfigError(
                f"{settings.out} holds a tuning with other settings that completed stages depend on:",
                problems,
                remedy=f"Resume it with prge tune --resume {settings.out}, or give another --out"
                + (reuse if is_exported else "")
                + ".",
                code="settings-changed",
            )
        if changed and "bundle" not in done:
            return  # no stage is complete, so the tuning starts again
        seconds = content["seconds"] + max(_last_sign(settings.out) - content["began"], 0.0)
        self._content, self.is_kept = content | {**began, "seconds": seconds}, True
        if changed:
            self._correct(current, done)
        self._write()

    def _check_paths(self, content: dict[str, Any]) -> None:
        """Raise RunError if the record, which may come from a stranger, names paths outside of its folder."""
        own = {
            str(getattr(each, name, None))
            for each in (self._settings, self._settings.resolved())
            for name in PATH_LIKE_SETTINGS
        }
        named = {
            each["name"]: each["value"] for each in content["decisions"] if each["name"] in PATH_LIKE_SETTINGS
        }
        named["heads"] = str(self._settings.out / str(mapping(content["found"]).get("heads") or ""))
        for name, value in named.items():
            if isinstance(value, str) and value not in own and is_outside(self._settings.out, value):
                raise RunError(
                    f"{self._path} names {format_value(value)} as {name}, which is outside of its folder.",
                    remedy="Remove that entry, or give another folder with --out.",
                    code="path-outside",
                )

    def _correct(self, current: dict[str, Any], done: Collection[str]) -> None:
        """Record changed settings, and forget decisions of stages that are not complete."""
        kept = [each for each in self.decisions if _STAGE_OF.get(each.name, "bundle") in done]
        self._content |= {"settings": current, "decisions": [asdict(each) for each in kept]}
        if "search" not in done:
            for name in ("phone", "name_on_phone"):
                self._content["found"].pop(name, None)
        self.keep()

    @property
    def seconds(self) -> float:
        """Seconds that the tuning has taken, including earlier calls."""
        return float(self._content["seconds"]) + max(time.time() - self._content["began"], 0.0)

    def keep(self) -> None:
        """Write the record to the folder, so that the tuning can be resumed.

        A final run of an earlier call that diverged is removed.
        """
        run = self._settings.out / "run"
        if self._path.is_file() and status_of(run) == "diverged":
            shutil.rmtree(run)
        write_settings(self._settings.out / CONFIG, settings_to_yaml(self._settings.resolved()))
        self.is_kept = True
        self._write()

    @property
    def decisions(self) -> list[Decision]:
        """The decisions, in the order in which they were taken."""
        return [Decision(**entry) for entry in self._content["decisions"]]

    def value(self, name: str) -> Any:
        """Return the decided value of a setting; None if there is no decision."""
        return next((each.value for each in self.decisions if each.name == name), None)

    def decide(self, *decisions: Decision) -> None:
        """Record decisions, which replace earlier ones of the same name."""
        names = {each.name for each in decisions}
        kept = [each for each in self.decisions if each.name not in names]
        self._content["decisions"] = [asdict(each) for each in (*kept, *decisions)]
        self._write()

    def fact(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return a recorded fact, or measure and record it; facts consist of JSON's types."""
        facts = self._content["found"]
        if name not in facts:
            facts[name] = measure()
            self._write()
        return facts[name]

    def recorded_fact(self, name: str) -> Any:
        """Return a recorded fact; None if it isn't recorded."""
        return self._content["found"].get(name)

    def _write(self) -> None:
        if self.is_kept:
            write_file(self._path, (json.dumps(self._content, indent=2) + "\n").encode())


def _done(settings: TuneSettings) -> set[str]:
    """Return the stages that have results, including a stage that was only begun."""
    out, done = settings.out, set()
    if settings.bundle is None and (out / "bundle").is_dir():
        done |= {"bundle"}
    if any(out.glob(f"search/*/{JOURNAL}")):
        done |= {"bundle", "search"}
    if (out / "run" / JOURNAL).is_file() and status_of(out / "run") != "diverged":
        done |= {"bundle", "search", "run"}
    return done


def _last_sign(out: Path) -> float:
    """Return when an earlier call last wrote a file, in seconds since the epoch."""
    paths = (path for path in out.rglob("*") if path != out / LOCK)
    return min(max((path.lstat().st_mtime for path in paths), default=0.0), time.time())


def status_of(run: Path) -> str | None:
    """Return the status of a run from its summary; None if there is no summary."""
    try:
        return str(json.loads((run / SUMMARY).read_text(encoding="utf-8"))["run"]["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _plain(settings: TuneSettings) -> dict[str, Any]:
    """Return settings as values of JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings), default=str))
    return plain


def _read(path: Path) -> dict[str, Any]:
    """Read a record; raises RunError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not {"settings", "decisions", "found", "began", "seconds"} <= content.keys():
            raise ValueError("it lacks a part")
        content |= {name: float(content[name]) for name in ("began", "seconds")}
        for entry in content["decisions"]:
            Decision(**entry)
        return dict(content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(
            f"Cannot read {path}: {error}", remedy="Give another folder with --out.", code="file-unreadable"
        ) from None
