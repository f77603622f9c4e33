"""A model as a chain: its blocks in order, the kinds whose programs compute them.

    embedding   tokens -> state        block   state -> state        head   state -> parts

A program has a method for each role of its kind; prge/files/signatures.py says what these take and answer.
Shared values go from the block that makes them to several others. A decoder's head is one or more blocks of
a kind, each with a piece of the vocabulary. `table.<n>` are a block's tables, `taken.<n>` and `given.<n>` the
shared values that it takes and gives, and `<n>` of an adapter's inputs counts the block's adapted modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache, cached_property
from typing import Any, get_args, get_origin, get_type_hints

from prge.errors import BundleError, ConfigError, shown
from prge.files.relations import RELATIONS
from prge.files.signatures import (
    ALL_ROLES,
    BACK_SAVED,
    CARRIED,
    DECODE,
    IN_PIECES,
    PADDING,
    PAST_KEYS,
    PAST_VALUES,
    PREFILL,
    PREFILL_BACK,
    PREFILL_TANGENT,
    ROLE_OF,
    SAVE,
    SAVED,
    STACK,
    STEP_ROLES,
    BlockPorts,
    Signature,
    signature,
)
from prge.model_spec import LARGEST_SIZE, AdaptedModule, ModelSpec

TABLES = ("causal", "rotary", "positions", "zeros", "relative", *RELATIONS)
# Those with a tensor in the tables file.
STORED_TABLES = ("rotary", "relative")
# Of a checkpoint's own head each token has what its last layer reads.
OWN_HEAD = "head"
POOLINGS = ("mean", "first", OWN_HEAD)
TABLE, TAKEN, GIVEN = "table.", "taken.", "given."
_PAST = (PAST_KEYS, PAST_VALUES)
_MOST_BLOCKS = 1 << 14
_MOST_SHARED = 4096
# Values that a block saves: a few of its own, and one for each adapted module.
_MOST_SAVED = 256
# Things that a block carries from call to call: two of a layer, of which a block may have several.
_MOST_CARRIED = 64
_MOST_AXES = 8
_SPEC = re.compile(r"([a-z]{3,8}\d{0,2}) \[((?:\d{1,9}(?:, \d{1,9})*)?)\]")
# Of what is wrong with a chain: one mistake can show in every block.
_SHOWN = 8
# torch.export takes a size of 1 for another program.
FEWEST_TOKENS = 2
# Of a batch in one call, and of a row with as many queries as short ones have, or of a piece of a long one.
MOST_WHOLE_TOKENS, _SHORT = 512, 256
# Of a call of blocks with a recurrence: its products take time by the square of tokens, or by the cube.
RECURRENT_PIECE = 128
# Scores of all heads of a piece of a row, 8 MB, of which a way back holds several; a layer of fewer tokens
# takes longer for each.
_MOST_SCORES, _SHORTEST_PIECE = 1 << 21, 64
# What attention adds where a token isn't seen: exp of it and any score is exactly 0 in float32, and no sum
# overflows.
MASKED = -3e4
_REMEDY = "export the bundle again with this version of prge"


@dataclass(frozen=True)
class Bounds:
    """The most of each size in one call of a method; `states` is of a decoder's head.

    A row has up to `tokens`. One of more than `piece` passes the blocks in pieces; 0 stands for `tokens`.
    """

    copies: int = 8
    batch: int = 4
    queries: int = 8
    tokens: int = 512
    states: int = 128
    sequences: int = 16
    context: int = 2048
    piece: int = 0

    def __post_init__(self) -> None:
        if self.piece == 0:
            object.__setattr__(self, "piece", self.tokens)

    @classmethod
    def for_rows(
        cls, tokens: int, context: int = 0, is_encoder: bool = False, recurs: bool = False
    ) -> Bounds:
        """What is usual for rows of so many tokens, and texts of `context`.

        Memory is planned for a call of all bounds at once. An encoder's rows are whole: their tokens look at
        those behind. Blocks with a recurrence take shorter pieces.
        """
        piece = tokens if is_encoder or tokens <= MOST_WHOLE_TOKENS else _SHORT
        piece = min(piece, RECURRENT_PIECE) if recurs else piece
        return cls(
            # Programs are traced, and verified, with 2 rows.
            batch=max(2, min(cls.batch, MOST_WHOLE_TOKENS // piece)),
            queries=cls.queries if piece <= _SHORT else cls.queries // 2,
            tokens=tokens,
            context=max(tokens, context),
            piece=piece,
        )

    @property
    def of_call(self) -> Bounds:
        """The same with the tokens that pass a block together."""
        return replace(self, tokens=self.piece)

    def pieces(self, length: int, heads: int) -> Iterator[slice]:
        """The pieces of a row of so many tokens: shorter ones where a token has more scores before it.

        Args:
            length: of the row.
            heads: of queries; 0 where a block has no attention.
        """
        start = 0
        while start < length:
            size = self.piece
            while size > _SHORTEST_PIECE and heads * size * (start + size) > _MOST_SCORES:
                size //= 2
            if length - start - size == 1:
                # No piece has one token alone.
                size -= 1
            yield slice(start, min(start + size, length))
            start += size

    @property
    def has_pieces(self) -> bool:
        """Whether rows may be longer than a call."""
        return self.piece < self.tokens


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a method: its numpy dtype, and its sizes in the largest call.

    A manifest has it as its text: `float32 [8, 4, 16, 64]`.
    """

    dtype: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.sizes)}"

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Read a text of `str`; raises ValueError where it is none."""
        if (match := _SPEC.fullmatch(text)) is None:
            raise ValueError("a spec is a text such as float32 [8, 4, 16, 64]")
        return cls(match[1], tuple(map(int, filter(None, match[2].split(", ")))))


@dataclass(frozen=True)
class Interface:
    """Names of a method's inputs and outputs, in order, and the spec of each.

    Manifests of older versions have names alone: an engine takes the specs of their programs.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_specs: tuple[TensorSpec, ...] = ()
    output_specs: tuple[TensorSpec, ...] = ()

    @property
    def has_specs(self) -> bool:
        """Whether every input and output has a spec."""
        return bool(self.input_specs or self.output_specs)

    def sizes(self, name: str, is_output: bool = False) -> tuple[int, ...]:
        """Sizes of an input or output; none where the method has none of that name."""
        pairs = (self.outputs, self.output_specs) if is_output else (self.inputs, self.input_specs)
        return next((spec.sizes for each, spec in zip(*pairs, strict=False) if each == name), ())


