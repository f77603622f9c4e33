"""The description of a model that engines and drivers share: its readout, sizes and adapted layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from prge.errors import ConfigError, format_value

READOUTS = ("logprobs", "pooled")
# Far beyond any model: sizes from a manifest are checked before anything of that size is allocated.
LARGEST_SIZE = 1 << 24
MAX_MODULES = 10_000
MAX_TRAINED = 1 << 32


@dataclass(frozen=True)
class Matrix:
    """A trained matrix of an adapted module, f32 [rank, width]: `lora_a` or `lora_b`.

    Attributes:
        letter: `a` or `b`.
        module: last part of the names of inputs and outputs: the module's name in calls, its index in
            programs.
        rank: rank of the adapter.
        width: number of the module's input features (`lora_a`) or output features (`lora_b`).
    """

    letter: Literal["a", "b"]
    module: str
    rank: int
    width: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rank * self.width

    @property
    def name(self) -> str:
        """Name of the input for the matrix."""
        return f"lora_{self.letter}.{self.module}"

    @property
    def u(self) -> str:
        """Name of the input for the factors u of its directions u v^T."""
        return self._factor_name("u")

    @property
    def v(self) -> str:
        """Name of the input for the factors v of its directions u v^T."""
        return self._factor_name("v")

    @property
    def gradient(self) -> str:
        """Name of the output for the gradient with respect to the matrix."""
        return f"grad_lora_{self.letter}.{self.module}"

    def _factor_name(self, factor: str) -> str:
        return f"{factor}{'_a' if self.letter == 'a' else ''}.{self.module}"


@dataclass(frozen=True)
class AdaptedModule:
    """A linear layer with an adapter.

    Attributes:
        name: path of the layer in the transformers model.
        rank: rank of the adapter.
        in_features: number of the layer's input features.
        out_features: number of the layer's output features.
        trains_a: whether `lora_a` is trained, too (LoRA); LoRA-FA trains only `lora_b`.
    """

    name: str
    rank: int
    in_features: int
    out_features: int
    trains_a: bool = False

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The trained matrices, `lora_a` first."""
        return self.matrices_of(self.name)

    def matrices_of(self, module: str) -> tuple[Matrix, ...]:
        """Return the trained matrices with `module` as the last part of their names, `lora_a` first."""
        lora_b = Matrix("b", module, self.rank, self.out_features)
        return (Matrix("a", module, self.rank, self.in_features), lora_b) if self.trains_a else (lora_b,)


def matrices(modules: Iterable[AdaptedModule]) -> tuple[Matrix, ...]:
    """Return the trained matrices of modules, in the order of the adapter's values."""
    return tuple(matrix for module in modules for matrix in module.matrices)


@dataclass(frozen=True)
class ModelSpec:
    """What a caller of an engine needs to know about its model.

    Attributes:
        readout: `logprobs` for a decoder, `pooled` for an encoder, whose classification head isn't part of
            the engine.
        width: width of pooled states.
        vocabulary_size: token ids are less than this.
        sequence_length: maximum number of tokens in a sequence.
        modules: the adapted layers; their `alpha` is part of the frozen `lora_a`.
        max_branched: maximum number of tokens in a sequence with branches; 0: the model takes none.

    Raises:
        ConfigError: a size is out of bounds.
    """

    readout: str
    width: int
    vocabulary_size: int
    sequence_length: int
    modules: tuple[AdaptedModule, ...]
    max_branched: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {format_value(size)}, must be {least} to {LARGEST_SIZE}"
            for name, least in (("width", 0), ("vocabulary_size", 1), ("sequence_length", 1))
            if not least <= (size := getattr(self, name)) <= LARGEST_SIZE
        ]
        if self.readout not in READOUTS:
            problems.append(f"readout is {format_value(self.readout)}, must be one of {', '.join(READOUTS)}")
        if self.is_encoder and self.width < 1:
            problems.append(f"width is {self.width}, a pooled readout needs at least 1")
        if not self.modules:
            problems.append("modules is empty: there is nothing to train")
        if len(self.modules) > MAX_MODULES or len({m.name for m in self.modules}) < len(self.modules):
            problems.append(f"modules are {len(self.modules)}, must be at most {MAX_MODULES} different ones")
        problems += [
            f"the module {format_value(module.name)} has rank {format_value(module.rank)} and features "
            f"{format_value(module.in_features)} to {format_value(module.out_features)}, must be 1 to "
            f"{LARGEST_SIZE}"
            for module in self.modules
            if not all(1 <= n <= LARGEST_SIZE for n in (module.rank, module.in_features, module.out_features))
        ]
        trained = sum(matrix.size for matrix in matrices(self.modules))
        if not problems and trained > MAX_TRAINED:
            problems.append(f"the adapter has {trained} numbers, must have at most {MAX_TRAINED}")
        if problems:
            raise ConfigError("The sizes of the model can't be used:", problems, code="model-sizes")

    @property
    def is_encoder(self) -> bool:
        """Whether outputs are pooled states instead of log-probabilities."""
        return self.readout == "pooled"
