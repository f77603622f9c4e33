"""What a server and a device tell each other, as bytes; scalars are 4 bytes each.

    Task     server -> device   the agreement, what the device missed, which round
    Answer   device -> server   scalars of its steps, or the change of its adapter, or why not

A message is a byte for its form and one for what it is, a struct, then arrays, all little-endian. Reading
one checks every length: what comes from elsewhere makes an error with a reason, never anything else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from device_runner.fleet.agreement import MOST_AGREEMENT_BYTES
from prge.engine import FloatArray
from prge.errors import PrgeError, printable, shortened
from prge.files.journal import Record

FORM = 2
MOST_BYTES = 1 << 30
_LONGEST_TEXT = 500
_TASK, _DONE, _REFUSED = range(3)
_STEPS_HEAD, _TASK_HEAD, _ANSWER_HEAD = "<III", "<16sIIfIII", "<16sIIIfII"


class MessageError(PrgeError):
    """Bytes that are no message of this version."""


class RefusedError(PrgeError):
    """Why a device takes no part in a round, or why its answer doesn't count."""


@dataclass(frozen=True)
class Steps:
    """The steps that a round gave the common adapter, from the step `first` on; K of them.

    `rates`, `losses`: f32 [K]. `scalars`: f32 [K, scalars of a step].
    """

    first: int
    rates: FloatArray
    losses: FloatArray
    scalars: FloatArray

    def to_bytes(self) -> bytes:
        """The form that messages carry."""
        head = struct.pack(_STEPS_HEAD, self.first, *self.scalars.shape)
        return head + b"".join(map(_floats, (self.rates, self.losses, self.scalars)))

    @classmethod
    def read(cls, reader: Reader, shape: tuple[int, int] | None = None) -> Steps:
        """Inverse of `to_bytes`; nothing of another `shape`, steps and scalars of a step, is read."""
        first, count, size = reader.unpack(_STEPS_HEAD)
        if shape not in (None, (count, size)):
            raise MessageError(
                f"a round of {count} steps of {size} scalars; the plan has {shape}",
                code="steps-of-other-shape",
            )
        rates, losses = reader.floats(count), reader.floats(count)
        return cls(first, rates, losses, reader.floats(count * size).reshape(count, size))

    def records(self, number: int, seed: int, shape: Sequence[int]) -> list[Record]:
        """The journal's records of the steps, as `prge run` writes them.

        Args:
            number: of the round.
            seed: of directions.
            shape: of a step's scalars.
        """
        return [
            {
                "kind": "step",
                "step": self.first + index,
                "round": number,
                "seed": seed,
                "loss": float(self.losses[index]),
                "learning_rate": float(self.rates[index]),
                "scalars": self.scalars[index].reshape(tuple(shape)).tolist(),
            }
            for index in range(len(self.rates))
        ]

    @classmethod
    def of_records(cls, records: Sequence[Record]) -> Steps:
        """Inverse of `records`, for the records of one round."""
        rates, losses, scalars = (
            np.array([record[name] for record in records], np.float32)
            for name in ("learning_rate", "loss", "scalars")
        )
        return cls(records[0]["step"], rates, losses, scalars.reshape(len(records), -1))


@dataclass(frozen=True)
class Task:
    """What a device is asked to do, and what it has to know first.

    `agreement`: its content, or b"" for one that the device knows; `sha256` its hash. `step`: where the round
    begins. `missed`: the bytes of rounds that bring the device there, one after another; or `state`, arrays
    as safetensors, of that step. `seconds`: how long an answer is waited for.
    """

    sha256: bytes
    number: int
    step: int
    seconds: float
    agreement: bytes = b""
    missed: bytes = b""
    state: bytes = b""

    def missed_steps(self, shape: tuple[int, int] | None = None) -> Iterator[Steps]:
        """The missed rounds, each read when it is its turn; raises MessageError at one of another `shape`."""
        reader = Reader(self.missed)
        while reader.left:
            yield Steps.read(reader, shape)

    def to_bytes(self) -> bytes:
        """The message."""
        parts = (self.agreement, self.missed, self.state)
        fields = (self.sha256, self.number, self.step, self.seconds, *map(len, parts))
        return _head(_TASK) + struct.pack(_TASK_HEAD, *fields) + b"".join(parts)

    @classmethod
    def parse(cls, content: bytes) -> Task:
        """Inverse of `to_bytes`.

        Raises:
            MessageError: it is no task.
        """
        reader = Reader(content)
        if (found := reader.begin()) != _TASK:
            raise MessageError(f"a message of type {found}, not a task", code="message-of-other-type")
        sha256, number, step, seconds, *sizes = reader.unpack(_TASK_HEAD)
        if sizes[0] > MOST_AGREEMENT_BYTES or not 0 <= seconds < 1e9:
            raise MessageError("a task that no server writes", code="message-damaged")
        task = cls(sha256, number, step, seconds, *map(reader.take, sizes))
        reader.end()
        return task


