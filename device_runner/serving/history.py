"""The adapters that a server learnt, as its journal tells: how each was judged, and which is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.errors import ConfigError
from prge.files.journal import Journal, Record
from prge.verbs.kinds import Day

FEEDBACK, HISTORY, ROUNDS = "feedback.jsonl", "adapters.jsonl", "rounds"
_FACTS = ("learnt", "held_back", "kept", "steps", "seconds", "why")


@dataclass
class Version:
    """An adapter of the history: 0 is that of the start, others are of rounds."""

    number: int
    parent: int | None = None
    rows: tuple[str, ...] = ()
    verdict: Record | None = None
    is_back: bool = False

    @property
    def status(self) -> str:
        """What became of it."""
        if self.number == 0:
            return "start"
        if self.verdict is None:
            return "learning"
        return "taken back" if self.is_back else str(self.verdict["status"])

    def told(self, is_current: bool) -> dict[str, Any]:
        """As clients are told of it."""
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

    def line(self) -> str:
        """As a person is told of it."""
        verdict = self.verdict or {}
        held = verdict.get("held_back", {})
        losses = f", loss {held['before']:.3f} -> {held['after']:.3f}" if "after" in held else ""
        why = f": {verdict['why']}" if "why" in verdict else ""
        return f"adapter {self.number} of {len(self.rows)} rows: {self.status}{losses}{why}"


def date_of(folder: Path) -> Day | None:
    """The day that chat templates take for today in a folder of what is learnt; None where it has none."""
    path = folder / HISTORY
    begun = Journal(path, writable=False).first("start") if path.is_file() else None
    found = None if begun is None else begun.get("date")
    return None if found is None else Day(found)


class History:
    """The adapters of a folder, as its journal tells; changed by one thread at a time.

    Args:
        folder: of what is learnt.
        start: what it begins with, or began with.
        date: day that chat templates take for today, in a folder that begins.

    Raises:
        ConfigError: the folder began with another bundle or adapter.
        RunError: the journal is damaged, or can't be written.
    """

    def __init__(self, folder: Path, start: Record, date: str | None = None) -> None:
        self._journal = Journal(folder / HISTORY)
        self.versions = [Version(0)]
        self.rows = set[str]()
        """Keys of all rows that rounds have had; those of one that was abandoned are new again."""
        self.abandoned = 0
        """Rounds that were abandoned."""
        self.described: list[dict[str, Any]] = []
        """What GET /v1/adapters answers, one entry per version. A change replaces the whole list."""
        if (begun := self._journal.first("start")) is None:
            self._journal.append({"kind": "start", **start, "date": date})
        elif problems := [f"another {name}" for name in start if begun.get(name) != start[name]]:
            remedy = "serve those, or learn into another folder"
            raise ConfigError(
                f"{folder} began to learn with", problems, remedy=remedy, code="learning-differs"
            )
        for record in self._journal.records:
            with self._journal.reading(record):
                self._take(record)
        self._describe()

    @property
    def current(self) -> int:
        """The version that is served: the newest that is better and wasn't taken back."""
        return next(each.number for each in reversed(self.versions) if each.status in ("served", "start"))

    @property
    def open(self) -> Version | None:
        """The round that isn't judged yet."""
        return self.versions[-1] if self.versions[-1].status == "learning" else None

    def add(self, kind: str, version: int, **facts: Any) -> None:
        """Write down that a round begins, `judged` how it ended, or that it was taken `back`."""
        self._take(self._journal.append({"kind": kind, "step": version, **facts}))
        self._describe()
        self._journal.sync()

    def _take(self, record: Record) -> None:
        if record["kind"] == "round":
            self.versions.append(Version(record["step"], record["parent"], tuple(record["rows"])))
            self.rows.update(record["rows"])
        elif record["kind"] == "judged":
            version = self.versions[record["step"]]
            version.verdict = record
            if version.status == "abandoned":
                self.rows.difference_update(version.rows)
                self.abandoned += 1
        elif record["kind"] == "back":
            self.versions[record["step"]].is_back = True

    def _describe(self) -> None:
        current = self.current
        self.described = [each.told(each.number == current) for each in self.versions]

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()