@dataclass(frozen=True)
class Kind:
    """Blocks of one graph: their program file, and its methods by role.

    Blocks of `experts` that come one after the other are a layer's: the state is not of them, but of what
    `prge.learning.experts` makes of all.
    """

    program: str
    methods: Mapping[str, Interface]
    experts: bool = False


@dataclass(frozen=True)
class Block:
    """One block: the number of its kind, its weights file, its tables, its modules among the chain's.

    `takes` are numbers of the chain's shared values. `past` tells which of these are the keys and the values
    of its attention, [tokens, heads x width]; it is empty if the block makes its own.
    """

    kind: int
    weights: str
    tables: tuple[int, ...]
    modules: tuple[int, ...]
    takes: tuple[int, ...] = ()
    past: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """What blocks are given beside the state, made for the length of a call.

    `causal`: a mask f32 [members, tokens, tokens], once for each query of a group of heads, that lets a token
    see itself and `window` - 1 tokens before;
    `rotary`: f32 [1, tokens, width], rows of the tensor of the table's number in the tables file;
    `positions`: i64 [1, tokens], counted from `first`; `zeros`: i64 [1, tokens];
    `relative`: f32 or i64 [members, tokens, tokens] by how far two tokens are apart. The tensor of the
    table's number in the tables file has one for each distance, from the farthest before to that behind;
    those of prge.files.relations, f32.
    """

    kind: str
    window: int | None = None
    first: int = 0
    members: int = 1