@dataclass(frozen=True)
class Answer:
    """What a device learnt in a round, from the common adapter of step `step` on.

    `losses`: f32 [K]. `values`: its scalars f32 [K * scalars of a step], or the change of its adapter, f32
    [size]. `privacy_epsilon`: what it has spent in all.
    """

    sha256: bytes
    number: int
    step: int
    examples: int
    privacy_epsilon: float
    losses: FloatArray
    values: FloatArray

    def to_bytes(self) -> bytes:
        """The message."""
        fields = (self.sha256, self.number, self.step, self.examples, self.privacy_epsilon)
        head = struct.pack(_ANSWER_HEAD, *fields, len(self.losses), len(self.values))
        return _head(_DONE) + head + _floats(self.losses) + _floats(self.values)

    @classmethod
    def read(cls, reader: Reader) -> Answer:
        """Inverse of `to_bytes`, after what the message is."""
        sha256, number, step, examples, epsilon, losses, values = reader.unpack(_ANSWER_HEAD)
        return cls(sha256, number, step, examples, epsilon, reader.floats(losses), reader.floats(values))


@dataclass(frozen=True)
class Refusal:
    """Why a device takes no part in a round."""

    reason: str

    def to_bytes(self) -> bytes:
        """The message."""
        return _head(_REFUSED) + shortened(self.reason, _LONGEST_TEXT).encode()

    @classmethod
    def read(cls, reader: Reader) -> Refusal:
        """A reason of one printable line, cut to its most."""
        text = reader.take(reader.left)[: 4 * _LONGEST_TEXT].decode(errors="replace")
        return cls(shortened(printable(text.replace("\n", " ")), _LONGEST_TEXT))


def parse_answer(content: bytes) -> Answer | Refusal:
    """What a device said.

    Raises:
        MessageError: nothing that a device says.
    """
    reader = Reader(content)
    if (found := reader.begin()) not in (_DONE, _REFUSED):
        raise MessageError(f"a message of type {found}, not an answer", code="message-of-other-type")
    said: Answer | Refusal = Answer.read(reader) if found == _DONE else Refusal.read(reader)
    reader.end()
    return said


class Reader:
    """Takes a message apart from its beginning; raises MessageError where it ends too early or too late."""

    def __init__(self, content: bytes) -> None:
        if not isinstance(content, bytes) or len(content) > MOST_BYTES:
            raise MessageError("a message that is no bytes, or too many", code="message-damaged")
        self._content = memoryview(content)
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that are not taken yet."""
        return len(self._content) - self._at

    def begin(self) -> int:
        """Take the first two bytes; what the message is."""
        form, found = self.unpack("<BB")
        if form != FORM:
            raise MessageError(
                f"a message of form {form}, this version of prge speaks form {FORM}",
                remedy="use the same version of prge on both sides",
                code="message-of-other-version",
            )
        return int(found)

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size > self.left:
            raise MessageError(
                f"a message that ends early: {self.left} bytes where {size} must be", code="message-damaged"
            )
        self._at += size
        return bytes(self._content[self._at - size : self._at])

    def unpack(self, form: str) -> tuple[Any, ...]:
        """The next fields."""
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def floats(self, count: int) -> FloatArray:
        """The next f32 [count]."""
        return np.frombuffer(self.take(4 * count), "<f4").astype(np.float32)

    def end(self) -> None:
        """Nothing may follow."""
        if self.left:
            raise MessageError(f"a message with {self.left} bytes too many", code="message-damaged")


def _head(what: int) -> bytes:
    return struct.pack("<BB", FORM, what)


def _floats(values: FloatArray) -> bytes:
    return values.astype("<f4").tobytes()
