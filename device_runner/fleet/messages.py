"""Messages between a fleet's server and its devices, as bytes; a projected gradient takes 4 bytes.

    RoundTask     server -> device   the agreement, what the device missed, which round
    RoundResult   device -> server   projected gradients of the steps, or the change of the adapter
    TaskRefusal   device -> server   why the device takes no part

A message is one byte for the format version, one for its type, a struct, then arrays, all little-endian.
Reading a message checks every length: malformed bytes raise an error with a reason, and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from device_runner.fleet.agreement import MAX_AGREEMENT_BYTES
from prge.engine import FloatArray
from prge.errors import PrgeError, printable, shortened
from prge.formats.journal import Record

FORMAT_VERSION = 2
MAX_BYTES = 1 << 30
_LONGEST_TEXT = 500
_TASK, _DONE, _REFUSED = range(3)
_STEPS_HEAD, _TASK_HEAD, _ANSWER_HEAD = "<III", "<16sIIfIII", "<16sIIIfII"


class MessageError(PrgeError):
    """Bytes that are not a message of this version."""


class TaskRefusedError(PrgeError):
    """Why a device takes no part in a round, or why its result does not count."""


@dataclass(frozen=True)
class RoundSteps:
    """The K steps of the global adapter in one round.

    Attributes:
        first: number of the first step.
        rates: learning rates, f32 [K].
        losses: f32 [K].
        projected_gradients: f32 [K, projected gradients per step].
    """

    first: int
    rates: FloatArray
    losses: FloatArray
    projected_gradients: FloatArray

    def to_bytes(self) -> bytes:
        """Encode the steps for a message."""
        head = struct.pack(_STEPS_HEAD, self.first, *self.projected_gradients.shape)
        return head + b"".join(map(_encode_floats, (self.rates, self.losses, self.projected_gradients)))

    @classmethod
    def read(cls, reader: MessageReader, shape: tuple[int, int] | None = None) -> RoundSteps:
        """Decode what `to_bytes` encoded.

        Args:
            reader: a reader at the first byte of the steps.
            shape: number of steps and of projected gradients per step that the plan has; None: any.

        Raises:
            MessageError: the steps have another shape.
        """
        first, count, size = reader.unpack(_STEPS_HEAD)
        if shape not in (None, (count, size)):
            raise MessageError(
                f"a round of {count} steps of {size} projected gradients, but the plan has {shape}",
                code="steps-of-other-shape",
            )
        rates, losses = reader.read_floats(count), reader.read_floats(count)
        return cls(first, rates, losses, reader.read_floats(count * size).reshape(count, size))

    def records(self, number: int, seed: int, shape: Sequence[int]) -> list[Record]:
        """Return the steps as journal records, as `prge run` writes them.

        Args:
            number: the number of the round.
            seed: the seed of the directions.
            shape: the shape of a step's projected gradients.
        """
        return [
            {
                "type": "step",
                "step": self.first + index,
                "round": number,
                "seed": seed,
                "loss": float(self.losses[index]),
                "learning_rate": float(self.rates[index]),
                "projected_gradients": self.projected_gradients[index].reshape(tuple(shape)).tolist(),
            }
            for index in range(len(self.rates))
        ]

    @classmethod
    def of_records(cls, records: Sequence[Record]) -> RoundSteps:
        """Return the steps of one round from the journal's records; inverse of `records`."""
        rates, losses, gradients = (
            np.array([record[name] for record in records], np.float32)
            for name in ("learning_rate", "loss", "projected_gradients")
        )
        return cls(records[0]["step"], rates, losses, gradients.reshape(len(records), -1))


@dataclass(frozen=True)
class RoundTask:
    """What a device is asked to do, and the state that it needs for that.

    Attributes:
        sha256: hash of the agreement.
        number: the number of the round.
        step: the step at which the round begins.
        seconds: how long the server waits for a result.
        agreement: its content; empty if the device has it.
        missed: encoded steps of the rounds that the device missed, one after another.
        state: arrays of that step as safetensors; empty if the device can replay the missed rounds.
    """

    sha256: bytes
    number: int
    step: int
    seconds: float
    agreement: bytes = b""
    missed: bytes = b""
    state: bytes = b""

    def missed_steps(self, shape: tuple[int, int] | None = None) -> Iterator[RoundSteps]:
        """Iterate over the missed rounds, decoding each on demand; raises MessageError at another shape."""
        reader = MessageReader(self.missed)
        while reader.remaining:
            yield RoundSteps.read(reader, shape)

    def to_bytes(self) -> bytes:
        """Encode the task as a message."""
        parts = (self.agreement, self.missed, self.state)
        fields = (self.sha256, self.number, self.step, self.seconds, *map(len, parts))
        return _encode_header(_TASK) + struct.pack(_TASK_HEAD, *fields) + b"".join(parts)

    @classmethod
    def parse(cls, content: bytes) -> RoundTask:
        """Decode a task.

        Raises:
            MessageError: the bytes are not a task.
        """
        reader = MessageReader(content)
        if (message_type := reader.read_type()) != _TASK:
            raise MessageError(f"a message of type {message_type}, not a task", code="message-of-other-type")
        sha256, number, step, seconds, *sizes = reader.unpack(_TASK_HEAD)
        if sizes[0] > MAX_AGREEMENT_BYTES or not 0 <= seconds < 1e9:
            raise MessageError("a task with values out of bounds", code="message-damaged")
        task = cls(sha256, number, step, seconds, *map(reader.read_bytes, sizes))
        reader.expect_end()
        return task


