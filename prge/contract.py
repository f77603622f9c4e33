"""The contract of an engine: what its calls take and answer, and the adapted modules.

A stack call computes `copies x batch_size` rows, copy by copy:

    row = copy * batch_size + example          rows = copies * batch_size

    tokens          i64 [rows, sequence_length]           right-padded
    attention_mask  i64 [rows, sequence_length]           encoders only
    positions       i64 [rows, positions]                 decoders only: where to read
    targets         i64 [rows, positions]                 decoders only: what to read
    lora_b.<module> f32 [copies, rank, out_features]      one per adapted module
    lora_a.<module> f32 [copies, rank, in_features]       the same, where LoRA trains both matrices

    logprobs        f32 [rows, positions]                 decoders: log p(target | tokens up to position)
    pooled          f32 [rows, width]                     encoders

A tangent call computes the `batch_size` rows once, and `queries` directional derivatives of each beside it,
exact ones. Its rows are those of one copy, and it has

    lora_b.<module> f32 [rank, out_features]
    u.<module>      f32 [queries, rows, rank]             the direction of a query and row in this matrix
    v.<module>      f32 [queries, rows, out_features]     is the product u v^T
    lora_a.<module> f32 [rank, in_features]               with u_a.<module>, v_a.<module> in the same way

    logprobs, dlogprobs     f32 [rows, positions], [queries, rows, positions]
    pooled, dpooled         f32 [rows, width], [queries, rows, width]

A `back` call computes the `batch_size` rows once, and takes the slope of a loss by what it answers back to
the adapter, with its matrices as those of a tangent call; see prge.engine.Engine.gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from prge.errors import ConfigError, shown

STACK, TANGENT, BACK = STEP_ROLES = ("stack", "tangent", "back")
READOUTS = ("logprobs", "pooled")
# Far beyond any model; what a manifest asks for is checked before it is allocated.
LARGEST_SIZE = 1 << 24
MOST_MODULES = 10_000
MOST_CALL_BYTES = 1 << 36
# A way back counts as two forwards wherever rows are compared, though past frozen weights it costs about one.
ROWS_OF_A_WAY_BACK = 3


_SIZES = "copies batch_size sequence_length positions width vocabulary_size queries".split()


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype name and shape of one input or output of a call."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor's values."""
        return math.prod(self.shape) * (8 if self.dtype == "int64" else 4)


@dataclass(frozen=True)
class Matrix:
    """A trained matrix f32 [rank, width] of an adapted module: `lora_a`, of its inputs, or `lora_b`.

    `of` is what names of inputs and answers end in: the module's name in calls, its number in programs.
    """

    letter: Literal["a", "b"]
    of: str
    rank: int
    width: int

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return self.rank * self.width

    @property
    def name(self) -> str:
        """Name of the input that carries it."""
        return f"lora_{self.letter}.{self.of}"

    @property
    def u(self) -> str:
        """Name of the input that carries its directions' first factors."""
        return self._named("u")

    @property
    def v(self) -> str:
        """Name of the input that carries the second factors."""
        return self._named("v")

    @property
    def gradient(self) -> str:
        """Name of a program's answer of the slope by it."""
        return self._named("gradient")

    def _named(self, word: str) -> str:
        return f"{word}{'_a' if self.letter == 'a' else ''}.{self.of}"


@dataclass(frozen=True)
class AdaptedModule:
    """One linear layer with an adapter; `name` is its path in the transformers model.

    LoRA-FA trains `lora_b` alone, LoRA also what comes before it: `trains_a`.
    """

    name: str
    rank: int
    in_features: int
    out_features: int
    trains_a: bool = False

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The trained ones, `lora_a` first."""
        return self.matrices_of(self.name)

    def matrices_of(self, of: str) -> tuple[Matrix, ...]:
        """The same whose names end in `of`."""
        lora_b = Matrix("b", of, self.rank, self.out_features)
        return (Matrix("a", of, self.rank, self.in_features), lora_b) if self.trains_a else (lora_b,)


def matrices(modules: Iterable[AdaptedModule]) -> tuple[Matrix, ...]:
    """The trained matrices of modules, in the order of the adapter's values."""
    return tuple(matrix for module in modules for matrix in module.matrices)


