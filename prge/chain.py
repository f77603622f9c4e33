"""A model as a chain: its blocks in order, the kinds whose programs compute them, and what these take.

    embedding   tokens -> state        block   state -> state        head   state -> logprobs

A program has a method for each role of its kind, whose sizes a call chooses:

    stack     tokens i64 [copies, batch, tokens] or state f32 [copies, batch, tokens, width],
              lora_b.<n> [copies, rank, out] -> state
    tangent   state [batch, tokens, width], d_state [queries, ...], lora_b.<n> [rank, out],
              u.<n> [queries, batch, rank], v.<n> [queries, batch, out] -> state, d_state
    back      state, slope, lora_b.<n> [rank, out] -> slope of the state that entered,
              gradient.<n> [rank, out]

A decoder's head takes picked states [1, n, width] and `targets` i64 [1, n], and answers logprobs [1, n], in
the role back before the slope. `table.<n>` are the block's tables, `padding` f32 [..., 1, 1, tokens] is added
to an encoder's attention, `ones` is f32 [1, tokens, 1]. `<n>` counts the block's adapted modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from prge.contract import LARGEST_SIZE, AdaptedModule, Contract
from prge.errors import BundleError, shown

STACK, TANGENT, BACK = "stack", "tangent", "back"
ROLES = (STACK, TANGENT, BACK)
# The role that a step of each kind of call needs beside `stack`.
ROLE_OF = {"stack": STACK, "tangent": TANGENT, "exact": BACK}
TABLES = ("causal", "rotary", "positions", "zeros")
POOLINGS = ("mean", "first")
LORA_B, U, V, TABLE, GRADIENT = "lora_b.", "u.", "v.", "table.", "gradient."
_INPUTS = ("tokens", "state", "d_state", "slope", "targets", "padding", "ones")
_OUTPUTS = ("state", "d_state", "logprobs", "d_logprobs", "slope")
_MOST_BLOCKS = 1024
# Classes of an encoder's head that a step has room for.
_CLASSES = 32
# What attention adds where a token isn't seen: exp of it and any score is exactly 0 in float32, and no sum
# overflows.
MASKED = -3e4
_REMEDY = "export the bundle again with this version of prge"


@dataclass(frozen=True)
class Bounds:
    """The most of each size in one call of a method; `states` is of a decoder's head."""

    copies: int = 8
    batch: int = 4
    queries: int = 8
    tokens: int = 512
    states: int = 128


@dataclass(frozen=True)
class Interface:
    """Names of a method's inputs and outputs, in order."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """Blocks of one graph: their program file, and its methods by role."""

    program: str
    methods: Mapping[str, Interface]


@dataclass(frozen=True)
class Block:
    """One block: the number of its kind, its weights file, its tables, its modules among the chain's."""

    kind: int
    weights: str
    tables: tuple[int, ...]
    modules: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """What blocks are given beside the state, made for the length of a call.

    `causal`: a mask f32 [tokens, tokens] that lets a token see itself and `window` - 1 tokens before;
    `rotary`: f32 [1, tokens, width], rows of the tensor of the table's number in the tables file;
    `positions`: i64 [1, tokens], counted from `first`; `zeros`: i64 [1, tokens].
    """

    kind: str
    window: int | None = None
    first: int = 0


