"""The chain of a model: its blocks in order, and the programs that compute them.

    embedding   tokens -> hidden states        block   hidden states -> hidden states
    head        hidden states -> logits of the targets and sums of exponentials

A program has a method for each of its roles; prge/formats/signatures.py defines their inputs and outputs.
Shared values are computed by one block and used by several others. A decoder's output head consists of one or
more blocks of one program, each with a vocabulary shard. Input and output names: `table.<n>` are a block's
tables, `shared_in.<n>` and `shared_out.<n>` the shared values that it uses and computes, and the `<n>` of
adapter inputs is the index of the adapted module in the block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache, cached_property
from typing import Any, get_args, get_origin, get_type_hints

from prge.errors import BundleError, ConfigError, format_value
from prge.formats.relations import RELATIONS
from prge.formats.signatures import (
    ALL_ROLES,
    BACKWARD_SAVED,
    CHUNK_ROLE,
    DECODE,
    FORWARD,
    FORWARD_SAVE,
    PADDING_MASK,
    PAST_KEYS,
    PAST_VALUES,
    PREFILL,
    PREFILL_BACKWARD,
    PREFILL_JVP,
    RECURRENT_STATE,
    RESIDUAL,
    ROLE_OF,
    STEP_ROLES,
    BlockPorts,
    Signature,
    signature,
)
from prge.model_spec import LARGEST_SIZE, AdaptedModule, ModelSpec

TABLES = ("causal", "rotary", "positions", "zeros", "relative", *RELATIONS)
# Types of tables with a tensor in the tables file.
STORED_TABLES = ("rotary", "relative")
# Types of tables of models whose sequences may have branches.
_BRANCHING_TABLES = {"causal", "rotary", "positions", "zeros"}
# Pooling of a checkpoint's own head: for each token, the input of the head's last layer.
OWN_HEAD = "head"
POOLINGS = ("mean", "first", OWN_HEAD)
TABLE, SHARED_IN, SHARED_OUT = "table.", "shared_in.", "shared_out."
_PAST = (PAST_KEYS, PAST_VALUES)
_MAX_BLOCKS = 1 << 14
_MAX_SHARED = 4096
# Residuals of a block: a few for the block itself, and one for each adapted module.
_MAX_RESIDUALS = 256
# Recurrent states of a block: two per layer, of which a block may have several.
_MAX_RECURRENT_STATES = 64
_MAX_AXES = 8
_SPEC = re.compile(r"([a-z]{3,8}\d{0,2}) \[((?:\d{1,9}(?:, \d{1,9})*)?)\]")
# Maximum number of problems in an error: one mistake can cause a problem in every block.
_MAX_PROBLEMS = 8
# torch.export specializes programs for a size of 1.
MIN_TOKENS = 2
# Maximum number of tokens of a batch in one call; chunk size of longer rows, for which all queries fit.
MAX_WHOLE_TOKENS, _CHUNK = 512, 256
# Chunk size of blocks with a recurrence, whose cost grows with the square or the cube of the chunk.
RECURRENT_CHUNK = 128
# Maximum number of attention scores of a chunk, over all heads: 8 MB. A backward pass holds several such
# tensors. Chunks of fewer than 64 tokens take longer per token.
_MAX_SCORES, _MIN_CHUNK = 1 << 21, 64
# Value that masks add to the scores of hidden tokens: the exponential of its sum with any score is exactly 0
# in float32, and no sum overflows.
MASKED = -3e4
# Elements of the hidden states that pass a block together: many more would leave the caches. A wide
# model has more, because calls for far fewer tokens than MAX_WHOLE_TOKENS take longer per token.
_ELEMENTS_TOGETHER = 1 << 18
_REMEDY = "Export the bundle again with this version of prge."


@dataclass(frozen=True)
class Bounds:
    """Upper bounds of the sizes in one call of a method.

    Attributes:
        copies: copies of the adapter.
        batch: rows in a batch.
        queries: directions.
        tokens: tokens of a row.
        states: hidden states in a call of a decoder's output head.
        sequences: sequences in text generation.
        context: tokens of a sequence in text generation.
        chunk: tokens in a call; longer rows are computed in chunks. 0 stands for `tokens`.
    """

    copies: int = 8
    batch: int = 4
    queries: int = 8
    tokens: int = 512
    states: int = 128
    sequences: int = 16
    context: int = 2048
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.chunk == 0:
            object.__setattr__(self, "chunk", self.tokens)

    @classmethod
    def for_rows(
        cls, tokens: int, context: int = 0, is_encoder: bool = False, recurs: bool = False
    ) -> Bounds:
        """Return the default bounds.

        Programs plan their memory for a call in which all sizes are at their bounds.

        Args:
            tokens: maximum number of tokens in a row.
            context: maximum number of tokens of a sequence in text generation.
            is_encoder: whether the model is an encoder, whose rows can't be chunked because tokens attend to
                later ones.
            recurs: whether blocks have a recurrence, which needs shorter chunks.
        """
        chunk = tokens if is_encoder or tokens <= MAX_WHOLE_TOKENS else _CHUNK
        chunk = min(chunk, RECURRENT_CHUNK) if recurs else chunk
        return cls(
            # Programs are traced and verified with 2 rows.
            batch=max(2, min(cls.batch, MAX_WHOLE_TOKENS // chunk)),
            queries=cls.queries if chunk <= _CHUNK else cls.queries // 2,
            tokens=tokens,
            context=max(tokens, context),
            chunk=chunk,
        )

    def rows_together(self, length: int, width: int, values: int = 1) -> int:
        """Return how many rows of one length pass a block together, over all copies of the adapter.

        Args:
            length: tokens of a row, with padding.
            width: width of the hidden states.
            values: values of each token: 1, or 1 + the number of directions.
        """
        if length > self.chunk:
            return 1
        tokens = max(MAX_WHOLE_TOKENS, _ELEMENTS_TOGETHER // width)
        return max(1, round(tokens / (length * values)))

    @property
    def per_call(self) -> Bounds:
        """The bounds with `tokens` set to the tokens in one call, `chunk`."""
        return replace(self, tokens=self.chunk)

    def chunks(self, length: int, heads: int) -> Iterator[slice]:
        """Yield the chunks of a row; chunks get shorter as the number of earlier tokens grows.

        Args:
            length: tokens of the row.
            heads: attention heads; 0 if a block has no attention.
        """
        start = 0
        while start < length:
            size = self.chunk
            while size > _MIN_CHUNK and heads * size * (start + size) > _MAX_SCORES:
                size //= 2
            if length - start - size == 1:
                # The last chunk must not have a single token.
                size -= 1
            yield slice(start, min(start + size, length))
            start += size

    @property
    def has_chunks(self) -> bool:
        """Whether rows can be longer than one call."""
        return self.chunk < self.tokens


@dataclass(frozen=True)
class TensorSpec:
    """The numpy dtype of a tensor, and its sizes in the largest call.

    Manifests store a spec as text: `float32 [8, 4, 16, 64]`.
    """

    dtype: str
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.sizes)}"

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Parse the text of a spec; raises ValueError if it is invalid."""
        if (match := _SPEC.fullmatch(text)) is None:
            raise ValueError("a spec is a text such as float32 [8, 4, 16, 64]")
        return cls(match[1], tuple(map(int, filter(None, match[2].split(", ")))))


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a method.

    Attributes:
        inputs: names of the inputs, in order.
        outputs: names of the outputs, in order.
        input_specs: specs of the inputs; empty in manifests of earlier versions, for which an engine reads
            them from the programs.
        output_specs: specs of the outputs, likewise.
        method: name of the method in programs of earlier versions; empty if it is the name of the role.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_specs: tuple[TensorSpec, ...] = ()
    output_specs: tuple[TensorSpec, ...] = ()
    method: str = ""

    @property
    def has_specs(self) -> bool:
        """Whether the inputs and outputs have specs."""
        return bool(self.input_specs or self.output_specs)

    def sizes(self, name: str, is_output: bool = False) -> tuple[int, ...]:
        """Return the sizes of an input or output; empty if the method has none of that name."""
        pairs = (self.outputs, self.output_specs) if is_output else (self.inputs, self.input_specs)
        return next((spec.sizes for port, spec in zip(*pairs, strict=False) if port == name), ())


