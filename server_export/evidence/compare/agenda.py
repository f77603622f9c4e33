"""The runs of a comparison that are still to come: which of how many, and for how long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prge.host.progress import duration


class Agenda:
    """Runs by method, each a share of a reported run's budget.

    A method's time for a share is taken from its runs so far, that of one without any from all others'.
    """

    def __init__(self, shares: Mapping[str, Sequence[float]]) -> None:
        """Take the shares of all planned runs, by method."""
        self._ahead = {method: list(planned) for method, planned in shares.items()}
        self._begun = 0
        self._seconds = dict.fromkeys(shares, 0.0)
        self._done = dict.fromkeys(shares, 0.0)

    def begin(self, method: str, share: float) -> str:
        """Take note that a run begins, planned or not; returns texts such as `7 of 45, about 12 min left`."""
        if share not in self._ahead[method]:
            self._ahead[method].append(share)
        left = self.seconds_left()
        self._begun += 1
        text = f"{self._begun} of {self._begun - 1 + sum(map(len, self._ahead.values()))}"
        self._ahead[method].remove(share)
        return text if left is None else f"{text}, about {duration(left)} left"

    def end(self, method: str, share: float, seconds: float) -> None:
        """Take note of how long a run took."""
        self._seconds[method] += seconds
        self._done[method] += share

    def drop(self, method: str) -> None:
        """Take note that a method can't go on."""
        self._ahead[method].clear()

    def seconds_left(self) -> float | None:
        """Seconds of all runs that haven't begun; None before the first one has ended."""
        done = sum(self._done.values())
        if not done:
            return None
        others = sum(self._seconds.values()) / done
        return sum(
            sum(planned) * (self._seconds[method] / self._done[method] if self._done[method] else others)
            for method, planned in self._ahead.items()
        )
