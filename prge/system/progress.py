"""Progress of a run: a bar on a terminal, lines elsewhere; and durations as text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from prge.system.terminal import best_effort


class Progress:
    """Displays progress: a bar on a terminal, otherwise a line every few seconds; nothing if `quiet`.

    Errors of the output stream never end the run.
    """

    def __init__(
        self,
        steps: int,
        *,
        quiet: bool = False,
        unit: str = "step",
        only_if_long: bool = False,
        every_seconds: float = 10.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._unit = unit
        self._prints_last_line = not only_if_long
        self._quiet = quiet
        self._every = every_seconds
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._values: dict[str, float | str] = {}
        self._first = self._done = self._tokens = 0
        self._excluded = 0.0
        self._started = self._printed = clock()
        self._bar: Any = None
        with best_effort(self._stream):
            if not quiet and self._stream.isatty():
                from tqdm import tqdm

                self._bar = tqdm(
                    total=steps,
                    file=self._stream,
                    dynamic_ncols=True,
                    leave=True,
                    bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}",
                )

    @property
    def steps(self) -> int:
        """Total number of steps."""
        return self._steps

    def skip(self, done: int) -> None:
        """Count `done` steps as completed earlier; they don't enter the estimate of the time left."""
        self._first = self._done = done
        self._tokens = 0
        self._excluded = 0.0
        self._started = self._clock()
        if self._bar is not None:
            self._bar.n = done
            with best_effort(self._stream):
                self._bar.refresh()

    def exclude(self, seconds: float, recurring: bool = True) -> None:
        """Exclude seconds that were spent on something other than steps, such as an evaluation.

        They don't count towards tokens per second. Recurring work still counts towards the time left, once
        a step has been completed.
        """
        if recurring and self._done > self._first:
            self._excluded += seconds
        else:
            self._started += seconds

    def update(self, done: int, tokens: int = 0, **values: float | str | None) -> None:
        """Show that `done` steps are completed.

        Args:
            done: completed steps in total.
            tokens: training tokens processed since the last call.
            values: values to show, such as `loss` and `memory`; None leaves a value unchanged.
        """
        self._done = done
        self._tokens += tokens
        self._values.update({name: value for name, value in values.items() if value is not None})
        if self._quiet:
            return
        facts = self._facts()
        if self._bar is not None:
            self._bar.n = done
            with best_effort(self._stream):
                self._bar.set_postfix_str(", ".join(facts))
        elif (done >= self._steps and self._prints_last_line) or self._clock() - self._printed >= self._every:
            self._printed = self._clock()
            self._prints_last_line = True
            self._print("  ".join([f"{self._unit} {done}/{self._steps}", *facts]))

    def note(self, text: str) -> None:
        """Print a line without breaking the bar; nothing if `quiet`."""
        if self._quiet:
            return
        if self._bar is not None:
            with best_effort(self._stream):
                self._bar.write(text, file=self._stream)
        else:
            self._print(text)

    def close(self) -> None:
        """Keep the bar in its last state and start a new line."""
        if self._bar is not None:
            with best_effort(self._stream):
                self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _facts(self) -> list[str]:
        """Return the texts after the bar, the most important first: a narrow terminal cuts off the end."""
        facts = []
        elapsed, steps = self._clock() - self._started, self._done - self._first
        if steps > 0:
            facts.append(f"{format_duration(elapsed / steps * (self._steps - self._done))} left")
        for name, value in self._values.items():
            facts.append(f"{name} {value if isinstance(value, str) else f'{value:.4g}'}")
        if elapsed > self._excluded and self._tokens:
            rate = self._tokens / (elapsed - self._excluded)
            facts.append(f"{rate:,.0f} tokens/s" if rate >= 100 else f"{rate:.3g} tokens/s")
        return facts

    def _print(self, text: str) -> None:
        with best_effort(self._stream):
            print(text, file=self._stream, flush=True)


class TimeLeft:
    """Estimates how long the rest of some work takes from the steps completed so far."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._measured = 0
        self._seconds = 0.0

    def count(self, steps: int, seconds: float | None = None) -> str:
        """Count steps as completed and return an upper estimate of the time left; empty if it is unknown.

        Args:
            steps: number of steps completed.
            seconds: time that they took; None if they were completed by an earlier process.
        """
        self._left = max(0, self._left - steps)
        if seconds is not None:
            self._measured += steps
            self._seconds += seconds
        if not self._measured or not self._left:
            return ""
        return f"at most {format_duration(self._seconds / self._measured * self._left)} left"


def format_duration(seconds: float) -> str:
    """Format seconds with at most two units, such as `3 min 20 s`."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"
