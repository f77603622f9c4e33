"""The ledger of the rounds that a device began and answered; the epsilon that it has spent follows from it.

    {"type": "begun", ...}     written and flushed before anything is computed for a round: the round counts,
                               however it ends
    {"type": "answered", ...}  written and flushed after the result's file, before the result is sent

Each `begun` line has at most one result. If a round was answered and its file is gone, the round is refused
forever; a round that was begun and not answered never left the device, and is resumed. Rounds before the
newest one of their agreement are refused. Deleting a fleet's folder does not change the ledger.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from device_runner.fleet.messages import TaskRefusedError
from device_runner.fleet.privacy.reported import EFFECTIVE_NOISE, max_participations
from prge.formats.journal import Journal, Record
from prge.training.privacy_accounting import epsilon_of

BEGUN, ANSWERED = "begun", "answered"
# Rounds of version 0.1.0 count as rounds without noise, because their noise could be removed.
_LEGACY_ROUND = "round"
# Consecutive steps of an agreement with equal values of these share one pass order over the rows.
_STRETCH_FIELDS = ("rows", "data", "examples", "noise", "unit")


class Ledger:
    """The ledger of one device; a truncated last line is dropped.

    Raises:
        RunError: the ledger is damaged, or can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)

    @property
    def _begun(self) -> list[Record]:
        return [record for record in self._journal.records if record["type"] != ANSWERED]

    def line(self, agreement: str, number: int) -> Record | None:
        """Return the `begun` line of a round; None for a new round.

        Raises:
            TaskRefusedError: a later round of the agreement was begun.
        """
        rounds = [record for record in self._begun if record["agreement"] == agreement]
        newest = max(rounds, key=lambda record: record["round"], default=None)
        if newest is None or newest["round"] < number:
            return None
        if newest["round"] > number:
            raise TaskRefusedError(
                f"round {number + 1} is over: round {newest['round'] + 1} was begun", code="round-over"
            )
        return newest

    def is_answered(self, line: Record) -> bool:
        """Return whether the result of a round may have been sent."""
        return line["type"] == _LEGACY_ROUND or _answered(line) in self._journal.records

    def begin(self, line: Record) -> None:
        """Count a round; from here on it counts, whatever happens."""
        self._journal.append(line)
        self._journal.sync()

    def mark_answered(self, line: Record) -> None:
        """Record that the result of a round exists, before it is sent."""
        if not self.is_answered(line):
            self._journal.append(_answered(line))
            self._journal.sync()

    def begun_since(self, when: float) -> int:
        """Return the number of rounds begun since a time, in seconds since the epoch."""
        return sum(record["time"] > when for record in self._begun)

    def steps_before(self, agreement: str, number: int) -> int:
        """Return the steps of an agreement before a round: where the round begins in the rows' order."""
        return sum(
            record["steps"]
            for record in self._begun
            if record["agreement"] == agreement and record["round"] < number
        )

    def privacy_epsilon(self, line: Record, delta: float, unit: str, whole: bool) -> float:
        """Return the epsilon of all rounds that were begun, and of `line`, which may be one of them.

        Mechanisms that a server chooses adaptively compose like others: Smith and Thakurta 2022, arXiv
        2210.17520.

        Args:
            line: the line of the present round.
            delta: the delta of epsilon.
            unit: a row or the owner.
            whole: also count rounds without noise, whose epsilon is infinite.
        """
        rounds = self._begun if line in self._begun else [*self._begun, line]
        parts = []
        for name in {record["agreement"] for record in rounds}:
            agreement_rounds = [record for record in rounds if record["agreement"] == name]
            for (rows, _, examples, noise, noise_unit), stretch in groupby(
                agreement_rounds, lambda record: tuple(record.get(key) for key in _STRETCH_FIELDS)
            ):
                steps = sum(record["steps"] for record in stretch)
                if not noise or noise_unit is None:
                    parts += [(0.0, 1)] * whole
                elif unit == noise_unit == "row":
                    parts.append((EFFECTIVE_NOISE * noise, max_participations(steps, examples, rows)))
                else:
                    # All rows together change the mean as much as one row changes the sum.
                    parts.append((EFFECTIVE_NOISE * noise / (examples if noise_unit == "row" else 1), steps))
        return epsilon_of(parts, delta)


def _answered(line: Record) -> Record:
    return {"type": ANSWERED, "agreement": line["agreement"], "round": line["round"]}