@dataclass(frozen=True)
class Chain:
    """What a manifest says of a model's blocks; `shared` has the block that makes each shared value."""

    readout: str
    pooling: str
    width: int
    vocabulary_size: int
    modules: tuple[AdaptedModule, ...]
    bounds: Bounds
    tables: tuple[Table, ...]
    kinds: tuple[Kind, ...]
    blocks: tuple[Block, ...]
    shared: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise BundleError(
                "the manifest describes no chain that can be run: " + "; ".join(problems[:_SHOWN]),
                remedy=_REMEDY,
                code="chain-not-runnable",
            )
        try:
            self.model  # noqa: B018
        except ConfigError as error:
            raise BundleError(
                f"the manifest describes no chain that can be run: {'; '.join(error.problems)}",
                remedy=_REMEDY,
                code="chain-not-runnable",
            ) from None

    def _problems(self) -> Iterator[str]:
        yield from self._size_problems()
        makers = len(self.shared)
        if makers > _MOST_SHARED or any(not 0 <= maker < len(self.blocks) for maker in self.shared):
            yield f"its {makers} shared values come from the blocks {shown(self.shared)}"
            return
        yield from self._part_problems()
        for number, block in enumerate(self.blocks):
            yield from self._block_problems(number, block)

    def _size_problems(self) -> Iterator[str]:
        """What is wrong with the number of blocks, their weights files, the head, and bounds."""
        if not 2 <= len(self.blocks) <= _MOST_BLOCKS:
            yield f"it has {len(self.blocks)} blocks, must be 2 to {_MOST_BLOCKS}"
        for number, first in enumerate(self.first_of_weights):
            one, other = self.blocks[first], self.blocks[number]
            is_layer = 0 < first < self.end and number < self.end
            if first < number and not (is_layer and (one.kind, one.modules) == (other.kind, other.modules)):
                yield f"blocks {first} and {number} share a weights file and aren't one layer"
        if self.pooling not in POOLINGS:
            yield f"pooling is {shown(self.pooling)}, must be one of {', '.join(POOLINGS)}"
        words, pieces = self.vocabulary_size, len(self.blocks) - self.end
        if pieces and words % pieces:
            yield f"its head has {pieces} pieces, of {words} words"
        if self.width < 1:
            yield f"width is {shown(self.width)}, must be at least 1"
        for name, size in asdict(self.bounds).items():
            least = FEWEST_TOKENS if name in ("tokens", "states", "piece") else 1
            if not least <= size <= LARGEST_SIZE:
                yield f"the bound of {name} is {shown(size)}, must be {least} to {LARGEST_SIZE}"
        if self.bounds.piece > self.bounds.tokens:
            yield f"pieces of rows have {shown(self.bounds.piece)} tokens, rows {shown(self.bounds.tokens)}"
        if self.bounds.has_pieces and self.bounds.context < self.bounds.tokens:
            yield f"rows have {shown(self.bounds.tokens)} tokens, texts {shown(self.bounds.context)}"

    def _part_problems(self) -> Iterator[str]:
        """What is wrong with the tables, modules and kinds of all blocks."""
        for table in self.tables:
            window = 1 if table.window is None else table.window
            if (
                table.kind not in TABLES
                or not 0 <= table.first <= LARGEST_SIZE
                or not 1 <= table.members <= _MOST_BLOCKS
                or window < 1
            ):
                yield f"a table is {shown(table)}"
        if len({module.trains_a for module in self.modules}) > 1:
            yield "some of its modules train lora_a, others don't"
        layers = (self.blocks[number] for number in dict.fromkeys(self.first_of_weights))
        used = sorted(number for block in layers for number in block.modules)
        if not used:
            yield "no block has an adapted module: there is nothing to train"
        if used != list(range(len(self.modules))):
            yield f"its blocks have the modules {shown(used)}, the chain {len(self.modules)}"
        if unused := {*range(len(self.kinds))} - {block.kind for block in self.blocks}:
            yield f"no block is of kind {min(unused)}"

    def _block_problems(self, number: int, block: Block) -> Iterator[str]:
        """What is wrong with a block; without its kind, tables or shared values no more can be told of it."""
        if not 0 <= block.kind < len(self.kinds):
            yield f"block {number} is of kind {shown(block.kind)}, there are {len(self.kinds)}"
        elif any(not 0 <= table < len(self.tables) for table in block.tables):
            yield f"block {number} has the tables {shown(block.tables)}, there are {len(self.tables)}"
        elif problem := self._sharing_problem(number, block):
            yield problem
        else:
            if block.modules and (number == 0 or self.is_head(number)):
                yield f"block {number}, the first or a head, has adapted modules"
            is_between = 0 < number < min(self.end, len(self.blocks) - 1)
            if self.is_expert(number) and (block.modules or block.tables or not is_between):
                yield f"block {number}, an expert, has modules or tables, or is the first or the last one"
            if STACK not in self.kinds[block.kind].methods:
                yield f"block {number} lacks the role {STACK}"
            yield from self._interface_problems(number, block)

    def _sharing_problem(self, number: int, block: Block) -> str:
        """What is wrong with the values that a block takes, if anything is."""
        before = {value for value, maker in enumerate(self.shared) if 0 <= maker < number}
        if self.is_head(number) and (block.takes or number in self.shared):
            return f"block {number}, a head, shares values"
        if not before.issuperset(block.takes) or len({*block.takes}) < len(block.takes):
            return f"block {number} takes the values {shown(block.takes)} of {len(self.shared)}"
        places = range(len(block.takes))
        if block.past and (len(block.past) != len(_PAST) or not {*places}.issuperset(block.past)):
            return f"block {number} has its past in {shown(block.past)} of {len(block.takes)} values"
        return ""

    def _interface_problems(self, number: int, block: Block) -> Iterator[str]:
        """What a block's methods ask for, or answer, otherwise than an engine expects."""
        modules = len(block.modules)
        for role, method in self.kinds[block.kind].methods.items():
            if role not in ALL_ROLES:
                yield f"block {number} has the role {shown(role)}, this version knows {', '.join(ALL_ROLES)}"
                continue
            if len(method.outputs) > _MOST_SAVED + modules + 2 * len(self.shared):
                yield f"block {number} has {len(method.outputs)} outputs in the role {role}"
                continue
            expected, asked = self.signature(number, role), {*method.inputs}
            allowed = {*expected.allowed}
            if not self.is_head(number):
                allowed |= {f"{TABLE}{n}" for n in range(len(block.tables))}
            allowed -= set() if self.is_encoder else {PADDING}
            if not expected.needed <= asked <= allowed or len(asked) < len(method.inputs):
                yield f"block {number} takes {shown(method.inputs)} in the role {role}"
            if sorted(method.outputs) != sorted(expected.answers):
                yield f"block {number} answers {shown(method.outputs)} in the role {role}"
            yield from _spec_problems(method, f"of block {number} in the role {role}")

    def signature(self, number: int, role: str) -> Signature:
        """What a block's method takes and answers, but for its tables."""
        return signature(self.ports(number), ROLE_OF[role])

    def ports(self, number: int) -> BlockPorts:
        """What enters and leaves a block, whatever is computed of it."""
        block, saved = self.blocks[number], len(self._saved(number))
        if self.is_head(number):
            return BlockPorts(is_head=True, saved=saved)
        return BlockPorts(
            modules=len(block.modules),
            trains_a=self.trains_a,
            is_first=number == 0,
            attends=self.attends(number),
            takes=tuple(self.shared[value] >= self.lowest_adapted for value in block.takes),
            gives=len(self.gives(number)),
            past=block.past,
            carried=len(self.carried(number)),
            saved=saved,
        )

    def carried(self, number: int) -> list[str]:
        """Names of what a block carries from call to call, whatever the role."""
        methods = self.kinds[self.blocks[number].kind].methods
        inputs = [methods[role].inputs for role in (PREFILL, DECODE) if role in methods]
        return [name for name in (inputs or [()])[0] if name.startswith(f"{CARRIED}.")][: _MOST_CARRIED + 1]

    def gives(self, number: int) -> list[int]:
        """Numbers of the shared values that a block makes."""
        return [value for value, maker in enumerate(self.shared) if maker == number]

    def shared_at(self, number: int) -> list[int]:
        """Numbers of the shared values that enter the blocks from this one on."""
        needed = {value for block in self.blocks[number:] for value in block.takes}
        return [value for value in sorted(needed) if self.shared[value] < number]

    def saved(self, number: int) -> list[str]:
        """Names of what a block's forward pass saves for the way back; none if it can't."""
        return self._saved(number) if BACK_SAVED in self.kinds[self.blocks[number].kind].methods else []

    def _saved(self, number: int) -> list[str]:
        method = self.kinds[self.blocks[number].kind].methods.get(SAVE)
        outputs = method.outputs[: _MOST_SAVED + 1 + len(self.shared)] if method else ()
        return [name for name in outputs if name.startswith(f"{SAVED}.")]

    def is_head(self, number: int) -> bool:
        """Whether a block is a decoder's head."""
        return number >= self.end

    def is_expert(self, number: int) -> bool:
        """Whether a block is an expert of a layer."""
        return self.kinds[self.blocks[number].kind].experts

    def turns(self, numbers: Iterable[int]) -> list[range]:
        """Blocks in order, the experts of a layer together: each is a step of a state on its way."""
        found: list[range] = []
        for number in numbers:
            if found and self.is_expert(number) and self.is_expert(found[-1].start):
                found[-1] = range(found[-1].start, number + 1)
            else:
                found.append(range(number, number + 1))
        return found

    @cached_property
    def end(self) -> int:
        """Number of the first block that answers no state: the first piece of a decoder's head."""
        kinds = [block.kind for block in self.blocks]
        if self.is_encoder:
            return len(kinds)
        return next((n + 1 for n in reversed(range(len(kinds))) if kinds[n] != kinds[-1]), 0)

    @cached_property
    def first_of_weights(self) -> tuple[int, ...]:
        """For each block the number of the first one with its weights file: some models share layers."""
        first: dict[str, int] = {}
        return tuple(first.setdefault(block.weights, number) for number, block in enumerate(self.blocks))

    def loaded_bytes(self, size: Callable[[str], int]) -> list[int]:
        """Bytes that each block's weights take while it is loaded, by the size of a file.

        The first block's are tables, whose rows are read where they lie; those that were loaded for a block
        before are there already.
        """
        first = self.first_of_weights
        return [
            size(block.weights) if number and first[number] == number else 0
            for number, block in enumerate(self.blocks)
        ]

    @property
    def piece_words(self) -> int:
        """Words of a piece of a decoder's vocabulary."""
        return self.vocabulary_size // (len(self.blocks) - self.end)

    @property
    def trains_a(self) -> bool:
        """Whether its adapter is LoRA, both matrices of which are trained, and not LoRA-FA."""
        return any(module.trains_a for module in self.modules)

    @property
    def is_encoder(self) -> bool:
        """Whether it ends with states instead of log-probabilities."""
        return self.readout == "pooled"

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles that all blocks have which need it: those of steps from the lowest adapted one on."""
        needing = {role: self.blocks[self.lowest_adapted :] for role in STEP_ROLES}
        if not self.is_encoder:
            needing |= {
                PREFILL: self.blocks[: self.end],
                DECODE: self.blocks,
                PREFILL_TANGENT: self.blocks[self.lowest_adapted : self.end],
                PREFILL_BACK: self.blocks[self.lowest_adapted : self.end],
            }
        return tuple(
            role
            for role, blocks in needing.items()
            if all(
                role in self.kinds[block.kind].methods
                for block in blocks
                if role in STEP_ROLES or not self.kinds[block.kind].experts
            )
        )

    def longest(self, role: str) -> int:
        """Most tokens of a row in calls of a role of steps."""
        return self.bounds.tokens if IN_PIECES.get(role) in self.roles else self.bounds.piece

    def causal_table(self, number: int) -> Table | None:
        """The mask of a block's attention, if it has one."""
        tables = (self.tables[place] for place in self.blocks[number].tables)
        return next((table for table in tables if table.kind == "causal"), None)

    def attends(self, number: int) -> bool:
        """Whether a block looks at the tokens before."""
        return self.causal_table(number) is not None

    @cached_property
    def lowest_adapted(self) -> int:
        """Number of the first block with an adapter."""
        return next((number for number, block in enumerate(self.blocks) if block.modules), len(self.blocks))

    @cached_property
    def model(self) -> ModelSpec:
        """What callers of an engine of this chain must know."""
        return ModelSpec(
            readout=self.readout,
            width=self.width,
            vocabulary_size=self.vocabulary_size,
            sequence_length=max(self.longest(STACK), 1),
            modules=self.modules,
        )

    def check_role(self, role: str) -> None:
        """Raise BundleError if the bundle can't compute a role."""
        if role not in self.roles:
            raise BundleError(
                f"the bundle lacks the role {role}, it has {', '.join(self.roles)}",
                remedy="choose another estimator, or export it with that role",
                code="role-missing",
            )

    def to_json(self) -> dict[str, Any]:
        """The manifest's `chain` block."""
        block = asdict(self)
        for kind, written in zip(self.kinds, block["kinds"], strict=True):
            for role, method in kind.methods.items():
                written["methods"][role]["input_specs"] = list(map(str, method.input_specs))
                written["methods"][role]["output_specs"] = list(map(str, method.output_specs))
        return block

    @classmethod
    def from_json(cls, block: Any) -> Chain:
        """Read a manifest's `chain` block; raises BundleError on anything missing or of another type."""
        readout = block.get("readout") if isinstance(block, Mapping) else None
        if _checked("readout", readout, str) == "verbalizer":
            raise BundleError(
                "the bundle answers among label words alone, which version 0.1 could",
                remedy="export it again without --label-words: tasks compare their words over the vocabulary",
                code="bundle-of-label-words",
            )
        chain: Chain = _read(cls, block, "chain")
        return chain