@dataclass(frozen=True)
class RoundResult:
    """What a device computed in a round.

    Attributes:
        sha256: hash of the agreement.
        number: the number of the round.
        step: the step of the global adapter that the device started from.
        examples: the number of examples that its steps took.
        privacy_epsilon: what the device has spent so far, with this round.
        losses: f32 [K].
        values: projected gradients, f32 [K * projected gradients per step], or the change of the adapter, f32
            [adapter size].
    """

    sha256: bytes
    number: int
    step: int
    examples: int
    privacy_epsilon: float
    losses: FloatArray
    values: FloatArray

    def to_bytes(self) -> bytes:
        """Encode the result as a message."""
        fields = (self.sha256, self.number, self.step, self.examples, self.privacy_epsilon)
        head = struct.pack(_ANSWER_HEAD, *fields, len(self.losses), len(self.values))
        return _encode_header(_DONE) + head + _encode_floats(self.losses) + _encode_floats(self.values)

    @classmethod
    def read(cls, reader: MessageReader) -> RoundResult:
        """Decode a result after its message type."""
        sha256, number, step, examples, epsilon, losses, values = reader.unpack(_ANSWER_HEAD)
        return cls(
            sha256, number, step, examples, epsilon, reader.read_floats(losses), reader.read_floats(values)
        )


@dataclass(frozen=True)
class TaskRefusal:
    """Why a device takes no part in a round."""

    reason: str

    def to_bytes(self) -> bytes:
        """Encode the refusal as a message."""
        return _encode_header(_REFUSED) + shortened(self.reason, _LONGEST_TEXT).encode()

    @classmethod
    def read(cls, reader: MessageReader) -> TaskRefusal:
        """Decode a refusal after its message type; the reason becomes one short printable line."""
        text = reader.read_bytes(reader.remaining)[: 4 * _LONGEST_TEXT].decode(errors="replace")
        return cls(shortened(printable(text.replace("\n", " ")), _LONGEST_TEXT))


def parse_reply(content: bytes) -> RoundResult | TaskRefusal:
    """Decode a device's message.

    Raises:
        MessageError: the bytes are neither a result nor a refusal.
    """
    reader = MessageReader(content)
    if (message_type := reader.read_type()) not in (_DONE, _REFUSED):
        raise MessageError(f"a message of type {message_type}, not a reply", code="message-of-other-type")
    reply: RoundResult | TaskRefusal = (
        RoundResult.read(reader) if message_type == _DONE else TaskRefusal.read(reader)
    )
    reader.expect_end()
    return reply


class MessageReader:
    """Decodes a message from its first byte; raises MessageError if the message is too short or too long."""

    def __init__(self, content: bytes) -> None:
        if not isinstance(content, bytes) or len(content) > MAX_BYTES:
            raise MessageError("a message that is not bytes, or is too large", code="message-damaged")
        self._content = memoryview(content)
        self._offset = 0

    @property
    def remaining(self) -> int:
        """Number of bytes that were not read yet."""
        return len(self._content) - self._offset

    def read_type(self) -> int:
        """Check the format version and return the message type."""
        version, message_type = self.unpack("<BB")
        if version != FORMAT_VERSION:
            raise MessageError(
                f"a message of form {version}, but this version of prge uses form {FORMAT_VERSION}",
                remedy="Use the same version of prge on both sides.",
                code="message-of-other-version",
            )
        return int(message_type)

    def read_bytes(self, size: int) -> bytes:
        """Read the next `size` bytes."""
        if size > self.remaining:
            raise MessageError(
                f"a message that ends early: {self.remaining} bytes instead of {size}", code="message-damaged"
            )
        self._offset += size
        return bytes(self._content[self._offset - size : self._offset])

    def unpack(self, form: str) -> tuple[Any, ...]:
        """Read the next fields of a struct format."""
        return struct.unpack(form, self.read_bytes(struct.calcsize(form)))

    def read_floats(self, count: int) -> FloatArray:
        """Read the next `count` float32 values, f32 [count]."""
        return np.frombuffer(self.read_bytes(4 * count), "<f4").astype(np.float32)

    def expect_end(self) -> None:
        """Check that nothing follows."""
        if self.remaining:
            raise MessageError(f"a message with {self.remaining} extra bytes", code="message-damaged")


def _encode_header(message_type: int) -> bytes:
    return struct.pack("<BB", FORMAT_VERSION, message_type)


def _encode_floats(values: FloatArray) -> bytes:
    return values.astype("<f4").tobytes()
