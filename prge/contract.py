"""The contract of a program: its kind, its named inputs and outputs, the adapted modules.

A P-RGE program runs `copies x batch_size` rows in one call, slot-major:

    row = copy * batch_size + example          rows = copies * batch_size

    tokens          i64 [rows, sequence_length]           right-padded
    attention_mask  i64 [rows, sequence_length]           encoders only
    positions       i64 [rows, positions]                 decoders only: where to read
    targets         i64 [rows, positions]                 decoders only: what to read
    lora_b.<module> f32 [copies, rank, out_features]      one per adapted module

    logprobs        f32 [rows, positions]                 decoders: log p(target | tokens up to position)
    pooled          f32 [rows, width]                     encoders

A tangent program runs the `batch_size` rows once and carries `queries` directional derivatives of each
beside it, exact ones. Its rows are those of one copy, and it has

    lora_b.<module> f32 [rank, out_features]
    u.<module>      f32 [queries, rows, rank]             the direction of a query and row in this module
    v.<module>      f32 [queries, rows, out_features]     is the product u v^T

    logprobs, dlogprobs     f32 [rows, positions], [queries, rows, positions]
    pooled, dpooled         f32 [rows, width], [queries, rows, width]

An exact program runs the `batch_size` rows once, and back. It answers what it read, and the gradient of a
loss that further inputs describe; prge/exact.py fills them. With candidates = rows * positions for a decoder,
or `classes` for an encoder:

    lora_b.<module> f32 [rank, out_features]
    weights         f32 [rows, positions]                 decoders only: of a slot in its candidate's score
    cells           i64 [rows, positions]                 decoders only: example * candidates + candidate
    heads           f32 [rows, classes, width]            encoders only: every row's classification head
    offsets         f32 [rows, candidates]                added to scores; ABSENT where no candidate is
    labels          f32 [rows, candidates]                weight of minus the score in the loss
    shares          f32 [rows, 1]                         weight of the scores' log-sum-exp in the loss

    logprobs or pooled      as above
    gradient.<module>       f32 [rank, out_features]

A P-RGE program with `shared_rows` takes the row of an example once for all its copies: `batch_size` rows of
tokens, attention_mask, positions and targets, and the outputs of `rows` rows. It can't score.

A program with a `cut` is the upper part of one of these. It takes in the place of the tokens what the lower
part, which no adapter changes, made of them. A trunk program is that lower part:

    trunk.<number>  f32 [batch_size, ...]                 in the trunk's outputs and the upper part's inputs

    tokens          i64 [batch_size, sequence_length]     the trunk's inputs
    attention_mask  i64 [batch_size, sequence_length]     encoders only; the upper part takes it too
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from prge.errors import BundleError, ConfigError, shown

FORMAT, CHAIN_FORMAT = 1, 2
LORA_B_PREFIX = "lora_b."
U_PREFIX, V_PREFIX = "u.", "v."
GRADIENT_PREFIX = "gradient."
TRUNK_PREFIX = "trunk."
KINDS = ("stack", "tangent", "exact", "trunk")
# A score beside which exp of this one is 0 in float32; finite, so that no sum makes a NaN of it.
ABSENT = -1e9
READOUTS = ("logprobs", "verbalizer", "pooled")
# Far beyond any model; what a manifest asks for is checked before it is allocated.
LARGEST_SIZE = 1 << 24
MOST_MODULES = 10_000
MOST_CALL_BYTES = 1 << 36


_SIZES = "copies batch_size sequence_length positions width vocabulary_size queries classes".split()


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype name and static shape of one program input or output."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor's values."""
        return math.prod(self.shape) * (8 if self.dtype == "int64" else 4)


@dataclass(frozen=True)
class AdaptedModule:
    """One linear layer with LoRA-FA on it; `name` is its path in the transformers model."""

    name: str
    rank: int
    in_features: int
    out_features: int

    @property
    def input_name(self) -> str:
        """Name of the program input that carries this module's `lora_b`."""
        return LORA_B_PREFIX + self.name