def _spec_problems(method: Interface, where: str) -> Iterator[str]:
    """What is wrong with the specs of a method that has any; whose they are is compared with its program."""
    for what, names, specs in (
        ("inputs", method.inputs, method.input_specs),
        ("outputs", method.outputs, method.output_specs),
    ):
        if method.has_specs and len(specs) != len(names):
            yield f"{len(names)} {what} {where} have {len(specs)} specs"
        for spec in specs:
            if len(spec.sizes) > _MOST_AXES or any(not 1 <= size <= LARGEST_SIZE for size in spec.sizes):
                yield f"one of the {what} {where} is {shown(spec)}"


# Fields that manifests of older versions lack.
_LATER = (
    *("trains_a", "experts", "takes", "past", "shared", "piece", "window"),
    *("input_specs", "output_specs"),
)
_IN_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a text",
    list: "a list",
    Mapping: "a mapping",
}
_hints = cache(get_type_hints)


def _read(kind: Any, value: Any, name: str) -> Any:
    """A JSON value as a field's type has it; raises BundleError if it is of another, or lacks a field."""
    parts = get_args(kind)
    if kind is TensorSpec:
        try:
            return TensorSpec.parse(_checked(name, value, str))
        except ValueError as error:
            raise _unreadable(name, value, str(error)) from None
    if isinstance(kind, type) and is_dataclass(kind):
        block = _checked(name, value, Mapping)
        held = [field for field in _hints(kind) if field in block or field not in _LATER]
        return kind(**{field: _read(_hints(kind)[field], block.get(field), field) for field in held})
    if get_origin(kind) is tuple:
        return tuple(_read(parts[0], each, f"one of {name}") for each in _checked(name, value, list))
    if get_origin(kind) is Mapping:
        named = _checked(name, value, Mapping).items()
        return {key: _read(parts[1], each, f"one of {name}") for key, each in named}
    if parts:  # it, or None
        return None if value is None else _read(parts[0], value, name)
    return _checked(name, value, kind)


def _checked(name: str, value: Any, kind: type) -> Any:
    value = [*value] if isinstance(value, tuple) else value
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _unreadable(name, value, f"must be {_IN_WORDS[kind]}")
    return value


def _unreadable(name: str, value: Any, why: str) -> BundleError:
    return BundleError(
        f"the manifest's chain can't be read: {name} is {shown(value)}, {why}",
        remedy=_REMEDY,
        code="chain-unreadable",
    )