@dataclass(frozen=True)
class Contract:
    """Everything that a driver must know to call an engine; a run chooses its sizes.

    `role` is what its calls compute: `stack`, `tangent` or `back`.
    `readout` is `logprobs` (over the vocabulary) or `pooled` (an encoder's states; the head lives in the
    driver).
    `alpha` is already folded into the frozen `lora_a`. A tangent call has one copy, a stack no queries.

    Raises:
        ConfigError: sizes that no call can have.
    """

    role: str
    readout: str
    copies: int
    batch_size: int
    sequence_length: int
    positions: int
    width: int
    vocabulary_size: int
    modules: tuple[AdaptedModule, ...]
    queries: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {shown(getattr(self, name))}, must be at least 1"
            for name in ("copies", "batch_size", "sequence_length", "vocabulary_size")
            if getattr(self, name) < 1
        ]
        if self.role not in STEP_ROLES:
            problems.append(f"role is {shown(self.role)}, this version knows {', '.join(STEP_ROLES)}")
        if self.is_tangent and self.queries < 1:
            problems.append(f"queries is {self.queries}, a tangent call needs at least 1")
        if self.role != STACK and self.copies != 1:
            problems.append(f"copies is {self.copies}, a {self.role} call has 1")
        if not self.is_tangent and self.queries:
            problems.append(f"queries is {self.queries}, a {self.role} call has 0")
        if self.readout not in READOUTS:
            problems.append(f"readout is {shown(self.readout)}, must be one of {', '.join(READOUTS)}")
        if self.readout == "pooled" and self.width < 1:
            problems.append(f"width is {self.width}, a pooled readout needs at least 1")
        if self.readout != "pooled" and self.positions < 1:
            problems.append(f"positions is {self.positions}, must be at least 1")
        if not self.modules:
            problems.append("modules is empty: there is nothing to train")
        problems = problems or self._size_problems()
        if problems:
            raise ConfigError(
                "the sizes of a call can't be used:",
                problems,
                remedy="choose fewer --queries or a smaller --batch-size",
            )

    def _size_problems(self) -> list[str]:
        """Sizes that no program has, found without making any tensor."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        problems = [
            f"{name} is {shown(size)}, must be at most {LARGEST_SIZE}"
            for name, size in sizes.items()
            if size > LARGEST_SIZE
        ]
        if len(self.modules) > MOST_MODULES or len({m.name for m in self.modules}) < len(self.modules):
            problems.append(f"modules are {len(self.modules)}, must be at most {MOST_MODULES} different ones")
        problems += [
            f"the module {shown(module.name)} has rank {shown(module.rank)} and features "
            f"{shown(module.in_features)} to {shown(module.out_features)}, must be 1 to {LARGEST_SIZE}"
            for module in self.modules
            if not all(1 <= n <= LARGEST_SIZE for n in (module.rank, module.in_features, module.out_features))
        ]
        if (
            not problems
            and (total := sum(spec.bytes for spec in (*self.inputs, *self.outputs))) > MOST_CALL_BYTES
        ):
            problems.append(f"inputs and outputs take {total} bytes, must be at most {MOST_CALL_BYTES}")
        return problems

    @property
    def rows(self) -> int:
        """Rows that one call answers: copies x batch_size."""
        return self.copies * self.batch_size

    @property
    def computed_rows(self) -> int:
        """Rows that one call pays for: a tangent of a row costs as much as a row, its way back as two."""
        return self.rows * (ROWS_OF_A_WAY_BACK if self.is_exact else 1 + self.queries)

    @property
    def is_tangent(self) -> bool:
        """Whether a call carries derivatives."""
        return self.role == TANGENT

    @property
    def is_exact(self) -> bool:
        """Whether a call computes the gradient of a loss."""
        return self.role == BACK

    @property
    def is_encoder(self) -> bool:
        """Whether a call returns pooled states instead of log-probabilities."""
        return self.readout == "pooled"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """A call's inputs in order."""
        tokens = TensorSpec("tokens", "int64", (self.rows, self.sequence_length))
        if self.is_encoder:
            first = [tokens, TensorSpec("attention_mask", "int64", tokens.shape)]
        else:
            read = (self.rows, self.positions)
            first = [tokens, *(TensorSpec(name, "int64", read) for name in ("positions", "targets"))]
        trained = matrices(self.modules)
        copies = (self.copies,) if self.role == STACK else ()
        adapter = [TensorSpec(each.name, "float32", (*copies, each.rank, each.width)) for each in trained]
        directions = [
            TensorSpec(name, "float32", (self.queries, self.rows, width))
            for each in trained
            for name, width in ((each.u, each.rank), (each.v, each.width))
            if self.is_tangent
        ]
        return (*first, *adapter, *directions)

    @property
    def answer(self) -> str:
        """Name of what a call answers; its tangents have a `d` before it."""
        return "pooled" if self.is_encoder else "logprobs"

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """A call's outputs in order."""
        width = self.width if self.is_encoder else self.positions
        answer = TensorSpec(self.answer, "float32", (self.rows, width))
        if not self.is_tangent:
            return (answer,)
        return (answer, TensorSpec("d" + self.answer, "float32", (self.queries, *answer.shape)))