@dataclass(frozen=True)
class BlockProgram:
    """The program of all blocks of one type.

    Attributes:
        file: name of the program's file.
        methods: its methods by role.
        experts: whether its blocks are experts. Consecutive experts form a layer, whose hidden states
            `prge.numerics.expert_routing` computes from the experts' outputs.
    """

    file: str
    methods: Mapping[str, Interface]
    experts: bool = False

    def method_name(self, role: str) -> str:
        """Return the name of the method for a role in the program."""
        return self.methods[role].method or role


@dataclass(frozen=True)
class BlockSpec:
    """One block of a chain.

    Attributes:
        program: index of its program in the chain.
        weights: name of its weights file.
        tables: indices of its tables in the chain.
        modules: indices of its adapted modules in the chain.
        shared_in: indices of the chain's shared values that it uses.
        past: positions in `shared_in` of the keys and values of its attention, [tokens, heads x width]; empty
            if the block computes its own.
    """

    program: int
    weights: str
    tables: tuple[int, ...]
    modules: tuple[int, ...]
    shared_in: tuple[int, ...] = ()
    past: tuple[int, ...] = ()


@dataclass(frozen=True)
class TableSpec:
    """A table: a tensor that depends only on the length of a call, which blocks get as an extra input.

    Types of tables:

    - `causal`: a mask f32 [members, tokens, tokens], once for each query head of a group, with which a token
      attends to itself and the `window` - 1 tokens before it.
    - `rotary`: f32 [1, tokens, width], rows of the table's tensor in the tables file.
    - `positions`: i64 [1, tokens], counted from `first`.
    - `zeros`: i64 [1, tokens].
    - `relative`: f32 or i64 [members, tokens, tokens], a value for the distance of two tokens. The table's
      tensor in the tables file has the values of all distances, from the farthest earlier token to the
      farthest later one.
    - the types of prge.formats.relations: f32.
    """

    type: str
    window: int | None = None
    first: int = 0
    members: int = 1


