"""What a tuning has decided and found so far, in `tune.json` of its folder: whole after every change."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from prge.errors import ConfigError, RunError, shown
from prge.files.documents import mapping
from prge.files.own_settings import leads_out, write_settings
from prge.files.run_folder import CONFIG, DECISIONS, JOURNAL, LOCK, SUMMARY
from prge.host.atomic import write_file
from prge.verbs.settings import PLACES, settings_to_yaml
from server_export.tune.decisions import Decision
from server_export.tune.settings import TuneSettings

# Where things lie, and what is no part of what is tuned.
_NOT_IDENTITY = {"out", "resume", "json", "threads"}
# The stage that first depends on a setting or has to do with a decision; all others: the bundle.
_OF_SEARCH = (
    *("minutes", "steps", "epochs", "batch_size", "head_folds", "seed", "on", "phone_folder", "memory"),
    *("loss_normalisation", "weight_decay"),
)
_STAGE_OF = {**dict.fromkeys(_OF_SEARCH, "search"), "learning_rate": "run"}


class Record:
    """The record of a folder: begun, gone on with, or new and in memory until it is kept.

    What was corrected since the folder was begun is begun again, where no stage that is done depends on it.

    Args:
        settings: of the tuning.

    Raises:
        ConfigError: the folder was begun with other settings, and stages that are done depend on them.
        RunError: its record is damaged.
    """

    def __init__(self, settings: TuneSettings) -> None:
        self._settings = settings
        self._path = settings.out / DECISIONS
        now = _plain(settings.resolved())
        began = {"began": time.time(), "seconds": 0.0}
        self._content: dict[str, Any] = {"settings": now, "decisions": [], "found": {}, **began}
        self.is_kept = False
        if not self._path.is_file():
            return
        content = _read(self._path)
        self._check_places(content)
        # What an earlier version didn't know was as it is where nobody says otherwise.
        usual = {item.name: item.default for item in fields(TuneSettings) if item.default is not MISSING}
        before = json.loads(json.dumps(usual, default=str)) | content["settings"]
        changed = {
            name: _STAGE_OF.get(name, "bundle")
            for name in sorted((before.keys() | now.keys()) - _NOT_IDENTITY)
            if before.get(name) != now.get(name)
        }
        done = _done(settings)
        problems = [
            f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
            for name, stage in changed.items()
            if stage in done
        ]
        if problems:
            is_exported = (settings.out / "bundle").is_dir() and "bundle" not in {
                stage for stage in changed.values() if stage in done
            }
            reuse = f", with --bundle {settings.out / 'bundle'} instead of --model, which saves the export"
            raise ConfigError(
                f"{settings.out} holds a tuning with other settings, and what is done depends on them:",
                problems,
                remedy=f"go on with it: prge tune --resume {settings.out}; or give another --out"
                + (reuse if is_exported else ""),
                code="settings-changed",
            )
        if changed and "bundle" not in done:
            return  # nothing is made: all of it begins again
        seconds = content["seconds"] + max(_last_sign(settings.out) - content["began"], 0.0)
        self._content, self.is_kept = content | {**began, "seconds": seconds}, True
        if changed:
            self._correct(now, done)
        self._write()

    def _check_places(self, content: dict[str, Any]) -> None:
        """Raise RunError where a record that may be somebody else's names places outside of the folder."""
        own = {
            str(getattr(each, name, None))
            for each in (self._settings, self._settings.resolved())
            for name in PLACES
        }
        named = {each["name"]: each["value"] for each in content["decisions"] if each["name"] in PLACES}
        named["heads"] = str(self._settings.out / str(mapping(content["found"]).get("heads") or ""))
        for name, value in named.items():
            if isinstance(value, str) and value not in own and leads_out(self._settings.out, value):
                raise RunError(
                    f"{self._path} names {shown(value)} as {name}, outside of its folder",
                    remedy="remove that entry, or give another folder with --out",
                    code="path-outside",
                )

    def _correct(self, now: dict[str, Any], done: Collection[str]) -> None:
        """Take settings that no stage that is done depends on, and forget what was decided by others."""
        kept = [each for each in self.decisions if _STAGE_OF.get(each.name, "bundle") in done]
        self._content |= {"settings": now, "decisions": [asdict(each) for each in kept]}
        if "search" not in done:
            for name in ("phone", "name_on_phone"):
                self._content["found"].pop(name, None)
        self.keep()

    @property
    def seconds(self) -> float:
        """How long the tuning has taken, what went before a kill included."""
        return float(self._content["seconds"]) + max(time.time() - self._content["began"], 0.0)

    def keep(self) -> None:
        """Write it down: from now on the folder holds a tuning that can be gone on with.

        A final run of before that diverged goes.
        """
        run = self._settings.out / "run"
        if self._path.is_file() and status_of(run) == "diverged":
            shutil.rmtree(run)
        write_settings(self._settings.out / CONFIG, settings_to_yaml(self._settings.resolved()))
        self.is_kept = True
        self._write()

    @property
    def decisions(self) -> list[Decision]:
        """In the order in which they were taken."""
        return [Decision(**entry) for entry in self._content["decisions"]]

    def value(self, name: str) -> Any:
        """What was decided; None where nothing was."""
        return next((each.value for each in self.decisions if each.name == name), None)

    def decide(self, *decisions: Decision) -> None:
        """Note decisions; one of the same name takes the other's place."""
        names = {each.name for each in decisions}
        kept = [each for each in self.decisions if each.name not in names]
        self._content["decisions"] = [asdict(each) for each in (*kept, *decisions)]
        self._write()

    def found(self, name: str, find: Callable[[], Any]) -> Any:
        """A fact: the record's, or found now and noted. It consists of JSON's types."""
        facts = self._content["found"]
        if name not in facts:
            facts[name] = find()
            self._write()
        return facts[name]

    def known(self, name: str) -> Any:
        """A fact that was found before; None where it wasn't."""
        return self._content["found"].get(name)

    def _write(self) -> None:
        if self.is_kept:
            write_file(self._path, (json.dumps(self._content, indent=2) + "\n").encode())


def _done(settings: TuneSettings) -> set[str]:
    """Stages whose results are there, one that was begun among them."""
    out, done = settings.out, set()
    if settings.bundle is None and (out / "bundle").is_dir():
        done |= {"bundle"}
    if any(out.glob(f"search/*/{JOURNAL}")):
        done |= {"bundle", "search"}
    if (out / "run" / JOURNAL).is_file() and status_of(out / "run") != "diverged":
        done |= {"bundle", "search", "run"}
    return done


def _last_sign(out: Path) -> float:
    """When a tuning that was ended has last written something, in seconds of the epoch."""
    paths = (path for path in out.rglob("*") if path != out / LOCK)
    return min(max((path.lstat().st_mtime for path in paths), default=0.0), time.time())


def status_of(run: Path) -> str | None:
    """How the run of a folder has ended, by its summary; None: there is none."""
    try:
        return str(json.loads((run / SUMMARY).read_text(encoding="utf-8"))["run"]["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _plain(settings: TuneSettings) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings), default=str))
    return plain


def _read(path: Path) -> dict[str, Any]:
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
            f"{path} can't be read: {error}", remedy="give another folder with --out", code="file-unreadable"
        ) from None
