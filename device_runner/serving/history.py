"""The adapters that a server has trained, from its journal: how each was judged, and which one is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.cli.field_types import Day
from prge.errors import ConfigError
from prge.formats.journal import Journal, Record

FEEDBACK, HISTORY, ROUNDS = "feedback.jsonl", "adapters.jsonl", "rounds"
_FACTS = ("learnt", "held_back", "kept", "steps", "seconds", "why")


@dataclass
class Version:
    """An adapter of the history: version 0 is the initial one, the others come from rounds."""

    number: int
    parent: int | None = None
    rows: tuple[str, ...] = ()
    verdict: Record | None = None
    is_taken_back: bool = False

    @property
    def status(self) -> str:
        """The outcome of the version."""
        if self.number == 0:
            return "start"
        if self.verdict is None:
            return "learning"
        return "taken back" if self.is_taken_back else str(self.verdict["status"])

    def describe(self, is_current: bool) -> dict[str, Any]:
        """Return the version as clients receive it."""
        verdict = self.verdict or {}
        return {
            "object": "adapter",
            "version": self.number,
            "status": self.status,
            "current": is_current,
            "parent": self.parent,
            "feedback": len(self.rows),
            **{name: verdict[name] for name in _FACTS if name in verdict},
        }

    def format_line(self) -> str:
        """Format the version for the terminal."""
        verdict = self.verdict or {}
        held = verdict.get("held_back", {})
        losses = f", loss {held['before']:.3f} -> {held['after']:.3f}" if "after" in held else ""
        why = f": {verdict['why']}" if "why" in verdict else ""
        return f"adapter {self.number} from {len(self.rows)} rows: {self.status}{losses}{why}"


def read_date(folder: Path) -> Day | None:
    """Return the date that chat templates use in a folder of learned adapters; None if it has none."""
    path = folder / HISTORY
    begun = Journal(path, writable=False).first("start") if path.is_file() else None
    date = None if begun is None else begun.get("date")
    return None if date is None else Day(date)


class History:
    """The adapters of a folder, from its journal; changed by one thread at a time.

    Args:
        folder: the folder of the learned adapters.
        start: bundle and adapter that the folder begins with, or began with.
        date: the date that chat templates use, in a new folder.

    Raises:
        ConfigError: the folder began with another bundle or adapter.
        RunError: the journal is damaged, or can't be written.
    """

    def __init__(self, folder: Path, start: Record, date: str | None = None) -> None:
        self._journal = Journal(folder / HISTORY)
        self.versions = [Version(0)]
        self.rows = set[str]()
        """Keys of all rows that rounds have had; the rows of an abandoned round are new again."""
        self.abandoned = 0
        """Number of abandoned rounds."""
        self.described: list[dict[str, Any]] = []
        """The response to GET /v1/adapters, one entry per version. A change replaces the whole list."""
        if (begun := self._journal.first("start")) is None:
            self._journal.append({"type": "start", **start, "date": date})
        elif problems := [f"another {name}" for name in start if begun.get(name) != start[name]]:
            remedy = "Serve those, or give another folder with --learn."
            raise ConfigError(f"{folder} was started with:", problems, remedy=remedy, code="learning-differs")
        for record in self._journal.records:
            with self._journal.reading(record):
                self._take(record)
        self._describe()

    @property
    def current(self) -> int:
        """The version that is served: the newest one that is better and was not taken back."""
        return next(each.number for each in reversed(self.versions) if each.status in ("served", "start"))

    @property
    def open(self) -> Version | None:
        """The round that has not been judged, or None."""
        return self.versions[-1] if self.versions[-1].status == "learning" else None

    def add(self, event: str, version: int, **facts: Any) -> None:
        """Record that a round begins (`round`), was `judged`, or that its adapter was taken `back`."""
        self._take(self._journal.append({"type": event, "step": version, **facts}))
        self._describe()
        self._journal.sync()

    def _take(self, record: Record) -> None:
        if record["type"] == "round":
            self.versions.append(Version(record["step"], record["parent"], tuple(record["rows"])))
            self.rows.update(record["rows"])
        elif record["type"] == "judged":
            version = self.versions[record["step"]]
            version.verdict = record
            if version.status == "abandoned":
                self.rows.difference_update(version.rows)
                self.abandoned += 1
        elif record["type"] == "back":
            self.versions[record["step"]].is_taken_back = True

    def _describe(self) -> None:
        current = self.current
        self.described = [each.describe(each.number == current) for each in self.versions]

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()
