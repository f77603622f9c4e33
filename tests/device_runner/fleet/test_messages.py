"""Messages survive the way there and back; nothing else is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from device_runner.fleet.agreement import Plan
from device_runner.fleet.messages import (
    Answer,
    MessageError,
    Refusal,
    Steps,
    Task,
    parse_answer,
)
from prge.engine import FloatArray
from tests.refusals import raises

hashes = st.binary(min_size=16, max_size=16)
numbers = st.integers(0, 2**32 - 1)


def _floats(shape: Any) -> st.SearchStrategy[FloatArray]:
    return arrays.arrays(np.float32, shape, elements=st.floats(width=32))


@st.composite
def steps(draw: st.DrawFn) -> Steps:
    count, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return Steps(draw(numbers), *map(draw, (_floats(count), _floats(count), _floats((count, size)))))


answers = st.builds(
    *(Answer, hashes, numbers, numbers, numbers, st.floats(0, 100, width=32)),
    *(_floats(st.integers(1, 5)), _floats(st.integers(1, 20))),
)


def _equal(left: Any, right: Any) -> bool:
    """Field by field, arrays to the bit."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if hasattr(left, "__dataclass_fields__"):
        return all(_equal(value, getattr(right, name)) for name, value in vars(left).items())
    return bool(left == right)


@given(hashes, numbers, numbers, st.floats(0, 1e6, width=32), st.binary(), st.lists(steps()), st.binary())
def test_a_task_there_and_back(
    sha256: bytes, number: int, step: int, seconds: float, agreement: bytes, missed: list[Steps], state: bytes
) -> None:
    rounds = b"".join(each.to_bytes() for each in missed)
    task = Task(sha256, number, step, seconds, agreement, rounds, state)
    read = Task.parse(task.to_bytes())
    assert read == task and all(map(_equal, read.missed_steps(), missed))


@given(answers)
def test_an_answer_there_and_back(answer: Answer) -> None:
    assert _equal(parse_answer(answer.to_bytes()), answer)


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.just("no\nno \x1b[2J"))
def test_a_refusal_is_one_printable_line(reason: str) -> None:
    said = parse_answer(Refusal(reason).to_bytes())
    assert isinstance(said, Refusal) and "\n" not in said.reason and "\x1b" not in said.reason
    if reason.isprintable() and len(reason) < 100:
        assert said.reason == reason


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error_with_a_reason(content: bytes) -> None:
    for parse in (Task.parse, parse_answer):
        try:
            parse(content)
        except MessageError as error:
            assert str(error)


@given(answers, st.data())
def test_a_message_that_ends_early_or_late_is_none(answer: Answer, data: st.DataObject) -> None:
    content = answer.to_bytes()
    end = data.draw(st.integers(0, len(content) - 1))
    for other in (content[:end], content + b"\x00"):
        with raises(MessageError, "message-damaged", "message-of-other-version"):
            parse_answer(other)


@given(steps(), st.integers(0, 100))
def test_steps_as_records_of_a_journal_and_back(steps: Steps, number: int) -> None:
    records = steps.records(number, 7, steps.scalars.shape[1:])
    assert all(record["seed"] == 7 and record["round"] == number for record in records)
    assert _equal(Steps.of_records(records), steps)


def test_sixteen_scalars_take_less_than_400_bytes_in_flowers_form() -> None:
    one = np.ones(1, np.float32)
    answer = Answer(bytes(16), 9, 90, 4, 1.5, one, np.ones(16, np.float32))
    assert len(answer.to_bytes()) == 110
    assert len(ConfigRecord({"answer": answer.to_bytes()}).deflate()) < 400


def test_a_thousand_missed_steps_of_sixteen_scalars_take_less_than_90_kilobytes() -> None:
    one = np.ones(1, np.float32)
    assert int(np.prod(Plan().shape)) == 16
    rounds = b"".join(Steps(step, one, one, np.ones((1, 16), np.float32)).to_bytes() for step in range(1000))
    assert len(Task(bytes(16), 1000, 1000, 60.0, missed=rounds).to_bytes()) < 90_000


@pytest.mark.parametrize("parse", [Task.parse, parse_answer])
def test_another_versions_message_is_told_as_one(parse: Any) -> None:
    with raises(MessageError, "message-of-other-version", saying="form 1"):
        parse(b"\x01\x00" + bytes(100))
