"""The rounds that a device began and answered: what its privacy has cost follows from them.

    {"kind": "begun", ...}     written and flushed before anything is computed for a round: it counts, however
                               the round ends
    {"kind": "answered", ...}  written and flushed after the answer's file, before the answer is sent

An answer exists at most once for a line `begun`: where the file of one that was answered is gone, the round
is refused for ever; what was begun and not answered never left the device, and goes on. A round before the
newest one of its agreement is refused. Nothing of this is forgotten with a fleet's folder.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from device_runner.fleet.messages import RefusedError
from device_runner.fleet.privacy.reported import COUNTED, exposure
from prge.files.journal import Journal, Record
from prge.learning.accounting import epsilon_of

BEGUN, ANSWERED = "begun", "answered"
# A round of version 0.1.0, whose noise could be undone: it counts as one without.
_OLD = "round"
# The steps of an agreement that have these in common are one stretch of the rows' order.
_STRETCH = ("rows", "data", "examples", "noise", "unit")


class Ledger:
    """The ledger of one device; a torn last line is dropped.

    Raises:
        RunError: it is damaged, or can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)

    @property
    def _begun(self) -> list[Record]:
        return [record for record in self._journal.records if record["kind"] != ANSWERED]

    def line(self, agreement: str, number: int) -> Record | None:
        """The line that a round was begun with; None of a new one.

        Raises:
            RefusedError: a later round of the agreement was begun.
        """
        ours = [record for record in self._begun if record["agreement"] == agreement]
        newest = max(ours, key=lambda record: record["round"], default=None)
        if newest is None or newest["round"] < number:
            return None
        if newest["round"] > number:
            raise RefusedError(
                f"round {number + 1} is over: round {newest['round'] + 1} was begun", code="round-over"
            )
        return newest

    def is_answered(self, line: Record) -> bool:
        """Whether a round's answer may have been sent."""
        return line["kind"] == _OLD or _answered(line) in self._journal.records

    def begin(self, line: Record) -> None:
        """Count a round; it is counted from here on, whatever happens."""
        self._journal.append(line)
        self._journal.sync()

    def answer(self, line: Record) -> None:
        """Take note that an answer to a round exists, before it is sent."""
        if not self.is_answered(line):
            self._journal.append(_answered(line))
            self._journal.sync()

    def begun_since(self, when: float) -> int:
        """Rounds begun since a time, in seconds since the epoch."""
        return sum(record["time"] > when for record in self._begun)

    def steps_before(self, agreement: str, number: int) -> int:
        """Steps of an agreement's rounds before one: where in the rows' order it begins."""
        return sum(
            record["steps"]
            for record in self._begun
            if record["agreement"] == agreement and record["round"] < number
        )

    def privacy_epsilon(self, line: Record, delta: float, unit: str, whole: bool) -> float:
        """What privacy has cost with all rounds that were begun, and `line`, which may be one of them.

        Mechanisms that a server chooses by earlier answers add up like others: Smith and Thakurta 2022, arXiv
        2210.17520.

        Args:
            line: of the round to come.
            delta: of epsilon.
            unit: a row or the owner.
            whole: count rounds without noise too, whose epsilon is infinite.
        """
        rounds = self._begun if line in self._begun else [*self._begun, line]
        parts = []
        for name in {record["agreement"] for record in rounds}:
            ours = [record for record in rounds if record["agreement"] == name]
            for (rows, _, examples, noise, by), stretch in groupby(
                ours, lambda record: tuple(record.get(key) for key in _STRETCH)
            ):
                steps = sum(record["steps"] for record in stretch)
                if not noise or by is None:
                    parts += [(0.0, 1)] * whole
                elif unit == by == "row":
                    parts.append((COUNTED * noise, exposure(steps, examples, rows)))
                else:
                    # All rows together change a mean by as much as one does a sum.
                    parts.append((COUNTED * noise / (examples if by == "row" else 1), steps))
        return epsilon_of(parts, delta)


def _answered(line: Record) -> Record:
    return {"kind": ANSWERED, "agreement": line["agreement"], "round": line["round"]}