@dataclass(frozen=True)
class Contract:
    """Everything that a driver must know to call a program.

    `readout` is `logprobs` (over the vocabulary), `verbalizer` (over `label_tokens` only: targets are
    indices into that list) or `pooled` (an encoder's states; the head lives in the driver).
    `alpha` is already folded into the program's frozen `lora_a`. A tangent program has one copy, a stack
    program no queries of its own. `cut` is what crosses from a trunk to the program above it. `classes` is
    how many an encoder's head may have in an exact program. `by_run` says that a run chose the sizes.
    """

    kind: str
    readout: str
    copies: int
    batch_size: int
    sequence_length: int
    positions: int
    width: int
    vocabulary_size: int
    label_tokens: tuple[int, ...]
    modules: tuple[AdaptedModule, ...]
    queries: int = 0
    shared_rows: bool = False
    cut: tuple[TensorSpec, ...] = ()
    classes: int = 0
    by_run: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {shown(getattr(self, name))}, must be at least 1"
            for name in ("copies", "batch_size", "sequence_length", "vocabulary_size")
            if getattr(self, name) < 1
        ]
        if self.kind not in KINDS:
            problems.append(f"kind is {shown(self.kind)}, this version knows {', '.join(KINDS)}")
        if self.is_tangent and self.queries < 1:
            problems.append(f"queries is {self.queries}, a tangent program needs at least 1")
        if self.kind != "stack" and self.copies != 1:
            problems.append(f"copies is {self.copies}, a {self.kind} program has 1")
        if self.kind != "stack" and self.shared_rows:
            problems.append(f"shared_rows is true, a {self.kind} program has no copies to share rows")
        if self.kind == "trunk" and not self.cut:
            problems.append("cut is empty, a trunk program returns something")
        problems += [
            f"{spec.name} is {spec.dtype} {list(spec.shape)}, must be float32 of {self.batch_size} rows"
            for spec in self.cut
            if spec.dtype != "float32" or spec.shape[:1] != (self.batch_size,)
        ]
        if not self.is_tangent and self.queries:
            problems.append(f"queries is {self.queries}, a {self.kind} program has 0")
        if (self.kind == "exact" and self.is_encoder) != (self.classes > 0):
            problems.append(f"classes is {self.classes}, an exact program of an encoder alone has some")
        if self.readout not in READOUTS:
            problems.append(f"readout is {shown(self.readout)}, must be one of {', '.join(READOUTS)}")
        if self.readout == "pooled" and self.width < 1:
            problems.append(f"width is {self.width}, a pooled readout needs at least 1")
        if self.readout != "pooled" and self.positions < 1:
            problems.append(f"positions is {self.positions}, must be at least 1")
        if self.readout == "verbalizer" and not self.label_tokens:
            problems.append("label_tokens is empty, a verbalizer readout needs them")
        if not self.modules:
            problems.append("modules is empty: there is nothing to train")
        problems = problems or self._size_problems()
        if problems and self.by_run:
            raise ConfigError(
                "the sizes of a call can't be used:",
                problems,
                remedy="choose fewer --queries or a smaller --batch-size",
            )
        if problems:
            raise BundleError(
                "the manifest describes no program that can be run: " + "; ".join(problems),
                remedy="export the bundle again with this version of prge",
            )

    def _size_problems(self) -> list[str]:
        """Sizes that no program has, found without making any tensor."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        sizes |= {f"{spec.name}'s shape": size for spec in self.cut for size in spec.shape}
        problems = [
            f"{name} is {shown(size)}, must be at most {LARGEST_SIZE}"
            for name, size in sizes.items()
            if size > LARGEST_SIZE
        ]
        problems += [f"{spec.name} has shape {list(spec.shape)}" for spec in self.cut if min(spec.shape) < 1]
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
    def given_rows(self) -> int:
        """Rows of tokens that one call is given."""
        return self.batch_size if self.shared_rows else self.rows

    @property
    def computed_rows(self) -> int:
        """Rows that one call pays for: a tangent of a row costs as much as a row, so does its way back."""
        return self.rows * (2 if self.is_exact else 1 + self.queries)

    @property
    def is_tangent(self) -> bool:
        """Whether the program carries derivatives."""
        return self.kind == "tangent"

    @property
    def is_exact(self) -> bool:
        """Whether the program computes the gradient of a loss."""
        return self.kind == "exact"

    @property
    def candidates(self) -> int:
        """Scores of an example that the loss of an exact program has room for."""
        return self.classes or self.rows * self.positions

    @property
    def can_score(self) -> bool:
        """Whether every row that it returns can be another example."""
        return self.kind == "stack" and not self.shared_rows and not self.cut

    @property
    def is_encoder(self) -> bool:
        """Whether the program returns pooled states instead of log-probabilities."""
        return self.readout == "pooled"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The program's inputs in calling order."""
        rows = self.given_rows
        tokens = TensorSpec("tokens", "int64", (rows, self.sequence_length))
        first = (tokens,) if self.kind == "trunk" else self.cut or (tokens,)
        if self.is_encoder:
            rest = [TensorSpec("attention_mask", "int64", tokens.shape)]
        else:
            rest = [TensorSpec(name, "int64", (rows, self.positions)) for name in ("positions", "targets")]
        if self.kind == "trunk":
            return (*first, *rest) if self.is_encoder else first
        if self.kind == "stack":
            lora_b = [
                TensorSpec(module.input_name, "float32", (self.copies, module.rank, module.out_features))
                for module in self.modules
            ]
            return (*first, *rest, *lora_b)
        matrices = [TensorSpec(m.input_name, "float32", (m.rank, m.out_features)) for m in self.modules]
        if self.is_exact:
            return (*first, *rest, *matrices, *self._loss_inputs)
        return (
            *first,
            *rest,
            *matrices,
            *(
                TensorSpec(prefix + module.name, "float32", (self.queries, self.rows, width))
                for module in self.modules
                for prefix, width in ((U_PREFIX, module.rank), (V_PREFIX, module.out_features))
            ),
        )

    @property
    def _loss_inputs(self) -> tuple[TensorSpec, ...]:
        read = (self.rows, self.positions)
        if self.is_encoder:
            scoring = [TensorSpec("heads", "float32", (self.rows, self.classes, self.width))]
        else:
            scoring = [TensorSpec("weights", "float32", read), TensorSpec("cells", "int64", read)]
        table = (self.rows, self.candidates)
        return (
            *scoring,
            TensorSpec("offsets", "float32", table),
            TensorSpec("labels", "float32", table),
            TensorSpec("shares", "float32", (self.rows, 1)),
        )

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The program's outputs in order."""
        if self.kind == "trunk":
            return self.cut
        name, width = ("pooled", self.width) if self.is_encoder else ("logprobs", self.positions)
        answer = TensorSpec(name, "float32", (self.rows, width))
        if self.kind == "stack":
            return (answer,)
        if self.is_exact:
            gradients = (
                TensorSpec(GRADIENT_PREFIX + m.name, "float32", (m.rank, m.out_features))
                for m in self.modules
            )
            return (answer, *gradients)
        return (answer, TensorSpec("d" + name, "float32", (self.queries, *answer.shape)))

    def divided(self, cut: tuple[TensorSpec, ...]) -> tuple[Contract, Contract]:
        """The contracts of the trunk and of what is above it, when a program is cut there."""
        trunk = replace(self, kind="trunk", copies=1, queries=0, classes=0, shared_rows=False, cut=cut)
        return trunk, replace(self, cut=cut)

    @property
    def whole(self) -> Contract:
        """The contract of the program that was cut, which takes tokens."""
        return replace(self, cut=())

    def shortened(self, length: int, cut: tuple[TensorSpec, ...] = ()) -> Contract:
        """The contract of the same program for rows of `length` tokens; `cut` is what crosses then."""
        return replace(self, sequence_length=length, cut=cut if self.cut else ())

    def to_json(self) -> dict[str, Any]:
        """The manifest's `contract` block; inputs and outputs are written out for other readers."""
        block = asdict(self)
        del block["by_run"]
        block["inputs"] = [asdict(spec) for spec in self.inputs]
        block["outputs"] = [asdict(spec) for spec in self.outputs]
        return block

    @classmethod
    def from_json(cls, block: Mapping[str, Any]) -> Contract:
        """Read a manifest's `contract` block; raises BundleError on anything missing or of another type."""
        try:
            modules = tuple(
                AdaptedModule(str(m["name"]), int(m["rank"]), int(m["in_features"]), int(m["out_features"]))
                for m in block["modules"]
            )
            return cls(
                kind=str(block["kind"]),
                readout=str(block["readout"]),
                copies=int(block["copies"]),
                batch_size=int(block["batch_size"]),
                sequence_length=int(block["sequence_length"]),
                positions=int(block["positions"]),
                width=int(block["width"]),
                vocabulary_size=int(block["vocabulary_size"]),
                label_tokens=tuple(int(token) for token in block["label_tokens"]),
                modules=modules,
                queries=int(block["queries"]),
                shared_rows=bool(block.get("shared_rows", False)),
                cut=tensor_specs(block.get("cut", ())),
                classes=int(block.get("classes", 0)),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BundleError(
                f"the manifest's contract can't be read: {shown(error)}",
                remedy="export the bundle again with this version of prge",
            ) from None


def tensor_specs(blocks: Iterable[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    """Read specs as JSON has them; raises KeyError, TypeError or ValueError."""
    return tuple(
        TensorSpec(str(spec["name"]), str(spec["dtype"]), tuple(map(int, spec["shape"]))) for spec in blocks
    )
