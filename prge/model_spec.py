"""What both sides know of a model: how it is read, its sizes, and its adapted layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from prge.errors import ConfigError, shown

READOUTS = ("logprobs", "pooled")
# Far beyond any model; what a manifest asks for is checked before it is allocated.
LARGEST_SIZE = 1 << 24
MOST_MODULES = 10_000
MOST_TRAINED = 1 << 32


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
class ModelSpec:
    """What a caller of an engine must know of its model.

    Attributes:
        readout: `logprobs`, of a decoder's vocabulary, or `pooled`, an encoder's states; the classification
            head of an encoder belongs to the driver.
        width: of pooled states.
        vocabulary_size: tokens are 0 to this, exclusive.
        sequence_length: most tokens of a sequence.
        modules: the adapted layers; `alpha` is folded into their frozen `lora_a`.

    Raises:
        ConfigError: sizes that no model has.
    """

    readout: str
    width: int
    vocabulary_size: int
    sequence_length: int
    modules: tuple[AdaptedModule, ...]

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {shown(size)}, must be {least} to {LARGEST_SIZE}"
            for name, least in (("width", 0), ("vocabulary_size", 1), ("sequence_length", 1))
            if not least <= (size := getattr(self, name)) <= LARGEST_SIZE
        ]
        if self.readout not in READOUTS:
            problems.append(f"readout is {shown(self.readout)}, must be one of {', '.join(READOUTS)}")
        if self.is_encoder and self.width < 1:
            problems.append(f"width is {self.width}, a pooled readout needs at least 1")
        if not self.modules:
            problems.append("modules is empty: there is nothing to train")
        if len(self.modules) > MOST_MODULES or len({m.name for m in self.modules}) < len(self.modules):
            problems.append(f"modules are {len(self.modules)}, must be at most {MOST_MODULES} different ones")
        problems += [
            f"the module {shown(module.name)} has rank {shown(module.rank)} and features "
            f"{shown(module.in_features)} to {shown(module.out_features)}, must be 1 to {LARGEST_SIZE}"
            for module in self.modules
            if not all(1 <= n <= LARGEST_SIZE for n in (module.rank, module.in_features, module.out_features))
        ]
        trained = sum(matrix.size for matrix in matrices(self.modules))
        if not problems and trained > MOST_TRAINED:
            problems.append(f"the adapter has {trained} numbers, must have at most {MOST_TRAINED}")
        if problems:
            raise ConfigError("the sizes of the model can't be used:", problems, code="model-sizes")

    @property
    def is_encoder(self) -> bool:
        """Whether outputs are pooled states instead of log-probabilities."""
        return self.readout == "pooled"