@dataclass(frozen=True)
class Chain:
    """The blocks of a model and their programs, as a manifest describes them.

    Attributes:
        readout: see ModelSpec.
        pooling: how an encoder pools its hidden states.
        width: width of the last hidden states.
        vocabulary_size: number of tokens in the vocabulary.
        modules: the adapted layers of all blocks.
        bounds: upper bounds of the sizes in a call.
        tables: the tables of all blocks.
        programs: the programs of the block types.
        blocks: the blocks, in order.
        shared: for each shared value, the index of the block that computes it.

    Raises:
        BundleError: the chain is inconsistent; the message lists the first problems.
    """

    readout: str
    pooling: str
    width: int
    vocabulary_size: int
    modules: tuple[AdaptedModule, ...]
    bounds: Bounds
    tables: tuple[TableSpec, ...]
    programs: tuple[BlockProgram, ...]
    blocks: tuple[BlockSpec, ...]
    shared: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise BundleError(
                "The manifest describes no chain that can be run: " + "; ".join(problems[:_MAX_PROBLEMS]),
                remedy=_REMEDY,
                code="chain-not-runnable",
            )
        try:
            self.model  # noqa: B018
        except ConfigError as error:
            raise BundleError(
                f"The manifest describes no chain that can be run: {'; '.join(error.problems)}",
                remedy=_REMEDY,
                code="chain-not-runnable",
            ) from None

    def _problems(self) -> Iterator[str]:
        yield from self._size_problems()
        makers = len(self.shared)
        if makers > _MAX_SHARED or any(not 0 <= maker < len(self.blocks) for maker in self.shared):
            yield f"its {makers} shared values come from the blocks {format_value(self.shared)}"
            return
        yield from self._part_problems()
        for number, block in enumerate(self.blocks):
            yield from self._block_problems(number, block)

    def _size_problems(self) -> Iterator[str]:
        """Yield problems of the number of blocks, their weights files, the output head, and the bounds."""
        if not 2 <= len(self.blocks) <= _MAX_BLOCKS:
            yield f"it has {len(self.blocks)} blocks, must be 2 to {_MAX_BLOCKS}"
        for number, first in enumerate(self.first_with_weights):
            one, other = self.blocks[first], self.blocks[number]
            is_layer = 0 < first < self.head_start and number < self.head_start
            if first < number and not (
                is_layer and (one.program, one.modules) == (other.program, other.modules)
            ):
                yield f"blocks {first} and {number} share a weights file and aren't one layer"
        if self.pooling not in POOLINGS:
            yield f"pooling is {format_value(self.pooling)}, must be one of {', '.join(POOLINGS)}"
        shards = len(self.blocks) - self.head_start
        if shards and self.vocabulary_size % shards:
            yield f"its head has {shards} shards, of {self.vocabulary_size} tokens"
        if self.width < 1:
            yield f"width is {format_value(self.width)}, must be at least 1"
        for name, size in asdict(self.bounds).items():
            least = MIN_TOKENS if name in ("tokens", "states", "chunk") else 1
            if not least <= size <= LARGEST_SIZE:
                yield f"the bound of {name} is {format_value(size)}, must be {least} to {LARGEST_SIZE}"
        if self.bounds.chunk > self.bounds.tokens:
            chunk, tokens = format_value(self.bounds.chunk), format_value(self.bounds.tokens)
            yield f"chunks have {chunk} tokens, but rows only {tokens}"
        if self.bounds.has_chunks and self.bounds.context < self.bounds.tokens:
            tokens, context = format_value(self.bounds.tokens), format_value(self.bounds.context)
            yield f"rows have {tokens} tokens, but texts only {context}"

    def _part_problems(self) -> Iterator[str]:
        """Yield problems of the tables, modules and programs of all blocks."""
        for table in self.tables:
            window = 1 if table.window is None else table.window
            if (
                table.type not in TABLES
                or not 0 <= table.first <= LARGEST_SIZE
                or not 1 <= table.members <= _MAX_BLOCKS
                or window < 1
            ):
                yield f"a table is {format_value(table)}"
        if len({module.trains_a for module in self.modules}) > 1:
            yield "some of its modules train lora_a, others don't"
        layers = (self.blocks[number] for number in dict.fromkeys(self.first_with_weights))
        used = sorted(number for block in layers for number in block.modules)
        if not used:
            yield "no block has an adapted module: there is nothing to train"
        if used != list(range(len(self.modules))):
            yield f"its blocks have the modules {format_value(used)}, the chain {len(self.modules)}"
        if unused := {*range(len(self.programs))} - {block.program for block in self.blocks}:
            yield f"no block has the program {min(unused)}"

    def _block_problems(self, number: int, block: BlockSpec) -> Iterator[str]:
        """Yield problems of a block; an invalid program, table or shared value hides its other problems."""
        if not 0 <= block.program < len(self.programs):
            program = format_value(block.program)
            yield f"block {number} has the program {program}, there are {len(self.programs)}"
        elif any(not 0 <= table < len(self.tables) for table in block.tables):
            yield f"block {number} has the tables {format_value(block.tables)}, there are {len(self.tables)}"
        elif problem := self._sharing_problem(number, block):
            yield problem
        else:
            if block.modules and (number == 0 or self.is_head(number)):
                yield f"block {number}, the first or a head, has adapted modules"
            is_between = 0 < number < min(self.head_start, len(self.blocks) - 1)
            if self.is_expert(number) and (block.modules or block.tables or not is_between):
                yield f"block {number}, an expert, has modules or tables, or is the first or the last one"
            if FORWARD not in self.programs[block.program].methods:
                yield f"block {number} lacks the role {FORWARD}"
            yield from self._interface_problems(number, block)

    def _sharing_problem(self, number: int, block: BlockSpec) -> str:
        """Return a problem of the shared values of a block, or an empty string."""
        available = {value for value, maker in enumerate(self.shared) if 0 <= maker < number}
        if self.is_head(number) and (block.shared_in or number in self.shared):
            return f"block {number}, a head, shares values"
        if not available.issuperset(block.shared_in) or len({*block.shared_in}) < len(block.shared_in):
            return f"block {number} takes the values {format_value(block.shared_in)} of {len(self.shared)}"
        positions = range(len(block.shared_in))
        if block.past and (len(block.past) != len(_PAST) or not {*positions}.issuperset(block.past)):
            return (
                f"block {number} has its past in {format_value(block.past)} of {len(block.shared_in)} values"
            )
        return ""

    def _interface_problems(self, number: int, block: BlockSpec) -> Iterator[str]:
        """Yield differences between a block's methods and the signatures that an engine expects."""
        modules = len(block.modules)
        for role, method in self.programs[block.program].methods.items():
            if role not in ALL_ROLES:
                known = ", ".join(ALL_ROLES)
                yield f"block {number} has the role {format_value(role)}, this version knows {known}"
                continue
            if len(method.outputs) > _MAX_RESIDUALS + modules + 2 * len(self.shared):
                yield f"block {number} has {len(method.outputs)} outputs in the role {role}"
                continue
            expected, inputs = self.signature(number, role), {*method.inputs}
            allowed = {*expected.allowed_inputs}
            if not self.is_head(number):
                allowed |= {f"{TABLE}{n}" for n in range(len(block.tables))}
            allowed -= set() if self.is_encoder else {PADDING_MASK}
            if not expected.required_inputs <= inputs <= allowed or len(inputs) < len(method.inputs):
                yield f"block {number} takes {format_value(method.inputs)} in the role {role}"
            if sorted(method.outputs) != sorted(expected.output_names):
                yield f"block {number} returns {format_value(method.outputs)} in the role {role}"
            yield from _spec_problems(method, f"of block {number} in the role {role}")

    def signature(self, number: int, role: str) -> Signature:
        """Return the signature of a block's method, without tables."""
        return signature(self.ports(number), ROLE_OF[role])

    def ports(self, number: int) -> BlockPorts:
        """Return the ports of a block."""
        block, residuals = self.blocks[number], len(self._residuals(number))
        if self.is_head(number):
            return BlockPorts(is_head=True, residuals=residuals)
        return BlockPorts(
            modules=len(block.modules),
            trains_a=self.trains_a,
            is_first=number == 0,
            attends=self.attends(number),
            shared_in=tuple(self.shared[value] >= self.lowest_adapted for value in block.shared_in),
            shared_out=len(self.shared_out(number)),
            past=block.past,
            recurrent_states=len(self.recurrent_states(number)),
            residuals=residuals,
        )

    def recurrent_states(self, number: int) -> list[str]:
        """Return the names of a block's recurrent states."""
        methods = self.programs[self.blocks[number].program].methods
        inputs = [methods[role].inputs for role in (PREFILL, DECODE) if role in methods]
        return [name for name in (inputs or [()])[0] if name.startswith(f"{RECURRENT_STATE}.")][
            : _MAX_RECURRENT_STATES + 1
        ]

    def shared_out(self, number: int) -> list[int]:
        """Return the indices of the shared values that a block computes."""
        return [value for value, maker in enumerate(self.shared) if maker == number]

    def shared_inputs_from(self, number: int) -> list[int]:
        """Return the indices of earlier blocks' shared values that this block or a later one uses."""
        needed = {value for block in self.blocks[number:] for value in block.shared_in}
        return [value for value in sorted(needed) if self.shared[value] < number]

    def residuals(self, number: int) -> list[str]:
        """Return the names of a block's residuals; empty if it can't save residuals."""
        return (
            self._residuals(number)
            if BACKWARD_SAVED in self.programs[self.blocks[number].program].methods
            else []
        )

    def _residuals(self, number: int) -> list[str]:
        method = self.programs[self.blocks[number].program].methods.get(FORWARD_SAVE)
        outputs = method.outputs[: _MAX_RESIDUALS + 1 + len(self.shared)] if method else ()
        return [name for name in outputs if name.startswith(f"{RESIDUAL}.")]

    def is_head(self, number: int) -> bool:
        """Return whether a block is a decoder's head."""
        return number >= self.head_start

    def is_expert(self, number: int) -> bool:
        """Return whether a block is an expert of a layer."""
        return self.programs[self.blocks[number].program].experts

    def block_groups(self, numbers: Iterable[int]) -> list[range]:
        """Group blocks, in order: the experts of a layer are one group, every other block is a group."""
        groups: list[range] = []
        for number in numbers:
            if groups and self.is_expert(number) and self.is_expert(groups[-1].start):
                groups[-1] = range(groups[-1].start, number + 1)
            else:
                groups.append(range(number, number + 1))
        return groups

    @cached_property
    def head_start(self) -> int:
        """Index of the first shard of a decoder's output head; the number of blocks for an encoder."""
        programs = [block.program for block in self.blocks]
        if self.is_encoder:
            return len(programs)
        return next((n + 1 for n in reversed(range(len(programs))) if programs[n] != programs[-1]), 0)

    @cached_property
    def first_with_weights(self) -> tuple[int, ...]:
        """For each block the index of the first one with the same weights file; some models share layers."""
        first: dict[str, int] = {}
        return tuple(first.setdefault(block.weights, number) for number, block in enumerate(self.blocks))

    def loaded_bytes(self, size: Callable[[str], int]) -> list[int]:
        """Return the bytes that loading each block's weights takes; `size` returns the size of a file.

        The first block takes none, because the rows of its embedding table are read from the file. A block
        that shares the weights of an earlier one takes none, too.
        """
        first = self.first_with_weights
        return [
            size(block.weights) if number and first[number] == number else 0
            for number, block in enumerate(self.blocks)
        ]

    @property
    def shard_size(self) -> int:
        """Number of tokens in a vocabulary shard."""
        return self.vocabulary_size // (len(self.blocks) - self.head_start)

    @property
    def trains_a(self) -> bool:
        """Whether the adapter is LoRA, with both matrices trained, and not LoRA-FA."""
        return any(module.trains_a for module in self.modules)

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder, whose outputs are pooled states."""
        return self.readout == "pooled"

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles that the chain supports: every block that a role needs has a method for it."""
        needing = {role: self.blocks[self.lowest_adapted :] for role in STEP_ROLES}
        if not self.is_encoder:
            needing |= {
                PREFILL: self.blocks[: self.head_start],
                DECODE: self.blocks,
                PREFILL_JVP: self.blocks[self.lowest_adapted : self.head_start],
                PREFILL_BACKWARD: self.blocks[self.lowest_adapted : self.head_start],
            }
        return tuple(
            role
            for role, blocks in needing.items()
            if all(
                role in self.programs[block.program].methods
                for block in blocks
                if role in STEP_ROLES or not self.programs[block.program].experts
            )
        )

    def longest(self, role: str) -> int:
        """Return the maximum number of tokens of a row in a role of training."""
        return self.bounds.tokens if CHUNK_ROLE.get(role) in self.roles else self.bounds.chunk

    def causal_table(self, number: int) -> TableSpec | None:
        """Return the causal mask of a block's attention; None if it has none."""
        tables = (self.tables[index] for index in self.blocks[number].tables)
        return next((table for table in tables if table.type == "causal"), None)

    def attends(self, number: int) -> bool:
        """Return whether a block has causal attention."""
        return self.causal_table(number) is not None

    @cached_property
    def lowest_adapted(self) -> int:
        """Index of the first block with an adapted module."""
        return next((number for number, block in enumerate(self.blocks) if block.modules), len(self.blocks))

    @cached_property
    def model(self) -> ModelSpec:
        """The description of the model for callers of an engine."""
        return ModelSpec(
            readout=self.readout,
            width=self.width,
            vocabulary_size=self.vocabulary_size,
            sequence_length=max(self.longest(FORWARD), 1),
            modules=self.modules,
            max_branched=self.bounds.chunk if self._takes_branches else 0,
        )

    @property
    def _takes_branches(self) -> bool:
        """Whether tokens affect each other only by causal attention, whose mask is a table."""
        recurs = any(self.recurrent_states(number) for number in range(self.head_start))
        types = {table.type for table in self.tables}
        return self.readout == "logprobs" and types <= _BRANCHING_TABLES and "causal" in types and not recurs

    def check_role(self, role: str) -> None:
        """Raise BundleError if the bundle doesn't have a role."""
        if role not in self.roles:
            raise BundleError(
                f"The bundle lacks the role {role}, it has {', '.join(self.roles)}.",
                remedy="Choose another estimator, or export it with that role.",
                code="role-missing",
            )

    def to_json(self) -> dict[str, Any]:
        """Return the `chain` block of a manifest."""
        block = asdict(self)
        for program, written in zip(self.programs, block["programs"], strict=True):
            for role, method in program.methods.items():
                written["methods"][role]["input_specs"] = list(map(str, method.input_specs))
                written["methods"][role]["output_specs"] = list(map(str, method.output_specs))
                if not method.method:
                    del written["methods"][role]["method"]
        return block

    @classmethod
    def from_json(cls, block: Any) -> Chain:
        """Read the `chain` block of a manifest; raises BundleError if a field is missing or invalid."""
        readout = block.get("readout") if isinstance(block, Mapping) else None
        if _checked("readout", readout, str) == "verbalizer":
            raise BundleError(
                "The bundle compares label words only, as version 0.1 did.",
                remedy="Export it again without --label-words: tasks compare their label words themselves.",
                code="bundle-of-label-words",
            )
        chain: Chain = _read(cls, block, "chain")
        return chain