@dataclass(frozen=True)
class Chain:
    """What a manifest says of a model's blocks."""

    readout: str
    pooling: str
    width: int
    vocabulary_size: int
    label_tokens: tuple[int, ...]
    modules: tuple[AdaptedModule, ...]
    bounds: Bounds
    tables: tuple[Table, ...]
    kinds: tuple[Kind, ...]
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise BundleError(
                "the manifest describes no chain that can be run: " + "; ".join(problems), remedy=_REMEDY
            )

    def _problems(self) -> Any:
        if not 2 <= len(self.blocks) <= _MOST_BLOCKS:
            yield f"it has {len(self.blocks)} blocks, must be 2 to {_MOST_BLOCKS}"
        if self.pooling not in POOLINGS:
            yield f"pooling is {shown(self.pooling)}, must be one of {', '.join(POOLINGS)}"
        for name, size in asdict(self.bounds).items():
            if not 1 <= size <= LARGEST_SIZE:
                yield f"the bound of {name} is {shown(size)}, must be 1 to {LARGEST_SIZE}"
        for table in self.tables:
            if table.kind not in TABLES or not -LARGEST_SIZE <= table.first <= LARGEST_SIZE:
                yield f"a table is {shown(table)}"
        used = sorted(number for block in self.blocks for number in block.modules)
        if used != list(range(len(self.modules))):
            yield f"its blocks have {len(used)} modules, the chain {len(self.modules)}"
        for number, block in enumerate(self.blocks):
            if not 0 <= block.kind < len(self.kinds):
                yield f"block {number} is of kind {shown(block.kind)}"
                continue
            if any(not 0 <= table < len(self.tables) for table in block.tables):
                yield f"block {number} has the tables {shown(block.tables)}"
            yield from self._interface_problems(number, block)

    def _interface_problems(self, number: int, block: Block) -> Any:
        """What a block's methods ask for and no engine can give."""
        count, tables = len(block.modules), len(block.tables)
        given = {*_INPUTS, *(f"{TABLE}{n}" for n in range(tables))}
        given |= {f"{prefix}{n}" for prefix in (LORA_B, U, V) for n in range(count)}
        answered = {*_OUTPUTS, *(f"{GRADIENT}{n}" for n in range(count))}
        for role, method in self.kinds[block.kind].methods.items():
            unknown = [*(set(method.inputs) - given), *(set(method.outputs) - answered)]
            if role not in ROLES or unknown:
                yield f"block {number} has the role {shown(role)} with {shown(sorted(unknown))}"

    @property
    def is_encoder(self) -> bool:
        """Whether it ends with states instead of log-probabilities."""
        return self.readout == "pooled"

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that all blocks from the lowest adapted one on have."""
        above = self.blocks[self.lowest_adapted :]
        return tuple(role for role in ROLES if all(role in self.kinds[block.kind].methods for block in above))

    @property
    def lowest_adapted(self) -> int:
        """Number of the first block with an adapter."""
        return next(number for number, block in enumerate(self.blocks) if block.modules)

    def contract(
        self,
        kind: str,
        batch_size: int,
        *,
        copies: int = 1,
        queries: int = 0,
        length: int = 0,
        classes: int = 0,
    ) -> Contract:
        """The contract of an engine that answers calls of a run's own choice.

        Args:
            kind: `stack`, `tangent` or `exact`.
            batch_size: rows of one copy.
            copies: of the adapter in a stack.
            queries: tangents beside every row.
            length: most tokens of a row; by default what the chain allows.
            classes: of an encoder's head, for an exact step.

        Raises:
            BundleError: the bundle lacks the role.
        """
        if ROLE_OF[kind] not in self.roles:
            raise BundleError(
                f"the bundle lacks the role {ROLE_OF[kind]}, it has {', '.join(self.roles)}",
                remedy="choose another estimator, or export it with that role",
            )
        tokens = length or self.bounds.tokens
        return Contract(
            kind=kind,
            readout=self.readout,
            copies=copies,
            batch_size=batch_size,
            sequence_length=tokens,
            positions=0 if self.is_encoder else max(tokens - 1, 1),
            width=self.width,
            vocabulary_size=self.vocabulary_size,
            label_tokens=self.label_tokens,
            modules=self.modules,
            queries=queries,
            classes=(classes or _CLASSES) if kind == "exact" and self.is_encoder else 0,
            by_run=True,
        )

    def to_json(self) -> dict[str, Any]:
        """The manifest's `chain` block."""
        return asdict(self)

    @classmethod
    def from_json(cls, block: Mapping[str, Any]) -> Chain:
        """Read a manifest's `chain` block; raises BundleError on anything missing or of another type."""
        try:
            return cls(
                readout=str(block["readout"]),
                pooling=str(block["pooling"]),
                width=int(block["width"]),
                vocabulary_size=int(block["vocabulary_size"]),
                label_tokens=tuple(map(int, block["label_tokens"])),
                modules=tuple(
                    AdaptedModule(
                        str(m["name"]), int(m["rank"]), int(m["in_features"]), int(m["out_features"])
                    )
                    for m in block["modules"]
                ),
                bounds=Bounds(**{item.name: int(block["bounds"][item.name]) for item in fields(Bounds)}),
                tables=tuple(
                    Table(str(t["kind"]), None if t["window"] is None else int(t["window"]), int(t["first"]))
                    for t in block["tables"]
                ),
                kinds=tuple(
                    Kind(
                        str(kind["program"]),
                        {
                            str(role): Interface(tuple(map(str, m["inputs"])), tuple(map(str, m["outputs"])))
                            for role, m in kind["methods"].items()
                        },
                    )
                    for kind in block["kinds"]
                ),
                blocks=tuple(
                    Block(
                        int(b["kind"]),
                        str(b["weights"]),
                        tuple(map(int, b["tables"])),
                        tuple(map(int, b["modules"])),
                    )
                    for b in block["blocks"]
                ),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BundleError(f"the manifest's chain can't be read: {shown(error)}", remedy=_REMEDY) from None
