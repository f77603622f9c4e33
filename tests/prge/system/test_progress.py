"""Progress: lines without a terminal, a bar on one, and the time left."""

from __future__ import annotations

import io

import pytest

from prge.system.progress import Progress, TimeLeft, format_duration
from tests.terminals import Terminal


class Clock:
    """A clock that advances on demand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_without_a_terminal_is_a_line_every_few_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(10, stream=stream, clock=clock, every_seconds=5) as progress:
        for done in range(1, 11):
            clock.now += 2
            progress.update(done, tokens=8, loss=1 / done, accuracy=0.75 if done == 2 else None)
        progress.note("written to runs/a")
    assert stream.getvalue().splitlines() == [
        "step 3/10  14 s left  loss 0.3333  accuracy 0.75  4 tokens/s",
        "step 6/10  8 s left  loss 0.1667  accuracy 0.75  4 tokens/s",
        "step 9/10  2 s left  loss 0.1111  accuracy 0.75  4 tokens/s",
        "step 10/10  0 s left  loss 0.1  accuracy 0.75  4 tokens/s",
        "written to runs/a",
    ]


def test_steps_of_an_earlier_process_do_not_count_for_the_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream=stream, clock=clock, every_seconds=0)
    progress.skip(90)
    clock.now = 3
    progress.update(91, tokens=6)
    assert stream.getvalue() == "step 91/100  27 s left  2 tokens/s\n"


def test_evaluations_count_for_the_time_left_and_pauses_do_not() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(4, stream=stream, clock=clock, every_seconds=0)
    clock.now = 30  # an evaluation before the first step doesn't count as recurring
    progress.exclude(30)
    clock.now += 5
    progress.update(1, tokens=1000, memory="9 MB")
    clock.now += 3600 + 10
    progress.exclude(3600, recurring=False)
    progress.exclude(5)
    progress.update(2, tokens=1000)
    assert stream.getvalue().splitlines() == [
        "step 1/4  15 s left  memory 9 MB  200 tokens/s",
        "step 2/4  15 s left  memory 9 MB  200 tokens/s",
    ]


def test_quiet_progress_prints_nothing() -> None:
    stream = io.StringIO()
    with Progress(2, quiet=True, stream=stream, every_seconds=0) as progress:
        progress.update(1, loss=1.0)
        progress.note("text")
    assert stream.getvalue() == ""


def test_progress_on_a_terminal_is_a_bar() -> None:
    stream = Terminal()
    with Progress(4, stream=stream) as progress:
        progress.skip(1)
        progress.update(2, tokens=2, loss=0.5)
        progress.note("a note")
        progress.update(4, tokens=2, loss=0.25)
    text = stream.getvalue()
    assert "100%" in text
    assert "4/4, 0 s left, loss 0.25" in text
    assert "a note\n" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"), (-1, "0 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_only_long_work_prints_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    for seconds in (1, 6):
        progress = Progress(3, unit="row", only_if_long=True, stream=stream, clock=clock, every_seconds=10)
        for done in range(1, 4):
            clock.now += seconds
            progress.update(done)
    assert stream.getvalue().splitlines() == ["row 2/3  6 s left", "row 3/3  0 s left"]


def test_time_left() -> None:
    left = TimeLeft(100)
    assert left.count(20) == ""  # by an earlier process
    assert left.count(10, seconds=30) == "at most 3 min 30 s left"
    assert left.count(20, seconds=15) == "at most 1 min 15 s left"
    assert left.count(70, seconds=70) == ""
