"""Estimates of the size and the memory of a bundle, from the sizes of its model and of a step.

    files      weights as they are stored and as the engine packs them
    memory     of a process: runtime, weights, planned tensors, workspace, hidden states, adapter
    --memory   how many bytes of weights and activations fit into a memory limit

`WeightBytes` are computed from shapes. All else is a model fitted to measurements of the engine, against
which `scripts/bench/estimate.py` checks it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from prge.engine import MAX_HIDDEN_STATES
from prge.errors import BundleError, ConfigError, format_value
from prge.formats.adapter import adapter_size
from prge.formats.bundle import Bundle
from prge.formats.chain import Bounds, Chain
from prge.formats.signatures import BACKWARD, DECODE, FORWARD, FORWARD_SAVE, JVP, PREFILL, STEP_ROLES
from prge.model_spec import AdaptedModule, ModelSpec, matrices
from prge.numerics.vocabulary_shards import count_shards
from prge.objectives.examples import Example, sequences_of
from prge.objectives.scoring import LONG_TOKENS, MAX_LONG_TOKENS, MAX_SCORING_TOKENS
from prge.training.estimators.exact import MICROBATCH_TOKENS

MIB = 1 << 20
# Upper bound for the numbers in a manifest's outline.
_LARGEST_NUMBER = 1 << 44
GROUP_SIZE = 32

# Memory of a process with the driver and an engine before it loads a block, and mapped pages of its
# libraries; measured with Python 3.11 and ExecuTorch 1.5.1 on Linux x86_64.
RUNTIME_BYTES = {"native": 28 * MIB, "torch": 147 * MIB}
_LIBRARY_BYTES = {"native": 32 * MIB, "torch": 83 * MIB}
# Memory that loading the engine adds to a process that has already imported everything else.
ENGINE_BYTES = {"native": 10 * MIB, "torch": 180 * MIB}
# Memory per token of a tokenizer's vocabulary while it is loaded: 800 bytes for SmolLM2's 49,152 tokens, 950
# bytes for 260,000 tokens.
_BYTES_PER_VOCABULARY_TOKEN = 900
# Memory per token of the tokenized rows.
BYTES_PER_WAITING_TOKEN = 70
# Memory per trained value with exact gradients: its gradient, optimizer moments, and copies for the journal
# and the checkpoints. 75 to 79 bytes were measured, plus a few megabytes.
BYTES_PER_TRAINED_VALUE = 80
_TRAINING_BYTES = 8 * MIB
# Memory of the engine's own data structures per loaded method of a block.
_METHOD_BYTES = {FORWARD: 600_000, JVP: 750_000, BACKWARD: 250_000, FORWARD_SAVE: 600_000}
# Memory of the engine's own data structures for both methods of text generation, per loaded block.
_GENERATION_METHODS_BYTES = 700_000
# File size of a method in the program of a block type; BACKWARD includes the residual roles.
_PROGRAM_BYTES = {FORWARD: 21_000, JVP: 43_000, BACKWARD: 120_000, PREFILL: 14_000, DECODE: 14_000}
_HEAD_PROGRAM_BYTES = {FORWARD: 5_000, JVP: 9_000, BACKWARD: 28_000, PREFILL: 0, DECODE: 3_000}
_FLOAT = 4
# Parts of RunMemory that different work of one process shares.
_SHARED = ("runtime", "libraries", "tokenizer", "mapped", "weights", "workspace")
# Margins of `minimum_memory`, and of the minimum in an error: processes differ in their memory at start.
_MINIMUM_MARGIN = 1.05
_START_MARGIN = 1.03
# Tokens of a prefill chunk for contexts up to and above 512 tokens; attention score tensors alive at once.
_PREFILL_CHUNK, _LONG_CONTEXT, _PREFILL_SCORES = (128, 64), 512, 3
# Attention score tensors of a long row's chunk that are alive at once.
_CHUNK_SCORES = 6
# Bytes that the system reads from a file around one row of an embedding table.
_READ_AROUND = 64 << 10

# Resident memory of an export besides tensors, and its seconds on two idle cores of an x86 server.
_EXPORT_BYTES, _EXPORT_BYTES_PER_ROLE = 480 * 10**6, 85 * 10**6
_CALIBRATION_BYTES_PER_ROLE = 18 * 10**6
# Calibration adds a block type, and forward passes of 4,096 tokens.
_CALIBRATION_SECONDS_PER_ROLE, _CALIBRATION_SECONDS_PER_PARAMETER = 5.0, 6e-7
_SECONDS, _SECONDS_PER_ROLE, _SECONDS_PER_BLOCK, _SECONDS_PER_PARAMETER = 10.0, 11.0, 0.2, 4.5e-8
# Cost of the two residual roles, which `backward` includes, in units of a role.
_RESIDUAL_ROLES = 1.5


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step, or of scoring, that determine its memory.

    Attributes:
        role: role of its calls: `forward`, `jvp` or `backward`.
        sequences: number of sequences.
        tokens: tokens of the longest sequence.
        targets: maximum number of targets in a sequence.
        vocabulary_size: vocabulary size of the model.
        copies: copies of the adapter in a `forward` call; 1 for scoring.
        queries: directions of a `jvp` call.
        is_separable: see prge.objectives.objective.Objective.
        sequences_per_example: maximum number of sequences of an example, which an exact step computes
            together.
    """

    role: str
    sequences: int
    tokens: int
    targets: int
    vocabulary_size: int
    copies: int = 1
    queries: int = 0
    is_separable: bool = True
    sequences_per_example: int = 1

    @property
    def is_exact(self) -> bool:
        """Whether the step computes the exact gradient."""
        return self.role == BACKWARD

    @property
    def tokens_at_once(self) -> int:
        """Maximum number of tokens whose hidden states are held at once."""
        if self.is_exact:
            most = MICROBATCH_TOKENS if self.is_separable else self.sequences * self.tokens
        elif self.copies == 1 and not self.queries:
            most = MAX_SCORING_TOKENS if self.tokens <= LONG_TOKENS else MAX_LONG_TOKENS
        else:
            most = MAX_HIDDEN_STATES // (self.copies * (1 + self.queries))
        return min(self.sequences * self.tokens, max(most, self.sequences_per_example * self.tokens))

    @property
    def states(self) -> int:
        """Maximum number of hidden states held at once, counting every copy of the adapter."""
        return self.copies * self.tokens_at_once

    @property
    def sequences_at_once(self) -> int:
        """Number of sequences of the greatest length that are held at once."""
        return -(-self.tokens_at_once // self.tokens)

    @property
    def rows(self) -> int:
        """Number of rows held at once: `sequences_at_once` for every copy of the adapter."""
        return self.copies * self.sequences_at_once


@dataclass(frozen=True)
class LayerShape:
    """Linear layers of one shape.

    Attributes:
        inputs: input features.
        outputs: output features.
        count: number of layers.
        bias: whether they have a bias.
        below: whether they are below the first adapted block.
        of_experts: whether each belongs to an expert, a block of its own that is loaded when a token is
            routed to it.
    """

    inputs: int
    outputs: int
    count: int
    bias: bool = False
    below: bool = False
    of_experts: bool = False

    @property
    def numbers(self) -> int:
        """Number of weights of all layers."""
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, as an export would use it.

    Attributes:
        width: width of the hidden states.
        blocks: number of blocks.
        blocks_below: number of blocks below the first adapted one.
        heads: number of attention heads.
        head_width: width of an attention head.
        key_width: width of a token's keys of all heads.
        gelu: whether the activation is GELU, whose derivative consists of many operators.
        layers: frozen linear layers, without the output head.
        head: the output head; None for an encoder.
        modules: the adapted layers.
        table_numbers: number of elements of the token embedding tables.
        other_numbers: number of other parameters that stay float32: norms, biases, other tables.
        parameters: number of all parameters; tied ones count once.
        longest: tokens of the longest row.
    """

    width: int
    blocks: int
    blocks_below: int
    heads: int
    head_width: int
    key_width: int
    gelu: bool
    layers: tuple[LayerShape, ...]
    head: LayerShape | None
    modules: tuple[AdaptedModule, ...]
    table_numbers: int
    other_numbers: int
    parameters: int
    longest: int

    def to_json(self) -> dict[str, Any]:
        """Return the `outline` block of a manifest, without `modules` and `longest`, which its chain has."""
        return {name: value for name, value in asdict(self).items() if name not in ("modules", "longest")}

    @classmethod
    def from_json(cls, block: Any, chain: Chain) -> ModelSizes:
        """Read the `outline` block of a manifest; raises BundleError if a value is missing or invalid."""
        names = [field.name for field in fields(cls) if field.type == "int" and field.name != "longest"]
        try:
            return cls(
                **{name: _number(block[name], name in ("width", "blocks")) for name in names},
                gelu=bool(block["gelu"]),
                layers=tuple(_layer(layer) for layer in block["layers"]),
                head=None if block["head"] is None else _layer(block["head"]),
                modules=chain.modules,
                longest=chain.bounds.tokens,
            )
        except (KeyError, TypeError, ValueError):
            raise BundleError(
                f"The manifest's outline can't be read: {format_value(block)}",
                remedy="Export the bundle again.",
                code="outline-unreadable",
            ) from None

    @property
    def inner(self) -> int:
        """Width of the widest layer of a block."""
        return max((max(layer.inputs, layer.outputs) for layer in self.layers), default=self.width)

    @property
    def inner_values(self) -> int:
        """Number of tensors of width `inner` in a block at once: its widest layers' outputs and one more."""
        widest_layers = sum(
            min(layer.count, self.blocks) if layer.of_experts else layer.count
            for layer in self.layers
            if layer.outputs == self.inner
        )
        return round(widest_layers / self.blocks) + 1

    @property
    def shards(self) -> int:
        """Number of vocabulary shards of the output head; 0 for an encoder."""
        return count_shards(self.head.outputs, self.head.inputs) if self.head else 0

    @property
    def experts(self) -> int:
        """Number of experts of all layers."""
        return min((layer.count for layer in self.layers if layer.of_experts), default=0)

    @property
    def adapted_blocks(self) -> int:
        """Number of blocks from the first adapted one on."""
        return self.blocks - self.blocks_below


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the weights of a bundle.

    Attributes:
        layers: frozen layers in the files.
        transposed: transposed frozen layers in the files, for the backward pass.
        table: the embedding table, whose rows are read from the file.
        other: parameters that stay float32.
        packed: frozen layers as the engine packs them.
        packed_transposed: transposed frozen layers as the engine packs them.
        largest: the weights file of the largest block, which is the smallest limit for loaded weights.
    """

    layers: int
    transposed: int
    table: int
    other: int
    packed: int
    packed_transposed: int
    largest: int

    @property
    def stored(self) -> int:
        """Bytes of all weights files."""
        return self.layers + self.transposed + self.table + self.other


@dataclass(frozen=True)
class RunMemory:
    """Bytes of a process that trains, scores or generates, by cause.

    Attributes:
        runtime: the interpreter with the driver and the engine.
        libraries: mapped pages of libraries, which the system can reclaim.
        tokenizer: the tokenizer. A run that writes no text frees it before it loads the engine: only what it
            takes beyond the memory of steps counts.
        mapped: mapped pages of weights and other files, which the system can reclaim.
        weights: weights in anonymous memory.
        methods: the engine's data structures of loaded methods.
        arena: tensors that programs plan.
        workspace: XNNPACK's workspace.
        states: hidden states between blocks, and activation checkpoints or the KV cache.
        saved: the largest residuals that an exact step holds.
        adapter: copies of the adapter, and the optimizer's arrays.
        directions: random directions.
    """

    runtime: int
    libraries: int
    tokenizer: int
    mapped: int
    weights: int
    methods: int
    arena: int
    workspace: int
    states: int
    saved: int
    adapter: int
    directions: int

    @property
    def total(self) -> int:
        """All resident memory."""
        return sum(asdict(self).values())

    @property
    def anonymous(self) -> int:
        """Anonymous memory: without the pages of files."""
        return self.total - self.libraries - self.mapped

    def total_starting_from(self, held: int, engine: str) -> int:
        """Return the resident memory of a process that holds `held` bytes before it loads an engine."""
        return self.total - self.runtime - self.libraries - self.tokenizer + held + ENGINE_BYTES[engine]

    def with_work_in_turn(self, other: RunMemory) -> RunMemory:
        """Return the memory of a process that does both in turn, with the same engine and weights."""
        both = {name: (value, getattr(other, name)) for name, value in asdict(self).items()}
        return RunMemory(**{name: max(pair) if name in _SHARED else sum(pair) for name, pair in both.items()})

    def to_json(self) -> dict[str, int]:
        """Return the parts and their sums, with `_bytes` appended to their names."""
        sums = {"anonymous": self.anonymous, "total": self.total}
        return {f"{name}_bytes": value for name, value in {**asdict(self), **sums}.items()}


def step_shape(
    role: str, examples: Sequence[Example], sequences: int, model: ModelSpec, **sizes: Any
) -> StepShape:
    """Return the shape of steps whose sequences are as long as the longest one of the examples.

    Args:
        role: role of the steps.
        examples: the examples; if there are none, the model's longest sequence is assumed.
        sequences: number of sequences in a step.
        model: the bundle's model.
        sizes: further fields of StepShape.
    """
    longest = max(
        (len(sequence.tokens) for sequence in sequences_of(examples)), default=model.sequence_length
    )
    targets = max((len(sequence.targets) for sequence in sequences_of(examples)), default=longest - 1)
    return StepShape(role, sequences, longest, max(targets, 1), model.vocabulary_size, **sizes)


def estimate_weight_bytes(
    outline: ModelSizes, scheme: str, int8_table: bool, roles: Collection[str]
) -> WeightBytes:
    """Compute the bytes of the weights of a bundle.

    Args:
        outline: sizes of the model.
        scheme: quantization scheme of the frozen layers: `fp32`, `8da8w` or `8da4w`.
        int8_table: whether the embedding table is int8.
        roles: roles of the bundle.
    """
    head = [outline.head] if outline.head else []
    head_scheme = "8da8w" if scheme == "8da4w" else scheme
    schemes = [(layer, scheme) for layer in outline.layers] + [(layer, head_scheme) for layer in head]
    # The backward pass needs transposed weights above the first adapter, in at least int8.
    backward = [
        (replace(layer, inputs=layer.outputs, outputs=layer.inputs, bias=False), head_scheme)
        for layer, _ in schemes
        if BACKWARD in roles and not layer.below
    ]
    expert_bytes = sum(_stored(layer, scheme) for layer, scheme in (*schemes, *backward) if layer.of_experts)
    frozen = (module for module in outline.modules if not module.trains_a)
    lora_a = sum(module.rank * module.in_features for module in frozen)
    stored = sum(_stored(layer, scheme) for layer, scheme in schemes)
    transposed = sum(_stored(layer, scheme) for layer, scheme in backward)
    head_bytes = sum(_stored(layer, head_scheme) for layer in head) * (2 if BACKWARD in roles else 1)
    biases = sum(layer.outputs * layer.count for layer, _ in schemes if layer.bias)
    table = outline.table_numbers + 4 * (outline.table_numbers // outline.width)
    return WeightBytes(
        layers=stored,
        transposed=transposed,
        table=table if int8_table else 4 * outline.table_numbers,
        other=4 * (outline.other_numbers + biases + lora_a * (2 if BACKWARD in roles else 1)),
        packed=sum(_packed(layer, scheme) for layer, scheme in schemes),
        packed_transposed=sum(_packed(layer, scheme) for layer, scheme in backward),
        largest=max(
            head_bytes // max(outline.shards, 1),
            (stored + transposed - head_bytes - expert_bytes) // outline.blocks,
            expert_bytes // max(outline.experts, 1),
        ),
    )


def bundle_weight_bytes(
    outline: ModelSizes, chain: Chain, size: Callable[[str], int], scheme: str | None
) -> WeightBytes:
    """Compute the bytes of a bundle's weights; `size` returns the size of a file by its name."""
    is_int8 = size(chain.blocks[0].weights) < 4 * outline.table_numbers
    weights = estimate_weight_bytes(outline, scheme or "fp32", is_int8, chain.roles)
    return replace(weights, largest=max(chain.loaded_bytes(size)))


def estimate_program_bytes(outline: ModelSizes, roles: Collection[str]) -> int:
    """Estimate the bytes of all programs: embedding, block types, output head."""
    of_all = {FORWARD, *(role for role in roles if role not in STEP_ROLES)}
    below = sum(_PROGRAM_BYTES[role] for role in of_all) if outline.blocks_below else 0
    head = sum(_HEAD_PROGRAM_BYTES[role] for role in roles) if outline.head else 0
    return 2_000 + below + sum(_PROGRAM_BYTES[role] for role in roles) + head


def estimate_run_memory(
    outline: ModelSizes,
    shape: StepShape,
    weights: WeightBytes,
    roles: Collection[str],
    engine: str,
    loaded: int | None = None,
    *,
    keeps_tokenizer: bool = False,
) -> RunMemory:
    """Estimate the memory of a process that trains or scores.

    Args:
        outline: sizes of the model.
        shape: sizes of a step.
        weights: bytes of the bundle's weights.
        roles: roles of the bundle.
        engine: `native` or `torch`.
        loaded: most bytes of weights that stay loaded, and, if all weights fit, of residuals; None: no limit.
        keeps_tokenizer: whether the process also writes text.
    """
    bounds = Bounds.for_rows(outline.longest, is_encoder=outline.head is None)
    saved = _residual_bytes(outline, shape, weights, loaded) if shape.is_exact and engine == "native" else 0
    methods = {FORWARD, BACKWARD, *([FORWARD_SAVE] if saved else [])} if shape.is_exact else {shape.role}
    call = _largest_call(outline, shape, bounds)
    if engine == "native":
        arena = _arena(outline, shape, bounds, call)
    else:
        arena = _torch_arena(outline, shape.role, methods, roles, bounds)
    state = 4 * shape.states * (1 + shape.queries) * outline.width
    checkpoints = _checkpoints(outline, shape, bounds, state) if shape.is_exact else 0
    in_file = loaded is not None and checkpoints > loaded
    # The embedding isn't adapted: it is computed once for all copies.
    table = min(weights.table, shape.tokens_at_once * _READ_AROUND)
    held = _loaded_weights(weights, shape.is_exact, loaded) + table
    width = sum(matrix.rank + matrix.width for matrix in matrices(outline.modules))
    trained_values = adapter_size(outline.modules)
    if shape.is_exact:
        adapter = _TRAINING_BYTES + BYTES_PER_TRAINED_VALUE * trained_values
    else:
        adapter = 4 * shape.copies * trained_values
    tokenizer = _BYTES_PER_VOCABULARY_TOKEN * shape.vocabulary_size
    memory = RunMemory(
        runtime=RUNTIME_BYTES[engine],
        libraries=_LIBRARY_BYTES[engine],
        tokenizer=tokenizer if keeps_tokenizer else 0,
        # One of the activation checkpoints in a file is in memory at a time: pages are released after use.
        mapped=(state if in_file else 0) + (held if engine == "native" else 0),
        weights=0 if engine == "native" else held,
        methods=outline.blocks * sum(_METHOD_BYTES[name] for name in methods),
        arena=arena,
        workspace=_run_workspace(outline, shape, call),
        # The inputs, the outputs and their collection; and the activation checkpoints of an exact step.
        states=3 * state + (0 if in_file else checkpoints),
        saved=saved,
        adapter=adapter,
        # Float32 factors of all directions of a step, and the int8 signs that they are computed from.
        directions=shape.queries * shape.sequences * width * (4 + 1),
    )
    if keeps_tokenizer:
        return memory
    return replace(memory, tokenizer=max(0, tokenizer - (memory.anonymous - memory.runtime)))


@dataclass(frozen=True)
class _Call:
    """The sizes of a call of a block: rows, queries, tokens of each row, and targets of the output head."""

    rows: int
    queries: int
    length: int
    targets: int


def _largest_call(outline: ModelSizes, shape: StepShape, bounds: Bounds) -> _Call:
    """Return the sizes of the largest call of a block in a step; a row in chunks has calls of its own."""
    queries, length = min(shape.queries, bounds.queries), shape.tokens
    rows = min(shape.copies, bounds.copies) * min(shape.sequences_at_once, bounds.batch)
    rows = min(rows, bounds.rows_together(length, outline.width, 1 + queries))
    targets = min(shape.rows * shape.targets, bounds.states // (1 + queries))
    return _Call(rows, queries, min(length, bounds.chunk), targets)


def _arena(outline: ModelSizes, shape: StepShape, bounds: Bounds, call: _Call) -> int:
    """Estimate the bytes of the arena, which the programs of blocks and of the output head share.

    About half of the smaller arena lies outside of the memory that the larger one touches.
    """
    length = shape.tokens
    past = _past_bytes(outline, bounds, call.queries, length) if length > call.length else 0
    block = _block_arena(outline, shape.role, call.rows, call.queries, call.length)
    head = _head_arena(outline, call.queries, call.targets)
    return past + max(block, head) + min(block, head) // 2


def _run_workspace(outline: ModelSizes, shape: StepShape, call: _Call) -> int:
    """Estimate the bytes of XNNPACK's workspace; while it grows, the old and the new one exist together."""
    role = JVP if call.queries else FORWARD
    forward = max(
        _workspace(outline, role, call.rows, call.queries, call.length), _head_logits(outline, call.targets)
    )
    backward = _workspace(outline, BACKWARD, call.rows, 0, call.length) if shape.is_exact else 0
    return forward + backward if backward > forward else forward


def _checkpoints(outline: ModelSizes, shape: StepShape, bounds: Bounds, state: int) -> int:
    """Estimate the bytes of activation checkpoints, and of keys and values of a chunked row."""
    # Layers of experts have wider hidden states: expert inputs, expert outputs, and values passed through.
    states_per_block = 4 if outline.experts else 1
    checkpoints = (states_per_block * outline.adapted_blocks + 1) * state
    if shape.tokens > bounds.chunk:
        checkpoints += outline.adapted_blocks * shape.states * 8 * outline.key_width
    return checkpoints


def _loaded_weights(weights: WeightBytes, has_backward: bool, loaded: int | None) -> int:
    """Estimate the bytes of the weights that stay loaded, as the engine packs them."""
    packed = weights.packed + (weights.packed_transposed if has_backward else 0)
    if loaded is None:
        return packed
    # The limit counts whole files, of which a run maps only the parts that its roles need.
    return round(packed * min(1, loaded / (weights.layers + weights.transposed)))


def _past_bytes(outline: ModelSizes, bounds: Bounds, queries: int, length: int) -> int:
    """Estimate the bytes of attention scores of a long row's chunk, and of a block's keys and values."""
    keys = 2 * outline.key_width * length
    sizes = ((chunk.stop, chunk.stop - chunk.start) for chunk in bounds.chunks(length, outline.heads))
    scores: int = max(outline.heads * size * end for end, size in sizes)
    return 4 * (1 + queries) * (2 * keys + _CHUNK_SCORES * scores)


def _residual_bytes(outline: ModelSizes, shape: StepShape, weights: WeightBytes, loaded: int | None) -> int:
    """Estimate the maximum bytes of residuals in an exact step."""
    bounds = Bounds.for_rows(outline.longest, is_encoder=outline.head is None)
    frozen = sum(module.rank for module in outline.modules if not module.trains_a)
    values = frozen + sum(
        layer.outputs * layer.count for layer in outline.layers if not layer.below and not layer.of_experts
    )
    residuals = 0
    if shape.tokens <= bounds.chunk:
        residuals = values * shape.states
    if outline.head is not None:
        residuals += outline.head.outputs * shape.rows * shape.targets
    left = 4 * residuals if loaded is None else max(0, loaded - weights.layers - weights.transposed)
    return min(4 * residuals, left)


def _torch_arena(
    outline: ModelSizes, role: str, loaded: Collection[str], roles: Collection[str], bounds: Bounds
) -> int:
    """Estimate the bytes of the arenas of the `torch` engine, of which every method has its own.

    Opening a program needs the memory of its largest method once more.
    """
    largest = {
        name: _block_arena(outline, name, *sizes, outline.longest)
        for name, sizes in _largest_rows(bounds).items()
    }
    below = outline.blocks_below * largest[FORWARD]
    adapted = outline.adapted_blocks * sum(largest[name] for name in loaded)
    opening = max(largest[name] for name in roles if name in STEP_ROLES)
    head = _head_arena(outline, bounds.queries if role == JVP else 0, bounds.states)
    return below + adapted + opening + head


def estimate_generation_memory(
    outline: ModelSizes,
    vocabulary_size: int,
    weights: WeightBytes,
    engine: str,
    slots: int,
    context: int,
    loaded: int | None = None,
    cache_bytes: int = 4,
    adapters: int = 1,
) -> RunMemory:
    """Estimate the memory of a process that generates text.

    Args:
        outline: sizes of the model.
        vocabulary_size: number of tokens in the vocabulary.
        weights: bytes of the bundle's weights.
        engine: `native` or `torch`.
        slots: number of sequences at once.
        context: maximum number of tokens in a sequence.
        loaded: maximum bytes of weights that stay loaded; None: no limit.
        cache_bytes: bytes of a value in the KV cache: 4 or 2.
        adapters: number of adapters in use.
    """
    chunk, heads = min(_PREFILL_CHUNK[context > _LONG_CONTEXT], outline.longest, context), outline.heads
    values_per_block = outline.key_width * 2 * context
    cache = slots * values_per_block * (cache_bytes * outline.blocks + (4 if cache_bytes < _FLOAT else 0))
    # Attention scores of a prefill chunk, or of one token of each sequence, with all earlier tokens.
    scores = _FLOAT * heads * context * max(_PREFILL_SCORES * chunk, slots)
    held = _loaded_weights(weights, has_backward=False, loaded=loaded)
    held += min(weights.table, (chunk + slots) * _READ_AROUND)
    adapter_values = sum(
        module.rank * (module.in_features + module.out_features) for module in outline.modules
    )
    return RunMemory(
        runtime=RUNTIME_BYTES[engine],
        libraries=_LIBRARY_BYTES[engine],
        tokenizer=_BYTES_PER_VOCABULARY_TOKEN * vocabulary_size,
        mapped=held if engine == "native" else 0,
        weights=0 if engine == "native" else held,
        methods=outline.blocks * _GENERATION_METHODS_BYTES,
        arena=_block_arena(outline, FORWARD, 1, 0, chunk) + scores,
        workspace=max(_workspace(outline, FORWARD, 1, 0, chunk), _head_logits(outline, slots)),
        # Logits of each sequence exist four times: from the engine, joined, as probabilities, and sorted.
        states=_FLOAT * (3 * chunk * outline.width + 4 * slots * vocabulary_size) + cache,
        saved=0,
        # The bundle's adapter, the adapters in use, and a copy for each sequence.
        adapter=_FLOAT * adapter_values * (1 + adapters + slots),
        directions=0,
    )


@dataclass(frozen=True)
class Budget:
    """How a memory limit of a process is used.

    Attributes:
        limit: maximum bytes of the process, including pages of mapped files.
        loaded: most bytes of weights that stay loaded, and, if all weights fit, of residuals.
        predicted: predicted peak of the process, in bytes.
    """

    limit: int
    loaded: int
    predicted: int

    def to_json(self) -> dict[str, int]:
        """Return limit and prediction as run.json has them."""
        return {"limit_bytes": self.limit, "predicted_bytes": self.predicted}


def fit_budget(
    limit: int, predicted: Callable[[int], int], weights: WeightBytes, process: str, remedy: str
) -> Budget:
    """Return the largest budget of loaded weights and residuals that keeps a process within a memory limit.

    Args:
        limit: maximum bytes of the process.
        predicted: returns the predicted bytes of the process for a number of loaded bytes.
        weights: bytes of the bundle's weights.
        process: name of the process in messages, such as `this run`.
        remedy: what the user can do if the limit is too low.

    Raises:
        ConfigError: the limit is too low even if only the largest block is loaded; the message has the
            minimum.
    """
    smallest = weights.largest
    if (least := predicted(smallest)) > limit:
        minimum = math.ceil(_START_MARGIN * least / 1e6) * 10**6
        raise ConfigError(
            f"--memory {format_megabytes(limit)} is too little:",
            [f"{process} needs at least {format_megabytes(minimum)}"],
            remedy=remedy,
            code="memory-too-little",
        )
    loaded = bisect_right(range(smallest, max(limit, smallest) + 1), limit, key=predicted) + smallest - 1
    return Budget(limit, loaded, predicted(loaded))


def bundle_costs(bundle: Bundle) -> tuple[ModelSizes, WeightBytes]:
    """Return the sizes of an opened bundle's model and the bytes of its weights.

    Raises:
        BundleError: the manifest has no outline, as in bundles of earlier versions, or the outline is
            invalid.
    """
    manifest = bundle.manifest
    if "outline" not in manifest:
        raise BundleError(
            f"Cannot estimate the memory of {bundle.folder}: an earlier version exported it.",
            remedy="Leave --memory out, or export the bundle again.",
            code="outline-missing",
        )
    outline = ModelSizes.from_json(manifest["outline"], bundle.chain)
    quantization = manifest.get("quantization")
    scheme = quantization.get("scheme") if isinstance(quantization, dict) else None
    return outline, bundle_weight_bytes(
        outline, bundle.chain, lambda name: int(manifest["files"][name]["bytes"]), scheme
    )


def minimum_memory(bundle: Bundle, role: str, rows: int, length: int, held: int | None = None) -> int:
    """Return the smallest `--memory` of a run on the native engine, with a margin of 5 %.

    Args:
        bundle: an opened bundle.
        role: role of the run's steps.
        rows: number of sequences in a call.
        length: tokens of each sequence.
        held: bytes that the process holds before it loads the engine; None: as measured on the reference
            machine.
    """
    outline, weights = bundle_costs(bundle)
    shape = StepShape(role, rows, length, length - 1, bundle.chain.vocabulary_size)
    taken = estimate_run_memory(outline, shape, weights, bundle.chain.roles, "native", weights.largest)
    return round(
        _MINIMUM_MARGIN * (taken.total if held is None else taken.total_starting_from(held, "native"))
    )


def memory_table(
    outline: ModelSizes, shapes: Mapping[Any, StepShape], weights: WeightBytes, roles: Collection[str]
) -> list[dict[str, Any]]:
    """Return the memory of runs on the native engine, with all weights or one block's loaded.

    Args:
        outline: sizes of the model.
        shapes: sizes of a step by estimator.
        weights: bytes of the bundle's weights.
        roles: roles of the bundle.

    Returns:
        Two rows for each estimator. `loaded_bytes`: maximum bytes of loaded weights, None for all;
        `anonymous_bytes`: memory without pages of files; `resident_bytes`: the peak with pages of files,
        which `--memory` limits.
    """
    rows = []
    for estimator, shape in shapes.items():
        for loaded in (None, weights.largest):
            memory = estimate_run_memory(outline, shape, weights, roles, "native", loaded)
            sizes = {"anonymous_bytes": memory.anonymous, "resident_bytes": memory.total}
            rows.append({"estimator": estimator, "loaded_bytes": loaded, **sizes})
    return rows


def format_memory_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Format a `memory_table` as lines of text."""
    yield f"  {'estimator':<12}{'loaded':<14}{'anonymous':>12}{'--memory':>12}"
    for row in rows:
        loaded = "everything" if row["loaded_bytes"] is None else "one block"
        sizes = "".join(
            f"{format_megabytes(row[name]):>12}" for name in ("anonymous_bytes", "resident_bytes")
        )
        yield f"  {row['estimator']:<12}{loaded:<14}{sizes}"


def estimate_export_memory(
    outline: ModelSizes, scheme: str, roles: Collection[str], calibrates: bool = False
) -> int:
    """Estimate the peak memory of an export, in bytes.

    It is reached while blocks are verified: the engine's arena holds the largest call of a block, and the
    embedding table, the largest tensor, exists several times.

    Args:
        outline: sizes of the model.
        scheme: quantization scheme of the frozen layers.
        roles: roles of the bundle.
        calibrates: whether the export calibrates, which adds a block type for layers that stay int8.
    """
    bounds = Bounds.for_rows(outline.longest, is_encoder=outline.head is None)
    sizes = _largest_rows(bounds)
    arena = max(_block_arena(outline, role, *sizes[role], outline.longest) for role in sizes if role in roles)
    verification = arena + (16 if scheme == "fp32" else 5) * outline.table_numbers
    role_bytes = (_EXPORT_BYTES_PER_ROLE + calibrates * _CALIBRATION_BYTES_PER_ROLE) * len(roles)
    return _EXPORT_BYTES + role_bytes + verification


def estimate_export_seconds(outline: ModelSizes, roles: Collection[str], calibrates: bool = False) -> float:
    """Estimate the seconds of an export, roughly, on two idle cores of an x86 server."""
    role_count = len(roles) + (_RESIDUAL_ROLES if BACKWARD in roles else 0)
    lowering = _SECONDS_PER_ROLE * (role_count + (1 if outline.blocks_below else 0))
    blocks = outline.blocks + outline.experts
    seconds = _SECONDS + lowering + _SECONDS_PER_BLOCK * blocks + _SECONDS_PER_PARAMETER * outline.parameters
    if calibrates:
        seconds += (
            _CALIBRATION_SECONDS_PER_ROLE * role_count
            + _CALIBRATION_SECONDS_PER_PARAMETER * outline.parameters
        )
    return seconds


def format_megabytes(count: float) -> str:
    """Format bytes as in flags: `331 MB`, where 1 MB is a million bytes."""
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count:.0f} bytes"


def format_bytes(count: object) -> str:
    """Format bytes with a binary unit, such as `3.4 MiB`; `unknown` if `count` is not a number."""
    if not isinstance(count, int | float):
        return "unknown"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _number(value: Any, least: int = 1) -> int:
    """Return a number of an outline; raises ValueError if it is invalid."""
    if type(value) is not int or not least <= value < _LARGEST_NUMBER:
        raise ValueError
    return value


def _layer(block: Any) -> LayerShape:
    """Read a layer of an outline; raises KeyError, TypeError or ValueError if it is invalid."""
    inputs, outputs, count = (_number(block[name]) for name in ("inputs", "outputs", "count"))
    # Bundles of earlier versions have no experts, and lack this key.
    of_experts = bool(block.get("of_experts", False))
    return LayerShape(inputs, outputs, count, bool(block["bias"]), bool(block["below"]), of_experts)


def _stored(layer: LayerShape, scheme: str) -> int:
    """Return the bytes of layers in the files: values and their scales."""
    if scheme == "fp32":
        return 4 * layer.numbers
    if scheme == "8da4w" and layer.inputs % GROUP_SIZE == 0:
        # Half a byte per value, and two bytes for the scale of each group.
        return layer.numbers // 2 + 2 * layer.numbers // GROUP_SIZE
    return layer.numbers + 4 * layer.outputs * layer.count


def _packed(layer: LayerShape, scheme: str) -> int:
    """Return the bytes of layers as the engine packs them, with biases and sums of the integers."""
    if scheme == "fp32":
        return 4 * layer.numbers + 4 * layer.outputs * layer.count
    in_groups = scheme == "8da4w" and layer.inputs % GROUP_SIZE == 0
    sums = 4 * (layer.numbers // GROUP_SIZE if in_groups else layer.outputs * layer.count)
    return _stored(layer, scheme) + sums + 4 * layer.outputs * layer.count


def _largest_rows(bounds: Bounds) -> dict[str, tuple[int, int]]:
    """Return the rows and queries of the largest call of a block, by role."""
    return {
        FORWARD: (bounds.copies * bounds.batch, 0),
        JVP: (bounds.batch, bounds.queries),
        BACKWARD: (bounds.batch, 0),
    }


def _block_arena(outline: ModelSizes, role: str, rows: int, queries: int, length: int) -> int:
    """Estimate the bytes that a block's program plans for tensors between its delegates.

    These are the queries, hidden states and keys that are alive at once. `jvp` adds attention scores and the
    two terms of their derivative; `backward` adds the scores with their gradients, and the terms of the
    activation's derivative.
    """
    width, keys, scores = outline.heads * outline.head_width, outline.key_width, outline.heads * length
    values = {
        FORWARD: 3 * width + 5 * keys,
        JVP: (1 + queries) * (3 * width + 5 * keys // 2) + 3 * queries * scores,
        BACKWARD: 7 * width + (6 if outline.gelu else 1) * outline.inner + 2 * scores,
    }
    return 4 * rows * length * values[role]


def _head_logits(outline: ModelSizes, targets: int) -> int:
    """Return the bytes of the logits of a vocabulary shard."""
    return 4 * targets * outline.head.outputs // outline.shards if outline.head is not None else 0


def _head_arena(outline: ModelSizes, queries: int, targets: int) -> int:
    """Estimate the bytes that a vocabulary shard plans: logits, exponentials, and their tangents."""
    return 2 * (1 + queries) * _head_logits(outline, targets)


def _workspace(outline: ModelSizes, role: str, rows: int, queries: int, length: int) -> int:
    """Estimate the bytes of XNNPACK's workspace: tensors that a block's largest delegate holds.

    The peak is at the activation. It holds the outputs of the widest layers and one more tensor; `jvp` adds
    the tangents of all but one of them, or the terms of GELU's derivative; `backward` adds two gradients, of
    which a quarter is saved by quantization.
    """
    values = outline.inner_values * outline.inner
    if role == JVP:
        values += queries * (5 if outline.gelu else outline.inner_values - 1) * outline.inner
    elif role == BACKWARD:
        values += 7 * outline.inner // 4
    else:
        values = max(values, 2 * outline.heads * length)
    return 4 * rows * length * values
