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
from numpy.typing import NDArray

from device_runner.fleet.agreement import MOST_AGREEMENT_BYTES
from prge.engine import FloatArray
from prge.errors import PrgeError, printable, shortened
from prge.files.journal import Record

Places = NDArray[np.uint32]
FORM = 1
MOST_BYTES = 1 << 30
MOST_SEEDS = 1 << 20
_LONGEST_TEXT = 500
_TASK, _DONE, _REFUSED, _BEHIND = range(4)


class MessageError(PrgeError):
    """Bytes that are no message of this version."""


class RefusedError(PrgeError):
    """Why a device takes no part in a round, or why its answer doesn't count."""


@dataclass(frozen=True)
class Steps:
    """The steps that a round gave the common adapter, from the step `first` on; K of them.

    `seeds`: of the devices' own directions; empty where directions are common. `rates`, `losses`: f32 [K].
    `scalars`: f32 [K, devices or 1, scalars of a step].
    """

    first: int
    seeds: tuple[int, ...]
    rates: FloatArray
    losses: FloatArray
    scalars: FloatArray

    @property
    def size(self) -> int:
        """Bytes of the form that messages carry."""
        return 16 + 8 * len(self.seeds) + 4 * (len(self.rates) + len(self.losses) + self.scalars.size)

    def to_bytes(self) -> bytes:
        """The form that messages carry."""
        count, _, size = self.scalars.shape
        head = struct.pack("<IIII", self.first, len(self.seeds), count, size)
        seeds = np.array(self.seeds, "<u8").tobytes()
        return head + seeds + b"".join(map(_floats, (self.rates, self.losses, self.scalars)))

    @classmethod
    def read(cls, reader: Reader, shape: tuple[int, int] | None = None) -> Steps:
        """Inverse of `to_bytes`; nothing of another `shape`, steps and scalars of a step, is read."""
        first, devices, count, size = reader.unpack("<IIII")
        if devices > MOST_SEEDS:
            raise MessageError(f"a round of {devices} devices")
        if shape not in (None, (count, size)):
            raise MessageError(f"a round of {count} steps of {size} scalars; the plan has {shape}")
        seeds = tuple(np.frombuffer(reader.take(8 * devices), "<u8").tolist())
        rates, losses = reader.floats(count), reader.floats(count)
        scalars = reader.floats(count * max(devices, 1) * size)
        return cls(first, seeds, rates, losses, scalars.reshape(count, max(devices, 1), size))

    def records(self, number: int, seed: int, shape: Sequence[int]) -> list[Record]:
        """The journal's records of the steps, as `prge run` writes them.

        Args:
            number: of the round.
            seed: of common directions.
            shape: of a step's scalars.
        """
        own = {"seeds": list(self.seeds)} if self.seeds else {}
        whole = (len(self.seeds), *shape) if self.seeds else tuple(shape)
        return [
            {
                "kind": "step",
                "step": self.first + index,
                "round": number,
                "seed": seed,
                **own,
                "loss": float(self.losses[index]),
                "learning_rate": float(self.rates[index]),
                "scalars": self.scalars[index].reshape(whole).tolist(),
            }
            for index in range(len(self.rates))
        ]

    @classmethod
    def of_records(cls, records: Sequence[Record]) -> Steps:
        """Inverse of `records`, for the records of one round."""
        seeds = tuple(records[0].get("seeds", ()))
        scalars = np.array([record["scalars"] for record in records], np.float32)
        return cls(
            records[0]["step"],
            seeds,
            np.array([record["learning_rate"] for record in records], np.float32),
            np.array([record["loss"] for record in records], np.float32),
            scalars.reshape(len(records), max(len(seeds), 1), -1),
        )


@dataclass(frozen=True)
class PackedSteps:
    """Rounds' steps as a message has them: each is read when it is its turn, and dropped."""

    content: bytes
    rounds: int

    def __len__(self) -> int:
        return self.rounds

    def __iter__(self) -> Iterator[Steps]:
        return self._read()

    def read(self, steps: int, scalars: int) -> Iterator[Steps]:
        """The rounds in their order; raises MessageError at one with other counts, before it is read."""
        return self._read((steps, scalars))

    def _read(self, shape: tuple[int, int] | None = None) -> Iterator[Steps]:
        reader = Reader(self.content)
        for _ in range(self.rounds):
            yield Steps.read(reader, shape)
        reader.end()


