"""Tests that messages survive encoding and decoding, and that other bytes are refused."""

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
    MessageError,
    RoundResult,
    RoundSteps,
    RoundTask,
    TaskRefusal,
    parse_reply,
)
from prge.engine import FloatArray
from tests.refusals import raises

hashes = st.binary(min_size=16, max_size=16)
numbers = st.integers(0, 2**32 - 1)


def _floats(shape: Any) -> st.SearchStrategy[FloatArray]:
    return arrays.arrays(np.float32, shape, elements=st.floats(width=32))


@st.composite
def steps(draw: st.DrawFn) -> RoundSteps:
    count, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return RoundSteps(draw(numbers), *map(draw, (_floats(count), _floats(count), _floats((count, size)))))


answers = st.builds(
    *(RoundResult, hashes, numbers, numbers, numbers, st.floats(0, 100, width=32)),
    *(_floats(st.integers(1, 5)), _floats(st.integers(1, 20))),
)


def _equal(left: Any, right: Any) -> bool:
    """Return whether two messages are equal field by field, arrays in their bits."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if hasattr(left, "__dataclass_fields__"):
        return all(_equal(value, getattr(right, name)) for name, value in vars(left).items())
    return bool(left == right)


@given(hashes, numbers, numbers, st.floats(0, 1e6, width=32), st.binary(), st.lists(steps()), st.binary())
def test_a_task_survives_encoding(
    sha256: bytes,
    number: int,
    step: int,
    seconds: float,
    agreement: bytes,
    missed: list[RoundSteps],
    state: bytes,
) -> None:
    rounds = b"".join(each.to_bytes() for each in missed)
    task = RoundTask(sha256, number, step, seconds, agreement, rounds, state)
    read = RoundTask.parse(task.to_bytes())
    assert read == task and all(map(_equal, read.missed_steps(), missed))


@given(answers)
def test_a_result_survives_encoding(answer: RoundResult) -> None:
    assert _equal(parse_reply(answer.to_bytes()), answer)


@given(st.text(st.characters(exclude_categories=["Cs"])) | st.just("no\nno \x1b[2J"))
def test_a_refusal_is_one_printable_line(reason: str) -> None:
    reply = parse_reply(TaskRefusal(reason).to_bytes())
    assert isinstance(reply, TaskRefusal) and "\n" not in reply.reason and "\x1b" not in reply.reason
    if reason.isprintable() and len(reason) < 100:
        assert reply.reason == reason


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error_with_a_reason(content: bytes) -> None:
    for parse in (RoundTask.parse, parse_reply):
        try:
            parse(content)
        except MessageError as error:
            assert str(error)


@given(answers, st.data())
def test_a_message_of_wrong_length_is_refused(answer: RoundResult, data: st.DataObject) -> None:
    content = answer.to_bytes()
    end = data.draw(st.integers(0, len(content) - 1))
    for other in (content[:end], content + b"\x00"):
        with raises(MessageError, "message-damaged", "message-of-other-version"):
            parse_reply(other)


@given(steps(), st.integers(0, 100))
def test_steps_survive_the_journal(steps: RoundSteps, number: int) -> None:
    records = steps.records(number, 7, steps.projected_gradients.shape[1:])
    assert all(record["seed"] == 7 and record["round"] == number for record in records)
    assert _equal(RoundSteps.of_records(records), steps)


def test_sixteen_projected_gradients_take_less_than_400_bytes_in_flower() -> None:
    one = np.ones(1, np.float32)
    answer = RoundResult(bytes(16), 9, 90, 4, 1.5, one, np.ones(16, np.float32))
    assert len(answer.to_bytes()) == 110
    assert len(ConfigRecord({"answer": answer.to_bytes()}).deflate()) < 400


def test_a_thousand_missed_steps_take_less_than_90_kilobytes() -> None:
    one = np.ones(1, np.float32)
    assert int(np.prod(Plan().shape)) == 16
    rounds = b"".join(
        RoundSteps(step, one, one, np.ones((1, 16), np.float32)).to_bytes() for step in range(1000)
    )
    assert len(RoundTask(bytes(16), 1000, 1000, 60.0, missed=rounds).to_bytes()) < 90_000


@pytest.mark.parametrize("parse", [RoundTask.parse, parse_reply])
def test_a_message_of_another_version_is_refused(parse: Any) -> None:
    with raises(MessageError, "message-of-other-version", containing="form 1"):
        parse(b"\x01\x00" + bytes(100))