def _spec_problems(method: Interface, where: str) -> Iterator[str]:
    """Yield problems of a method's specs; an engine compares them with the program later."""
    for what, names, specs in (
        ("inputs", method.inputs, method.input_specs),
        ("outputs", method.outputs, method.output_specs),
    ):
        if method.has_specs and len(specs) != len(names):
            yield f"{len(names)} {what} {where} have {len(specs)} specs"
        for spec in specs:
            if len(spec.sizes) > _MAX_AXES or any(not 1 <= size <= LARGEST_SIZE for size in spec.sizes):
                yield f"one of the {what} {where} is {format_value(spec)}"


# Fields that manifests of earlier versions lack.
_NEWER_FIELDS = (
    *("trains_a", "experts", "shared_in", "past", "shared", "chunk", "window"),
    *("input_specs", "output_specs", "method"),
)
_TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a text",
    list: "a list",
    Mapping: "a mapping",
}
_hints = cache(get_type_hints)


def _read(expected: Any, value: Any, name: str) -> Any:
    """Convert a JSON value to the type of a field; raises BundleError if that isn't possible."""
    parts = get_args(expected)
    if expected is TensorSpec:
        try:
            return TensorSpec.parse(_checked(name, value, str))
        except ValueError as error:
            raise _unreadable_error(name, value, str(error)) from None
    if isinstance(expected, type) and is_dataclass(expected):
        block = _checked(name, value, Mapping)
        present = [field for field in _hints(expected) if field in block or field not in _NEWER_FIELDS]
        return expected(
            **{field: _read(_hints(expected)[field], block.get(field), field) for field in present}
        )
    if get_origin(expected) is tuple:
        return tuple(_read(parts[0], each, f"one of {name}") for each in _checked(name, value, list))
    if get_origin(expected) is Mapping:
        named = _checked(name, value, Mapping).items()
        return {key: _read(parts[1], each, f"one of {name}") for key, each in named}
    if parts:  # an optional type
        return None if value is None else _read(parts[0], value, name)
    return _checked(name, value, expected)


def _checked(name: str, value: Any, expected: type) -> Any:
    """Return a JSON value, with tuples as lists; raises BundleError if it has another type."""
    value = [*value] if isinstance(value, tuple) else value
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise _unreadable_error(name, value, f"must be {_TYPE_NAMES[expected]}")
    return value


def _unreadable_error(name: str, value: Any, why: str) -> BundleError:
    return BundleError(
        f"The manifest's chain can't be read: {name} is {format_value(value)}, {why}.",
        remedy=_REMEDY,
        code="chain-unreadable",
    )