@dataclass(frozen=True)
class Task:
    """What a device is asked to do, and what it has to know first.

    `agreement`: its content, or b"" for one that the device knows; `sha256` its hash. `step`: where the round
    begins. `missed`: rounds that bring the device there; or `state`, arrays as safetensors, of that step.
    `seconds`: how long an answer is waited for.
    """

    sha256: bytes
    number: int
    step: int
    seconds: float
    agreement: bytes = b""
    missed: tuple[Steps, ...] | PackedSteps = ()
    state: bytes = b""

    def missed_by(self, steps: int, scalars: int) -> Iterator[Steps]:
        """The missed rounds of a plan, of so many steps and scalars of a step; see PackedSteps."""
        return self.missed.read(steps, scalars) if isinstance(self.missed, PackedSteps) else iter(self.missed)

    def to_bytes(self) -> bytes:
        """The message."""
        missed = b"".join(round_.to_bytes() for round_ in self.missed)
        sizes = (len(self.agreement), len(self.missed), len(self.state))
        head = struct.pack(
            "<BB16sIIfIII", FORM, _TASK, self.sha256, self.number, self.step, self.seconds, *sizes
        )
        return head + self.agreement + missed + self.state

    @classmethod
    def parse(cls, content: bytes) -> Task:
        """Inverse of `to_bytes`.

        Raises:
            MessageError: it is no task.
        """
        reader = Reader(content)
        reader.expect(_TASK)
        sha256, number, step, seconds, agreement, missed, state = reader.unpack("<16sIIfIII")
        if agreement > MOST_AGREEMENT_BYTES or not 0 <= seconds < 1e9:
            raise MessageError("a task that no server writes")
        text = reader.take(agreement)
        packed = PackedSteps(reader.take(max(0, reader.left - state)), missed)
        return cls(sha256, number, step, seconds, text, packed, reader.take(state))


@dataclass(frozen=True)
class Answer:
    """What a device learnt in a round, from the common adapter of step `step` on.

    `seed`: of its directions. `losses`: f32 [K]. `values`: its scalars f32 [K * scalars of a step], or the
    change of its adapter, f32 [size] or as many as `places` names. `epsilon`: what it has spent in all.
    """

    sha256: bytes
    number: int
    step: int
    seed: int
    examples: int
    epsilon: float
    losses: FloatArray
    values: FloatArray
    places: Places | None = None

    def to_bytes(self) -> bytes:
        """The message."""
        places = b"" if self.places is None else self.places.astype("<u4").tobytes()
        head = struct.pack(
            "<BB16sIIQIfIII",
            *(FORM, _DONE, self.sha256, self.number, self.step, self.seed, self.examples, self.epsilon),
            *(len(self.losses), len(self.values), len(places) // 4),
        )
        return head + _floats(self.losses) + _floats(self.values) + places


@dataclass(frozen=True)
class Refusal:
    """Why a device takes no part in a round."""

    reason: str

    def to_bytes(self) -> bytes:
        """The message."""
        return struct.pack("<BB", FORM, _REFUSED) + shortened(self.reason, _LONGEST_TEXT).encode()


@dataclass(frozen=True)
class Behind:
    """A device has another step than the server thought: `step`, or -1 with nothing at all."""

    step: int

    def to_bytes(self) -> bytes:
        """The message."""
        return struct.pack("<BBq", FORM, _BEHIND, self.step)


def parse_answer(content: bytes) -> Answer | Refusal | Behind:
    """What a device said.

    Raises:
        MessageError: nothing that a device says.
    """
    reader = Reader(content)
    match reader.kind:
        case _kind if _kind == _REFUSED:
            reader.expect(_REFUSED)
            text = reader.take(min(reader.left, 4 * _LONGEST_TEXT)).decode(errors="replace")
            return Refusal(shortened(printable(text.replace("\n", " ")), _LONGEST_TEXT))
        case _kind if _kind == _BEHIND:
            reader.expect(_BEHIND)
            (step,) = reader.unpack("<q")
            reader.end()
            return Behind(step)
    reader.expect(_DONE)
    sha256, number, step, seed, examples, epsilon, steps, values, places = reader.unpack("<16sIIQIfIII")
    answer = Answer(
        *(sha256, number, step, seed, examples, epsilon),
        reader.floats(steps),
        reader.floats(values),
        np.frombuffer(reader.take(4 * places), "<u4").astype(np.uint32) if places else None,
    )
    reader.end()
    return answer


class Reader:
    """Takes a message apart from its beginning; raises MessageError where it ends too early or too late."""

    def __init__(self, content: bytes) -> None:
        if not isinstance(content, bytes) or len(content) > MOST_BYTES:
            raise MessageError("a message that is no bytes, or too many")
        self._content = memoryview(content)
        self._at = 0

    @property
    def kind(self) -> int:
        """The byte that says what the message is; -1 where there is none."""
        return self._content[1] if len(self._content) > 1 else -1

    @property
    def left(self) -> int:
        """Bytes that are not taken yet."""
        return len(self._content) - self._at

    def expect(self, kind: int) -> None:
        """Take the first two bytes."""
        form, found = self.unpack("<BB")
        if form != FORM:
            raise MessageError(
                f"a message of form {form}", remedy="use the same version of prge on both sides"
            )
        if found != kind:
            raise MessageError(f"a message of kind {found}, not {kind}")

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size > self.left:
            raise MessageError(f"a message that ends early: {self.left} bytes where {size} must be")
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
            raise MessageError(f"a message with {self.left} bytes too many")


def _floats(values: FloatArray) -> bytes:
    return values.astype("<f4").tobytes()
