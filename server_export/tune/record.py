"""What a tuning has decided and found so far, in `tune.json` of its folder: whole after every change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prge.atomic import write_file
from prge.errors import ConfigError, RunError
from prge.run_folder import CONFIG, DECISIONS
from prge.settings import settings_to_yaml
from server_export.tune.decisions import Decision
from server_export.tune.settings import TuneSettings

# Where things lie, and what is no part of what is tuned.
_NOT_IDENTITY = {"out", "resume", "json", "threads"}


class Record:
    """The record of a folder, begun or gone on with.

    Args:
        settings: of the tuning.

    Raises:
        ConfigError: the folder was begun with other settings.
        RunError: its record is damaged.
    """

    def __init__(self, settings: TuneSettings) -> None:
        self._path = settings.out / DECISIONS
        now = _plain(settings.resolved())
        self._content: dict[str, Any] = {"settings": now, "decisions": [], "found": {}}
        if self._path.is_file():
            self._content = _read(self._path)
            before = self._content["settings"]
            problems = [
                f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
                for name in sorted((before.keys() | now.keys()) - _NOT_IDENTITY)
                if before.get(name) != now.get(name)
            ]
            if problems:
                raise ConfigError(
                    f"{settings.out} holds a tuning with other settings:",
                    problems,
                    remedy=f"go on with it: prge tune --resume {settings.out}; or give another --out",
                )
        else:
            write_file(settings.out / CONFIG, settings_to_yaml(settings.resolved()).encode())
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
        """A fact that was found before."""
        return self._content["found"][name]

    def _write(self) -> None:
        write_file(self._path, (json.dumps(self._content, indent=2) + "\n").encode())


def _plain(settings: TuneSettings) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings), default=str))
    return plain


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not {"settings", "decisions", "found"} <= content.keys():
            raise ValueError("it lacks a part")
        for entry in content["decisions"]:
            Decision(**entry)
        return dict(content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{path} can't be read: {error}", remedy="give another folder with --out") from None
