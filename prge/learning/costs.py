"""What a bundle costs, by arithmetic alone: numbers of a model and of a call in; bytes out.

    files      weights as they are stored, and what the engine packs of them
    memory     of a process: runtime, weights, planned values, workspace, states between blocks, adapter
    --memory   what a bound of that memory leaves for weights and activations

Weights follow from shapes. The rest is modelled on what the engine was measured to take;
`scripts/bench/estimate.py` holds all of it against the engine.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from prge.engine import STATES_AT_ONCE
from prge.errors import BundleError, ConfigError, shown
from prge.files.adapter import adapter_size
from prge.files.bundle import Bundle
from prge.files.chain import Bounds, Chain
from prge.files.signatures import BACK, DECODE, PREFILL, SAVE, STACK, STEP_ROLES, TANGENT
from prge.learning.estimators.exact import MICROBATCH_TOKENS
from prge.learning.evaluation import SCORED_TOKENS
from prge.learning.examples import Example, sequences_of
from prge.learning.vocabulary import pieces_of
from prge.model_spec import AdaptedModule, ModelSpec, matrices

MIB = 1 << 20
# The most of a number that an outline is made of.
_LARGEST_NUMBER = 1 << 44
GROUP_SIZE = 32

# Memory of a process with the driver and an engine, before it loads a block, and pages of its libraries:
# Python 3.11 and ExecuTorch 1.5.1 on Linux x86_64.
RUNTIME_BYTES = {"native": 28 * MIB, "torch": 147 * MIB}
_LIBRARY_BYTES = {"native": 32 * MIB, "torch": 83 * MIB}
# Of these, what the engine brings into a process that has imported all else.
ENGINE_BYTES = {"native": 10 * MIB, "torch": 180 * MIB}
# Of a word of a tokenizer, while it is read: 800 of SmolLM2's 49,152, 950 of 260,000 words.
_BYTES_OF_A_WORD = 900
# Of a token of rows that wait for their turn.
BYTES_OF_A_TOKEN = 70
# Of a number that exact gradients train, with its gradient, moments, and copies for journal and checkpoints;
# 75 to 79 were measured, and some megabytes besides.
BYTES_OF_A_NUMBER = 80
_BYTES_OF_TRAINING = 8 * MIB
# Of a block's method in the engine's own tables.
_METHOD_BYTES = {STACK: 600_000, TANGENT: 750_000, BACK: 250_000, SAVE: 600_000}
# Of a block's two methods that write texts.
_TEXT_METHOD_BYTES = 700_000
# Of a kind's method in its program; of the way back with those that save.
_PROGRAM_BYTES = {STACK: 21_000, TANGENT: 43_000, BACK: 120_000, PREFILL: 14_000, DECODE: 14_000}
_PROGRAM_BYTES_OF_HEAD = {STACK: 5_000, TANGENT: 9_000, BACK: 28_000, PREFILL: 0, DECODE: 3_000}
_FLOAT = 4
_ROOM = 1.05
_STARTS = 1.03
# Tokens of a prompt that pass a block together, of a short and of a long text, and their scores at once.
_TEXT_PIECE, _LONG_TEXT, _SCORES_OF_A_TEXT = (128, 64), 512, 3
# Of scores as large as a long row's piece has, so many are there at once.
_SCORES_OF_A_PIECE = 6
# What the system reads of a file around a row of a table.
_READ_AROUND = 64 << 10

# Of an export: resident memory besides arrays, and seconds of two idle cores of an x86 server.
_EXPORT_BYTES, _EXPORT_BYTES_OF_ROLE = 480 * 10**6, 85 * 10**6
_CALIBRATED_BYTES_OF_ROLE = 18 * 10**6
# Of an export that calibrates, besides: another kind of block, and passes over 4,096 tokens.
_CALIBRATED_SECONDS_OF_ROLE, _CALIBRATED_SECONDS = 5.0, 6e-7
_SECONDS, _SECONDS_OF_ROLE, _SECONDS_OF_BLOCK, _SECONDS_OF_NUMBER = 10.0, 11.0, 0.2, 4.5e-8
# What the two roles that `back` brings along take, in roles.
_SAVING_ROLES = 1.5


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step, or of scoring, as far as its memory follows from them.

    Attributes:
        role: of its calls: `stack`, `tangent` or `back`.
        sequences: of the step.
        tokens: of its longest sequence.
        targets: of a sequence, at most.
        vocabulary_size: of the model.
        copies: of the adapter in a `stack`; scoring has one.
        queries: directions of a `tangent`.
        is_separate: see prge.learning.objectives.Objective.
        of_example: sequences of an example, at most, which an exact step computes together.
    """

    role: str
    sequences: int
    tokens: int
    targets: int
    vocabulary_size: int
    copies: int = 1
    queries: int = 0
    is_separate: bool = True
    of_example: int = 1

    @property
    def is_exact(self) -> bool:
        """Whether it computes the gradient itself."""
        return self.role == BACK

    @property
    def tokens_together(self) -> int:
        """Tokens of the sequences whose states are there at once."""
        if self.is_exact:
            most = MICROBATCH_TOKENS if self.is_separate else self.sequences * self.tokens
        elif self.copies == 1 and not self.queries:
            most = SCORED_TOKENS
        else:
            most = STATES_AT_ONCE // (self.copies * (1 + self.queries))
        return min(self.sequences * self.tokens, max(most, self.of_example * self.tokens))

    @property
    def states(self) -> int:
        """The same with every copy of the adapter."""
        return self.copies * self.tokens_together

    @property
    def together(self) -> int:
        """Sequences of the longest length that make so many tokens."""
        return -(-self.tokens_together // self.tokens)

    @property
    def rows(self) -> int:
        """The same with every copy of the adapter."""
        return self.copies * self.together


@dataclass(frozen=True)
class Layer:
    """Linear layers of one shape: `count` of them below the first adapted block, or from it on.

    `of_experts`: each belongs to an expert, a block of its own that is read when a token asks for it.
    """

    inputs: int
    outputs: int
    count: int
    bias: bool = False
    below: bool = False
    of_experts: bool = False

    @property
    def numbers(self) -> int:
        """Weights of all of them."""
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True)
class Outline:
    """A model in numbers, as an export would use it.

    `layers` are the frozen linear layers without the vocabulary head, which is `head`; `key_width` is that
    of a token's keys; `gelu` tells whether blocks activate with GELU, whose derivative is made of many
    operators; `table_numbers` the entries of tables of tokens, `other_numbers` what stays float32: norms,
    biases, other tables. `parameters` counts all, tied ones once. `blocks_below` lie under the first adapted
    layer, one of `modules`. `longest` are the tokens of the longest row.
    """

    width: int
    blocks: int
    blocks_below: int
    heads: int
    head_width: int
    key_width: int
    gelu: bool
    layers: tuple[Layer, ...]
    head: Layer | None
    modules: tuple[AdaptedModule, ...]
    table_numbers: int
    other_numbers: int
    parameters: int
    longest: int

    def to_json(self) -> dict[str, Any]:
        """A manifest's `outline` block, without what its chain has: modules and the longest row."""
        return {name: value for name, value in asdict(self).items() if name not in ("modules", "longest")}

    @classmethod
    def from_json(cls, block: Any, chain: Chain) -> Outline:
        """Read a manifest's `outline` block; raises BundleError on anything missing or of another type."""
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
                f"the manifest's outline can't be read: {shown(block)}",
                remedy="export the bundle again",
                code="outline-unreadable",
            ) from None

    @property
    def inner(self) -> int:
        """Width of the widest layer of a block."""
        return max((max(layer.inputs, layer.outputs) for layer in self.layers), default=self.width)

    @property
    def inner_values(self) -> int:
        """How many values of that width a block holds at once: those layers' results, and one more."""
        wide = sum(
            min(layer.count, self.blocks) if layer.of_experts else layer.count
            for layer in self.layers
            if layer.outputs == self.inner
        )
        return round(wide / self.blocks) + 1

    @property
    def pieces(self) -> int:
        """Blocks of the head, each with a piece of the vocabulary; an encoder has none."""
        return pieces_of(self.head.outputs, self.head.inputs) if self.head else 0

    @property
    def experts(self) -> int:
        """Experts of all layers."""
        return min((layer.count for layer in self.layers if layer.of_experts), default=0)

    @property
    def adapted_blocks(self) -> int:
        """Blocks from the lowest adapted one on."""
        return self.blocks - self.blocks_below


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights files: frozen layers, the same transposed for the way back, the table of
    embeddings, which is read where it lies, and what stays float32; of both kinds of layers also what the
    engine packs; and bytes of the largest block's file, the least bound of a run's memory."""

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
    """Bytes of a process while it takes steps, scores rows or writes texts, by cause.

    `libraries` and `mapped` are pages of files, which the system takes back where memory lacks; `weights` are
    held. `tokenizer` is there before an engine is loaded. `methods` are the engine's tables of loaded
    methods, `arena` what programs planned, `workspace` XNNPACK's, `saved` what an exact step saves for its
    way back, at most.
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
        """All that is resident."""
        return sum(asdict(self).values())

    @property
    def anonymous(self) -> int:
        """What no file can give back."""
        return self.total - self.libraries - self.mapped

    def beside(self, held: int, engine: str) -> int:
        """All that will be resident in a process that holds so many bytes before it loads an engine."""
        return self.total - self.runtime - self.libraries - self.tokenizer + held + ENGINE_BYTES[engine]

    def to_json(self) -> dict[str, int]:
        """Parts and their sums, each with `_bytes` after its name."""
        sums = {"anonymous": self.anonymous, "total": self.total}
        return {f"{name}_bytes": value for name, value in {**asdict(self), **sums}.items()}


def shape_of(
    role: str, examples: Sequence[Example], sequences: int, model: ModelSpec, **sizes: Any
) -> StepShape:
    """The shape of steps of so many sequences, of the largest sizes of examples; without any, of the model's.

    Args:
        role: of the steps.
        examples: rows, the longest of which decides.
        sequences: of a step.
        model: of the bundle.
        sizes: the others of a StepShape.
    """
    longest = max((len(each.tokens) for each in sequences_of(examples)), default=model.sequence_length)
    targets = max((len(each.targets) for each in sequences_of(examples)), default=longest - 1)
    return StepShape(role, sequences, longest, max(targets, 1), model.vocabulary_size, **sizes)


def weights_of(outline: Outline, scheme: str, int8_table: bool, roles: Collection[str]) -> Weights:
    """Bytes of the weights of a bundle in a scheme (`fp32`, `8da8w`, `8da4w`) with some roles."""
    head = [outline.head] if outline.head else []
    of_head = "8da8w" if scheme == "8da4w" else scheme
    schemes = [(layer, scheme) for layer in outline.layers] + [(layer, of_head) for layer in head]
    # The way back has the weights above the first adapter transposed, in int8 at least.
    back = [
        (replace(layer, inputs=layer.outputs, outputs=layer.inputs, bias=False), of_head)
        for layer, _ in schemes
        if BACK in roles and not layer.below
    ]
    of_experts = sum(_stored(layer, scheme) for layer, scheme in (*schemes, *back) if layer.of_experts)
    frozen = (module for module in outline.modules if not module.trains_a)
    lora_a = sum(module.rank * module.in_features for module in frozen)
    stored = sum(_stored(layer, scheme) for layer, scheme in schemes)
    transposed = sum(_stored(layer, scheme) for layer, scheme in back)
    of_heads = sum(_stored(layer, of_head) for layer in head) * (2 if BACK in roles else 1)
    biases = sum(layer.outputs * layer.count for layer, _ in schemes if layer.bias)
    table = outline.table_numbers + 4 * (outline.table_numbers // outline.width)
    return Weights(
        layers=stored,
        transposed=transposed,
        table=table if int8_table else 4 * outline.table_numbers,
        other=4 * (outline.other_numbers + biases + lora_a * (2 if BACK in roles else 1)),
        packed=sum(_packed(layer, scheme) for layer, scheme in schemes),
        packed_transposed=sum(_packed(layer, scheme) for layer, scheme in back),
        largest=max(
            of_heads // max(outline.pieces, 1),
            (stored + transposed - of_heads - of_experts) // outline.blocks,
            of_experts // max(outline.experts, 1),
        ),
    )


def weights_of_bundle(
    outline: Outline, chain: Chain, size: Callable[[str], int], scheme: str | None
) -> Weights:
    """Those of a bundle that is there; `size` tells the bytes of its files by their names."""
    is_int8 = size(chain.blocks[0].weights) < 4 * outline.table_numbers
    weights = weights_of(outline, scheme or "fp32", is_int8, chain.roles)
    return replace(weights, largest=max(chain.loaded_bytes(size)))


def programs_bytes(outline: Outline, roles: Collection[str]) -> int:
    """Bytes of the programs: of the embedding, of blocks below and above the adapter, of a head."""
    of_all = {STACK, *(role for role in roles if role not in STEP_ROLES)}
    below = sum(_PROGRAM_BYTES[role] for role in of_all) if outline.blocks_below else 0
    head = sum(_PROGRAM_BYTES_OF_HEAD[role] for role in roles) if outline.head else 0
    return 2_000 + below + sum(_PROGRAM_BYTES[role] for role in roles) + head


def run_memory(
    outline: Outline,
    shape: StepShape,
    weights: Weights,
    roles: Collection[str],
    engine: str,
    loaded: int | None = None,
) -> RunMemory:
    """Memory of a process on an engine (`native`, `torch`) that takes steps, or scores rows.

    Args:
        outline: the model.
        shape: of a step.
        weights: of the bundle.
        roles: of the bundle.
        engine: which way of calling the runtime.
        loaded: bytes of weights that may stay loaded, and beside all of them of what is saved; by default
            all weights may, and all is saved.
    """
    bounds = Bounds.for_rows(outline.longest, is_encoder=outline.head is None)
    saved = _saved(outline, shape, weights, loaded) if shape.is_exact and engine == "native" else 0
    methods = {STACK, BACK, *([SAVE] if saved else [])} if shape.is_exact else {shape.role}
    call = _largest_call(shape, bounds)
    if engine == "native":
        arena = _arena(outline, shape, bounds, call)
    else:
        arena = _torch_arena(outline, shape.role, methods, roles, bounds)
    state = 4 * shape.states * (1 + shape.queries) * outline.width
    checkpoints = _checkpoints(outline, shape, bounds, state) if shape.is_exact else 0
    in_file = loaded is not None and checkpoints > loaded
    # What no adapter changes is computed once for all copies.
    table = min(weights.table, shape.tokens_together * _READ_AROUND)
    held = _kept(weights, shape.is_exact, loaded) + table
    width = sum(matrix.rank + matrix.width for matrix in matrices(outline.modules))
    numbers = adapter_size(outline.modules)
    if shape.is_exact:
        adapter = _BYTES_OF_TRAINING + BYTES_OF_A_NUMBER * numbers
    else:
        adapter = 4 * shape.copies * numbers
    return RunMemory(
        runtime=RUNTIME_BYTES[engine],
        libraries=_LIBRARY_BYTES[engine],
        tokenizer=_BYTES_OF_A_WORD * shape.vocabulary_size,
        # Pages of a state in a file are given back as soon as it is written, or read.
        mapped=(state if in_file else 0) + (held if engine == "native" else 0),
        weights=0 if engine == "native" else held,
        methods=outline.blocks * sum(_METHOD_BYTES[name] for name in methods),
        arena=arena,
        workspace=_run_workspace(outline, shape, call),
        # In and out, collected, and beside it what entered; then what an exact call keeps.
        states=3 * state + (0 if in_file else checkpoints),
        saved=saved,
        adapter=adapter,
        # Float32 inputs of all of a step, and the signs that they are made from.
        directions=shape.queries * shape.sequences * width * (4 + 1),
    )


@dataclass(frozen=True)
class _Call:
    """Rows and queries that pass a block together, tokens of each row, questions that the head is asked."""

    rows: int
    queries: int
    length: int
    asked: int


def _largest_call(shape: StepShape, bounds: Bounds) -> _Call:
    """The largest call of a block in steps: of a row in pieces one alone."""
    queries, whole = min(shape.queries, bounds.queries), shape.tokens
    rows = min(shape.copies, bounds.copies) * min(shape.together, bounds.batch)
    asked = min(shape.rows * shape.targets, bounds.states // (1 + queries))
    return _Call(1 if whole > bounds.piece else rows, queries, min(whole, bounds.piece), asked)


def _arena(outline: Outline, shape: StepShape, bounds: Bounds, call: _Call) -> int:
    """Bytes that programs plan: a block's and the head's begin at one place, and spread over what is planned
    for the largest call."""
    whole = shape.tokens
    past = _past(outline, bounds, call.queries, whole) if whole > call.length else 0
    block = _block_arena(outline, shape.role, call.rows, call.queries, call.length)
    head = _head_arena(outline, call.queries, call.asked)
    return past + max(block, head) + min(block, head) // 2


def _run_workspace(outline: Outline, shape: StepShape, call: _Call) -> int:
    """Bytes of XNNPACK's workspace; one that grows has the smaller one beside it for a moment."""
    role = TANGENT if call.queries else STACK
    forward = max(
        _workspace(outline, role, call.rows, call.queries, call.length), _head_logits(outline, call.asked)
    )
    back = _workspace(outline, BACK, call.rows, 0, call.length) if shape.is_exact else 0
    return forward + back if back > forward else forward


def _checkpoints(outline: Outline, shape: StepShape, bounds: Bounds, state: int) -> int:
    """Bytes of the states that an exact step keeps, and of a row in pieces its keys and values."""
    # Around experts lie what they see, what they say, and what passes by.
    states = 4 if outline.experts else 1
    kept = (states * outline.adapted_blocks + 1) * state
    if shape.tokens > bounds.piece:
        kept += outline.adapted_blocks * shape.states * 8 * outline.key_width
    return kept


def _kept(weights: Weights, goes_back: bool, loaded: int | None) -> int:
    """Bytes of weights that stay loaded, as the engine packs them."""
    kept = weights.packed + (weights.packed_transposed if goes_back else 0)
    if loaded is None:
        return kept
    # The bound counts whole files, of which a run maps what its roles need.
    return round(kept * min(1, loaded / (weights.layers + weights.transposed)))


def _past(outline: Outline, bounds: Bounds, queries: int, length: int) -> int:
    """Bytes of a piece's scores, several times, and of a block's keys and values, twice: of a long row."""
    keys = 2 * outline.key_width * length
    sizes = ((cut.stop, cut.stop - cut.start) for cut in bounds.pieces(length, outline.heads))
    scores: int = max(outline.heads * size * seen for seen, size in sizes)
    return 4 * (1 + queries) * (2 * keys + _SCORES_OF_A_PIECE * scores)


def _saved(outline: Outline, shape: StepShape, weights: Weights, loaded: int | None) -> int:
    """Bytes of what an exact step saves at most: answers of frozen layers, and those of the head."""
    bounds = Bounds.for_rows(outline.longest, is_encoder=outline.head is None)
    frozen = sum(module.rank for module in outline.modules if not module.trains_a)
    numbers = frozen + sum(
        layer.outputs * layer.count for layer in outline.layers if not layer.below and not layer.of_experts
    )
    found = 0
    if shape.tokens <= bounds.piece:
        found = numbers * shape.states
    if outline.head is not None:
        found += outline.head.outputs * shape.rows * shape.targets
    left = 4 * found if loaded is None else max(0, loaded - weights.layers - weights.transposed)
    return min(4 * found, left)


def _torch_arena(
    outline: Outline, role: str, loaded: Collection[str], roles: Collection[str], bounds: Bounds
) -> int:
    """Bytes of all methods' own memory, for the largest call and all of it written to.

    Opening a program takes that of its largest method once more.
    """
    largest = {
        name: _block_arena(outline, name, *sizes, outline.longest)
        for name, sizes in _largest_rows(bounds).items()
    }
    below = outline.blocks_below * largest[STACK]
    adapted = outline.adapted_blocks * sum(largest[name] for name in loaded)
    opening = max(largest[name] for name in roles if name in STEP_ROLES)
    head = _head_arena(outline, bounds.queries if role == TANGENT else 0, bounds.states)
    return below + adapted + opening + head


def text_memory(
    outline: Outline,
    vocabulary_size: int,
    weights: Weights,
    engine: str,
    slots: int,
    context: int,
    loaded: int | None = None,
    cache_bytes: int = 4,
) -> RunMemory:
    """Memory of a process that writes texts.

    Args:
        outline: the model.
        vocabulary_size: words of its tokenizer.
        weights: of the bundle.
        engine: which way of calling the runtime.
        slots: sequences at once.
        context: tokens of each, at most.
        loaded: bytes of weights that may stay loaded; by default all may.
        cache_bytes: of a number of keys and values: 4, or 2.
    """
    piece, heads = min(_TEXT_PIECE[context > _LONG_TEXT], outline.longest, context), outline.heads
    rows = outline.key_width * 2 * context
    kept = slots * rows * (cache_bytes * outline.blocks + (4 if cache_bytes < _FLOAT else 0))
    # A piece of a prompt, and a token of each sequence, have scores with all tokens before.
    scores = _FLOAT * heads * context * max(_SCORES_OF_A_TEXT * piece, slots)
    held = _kept(weights, goes_back=False, loaded=loaded)
    held += min(weights.table, (piece + slots) * _READ_AROUND)
    numbers = sum(module.rank * (module.in_features + module.out_features) for module in outline.modules)
    return RunMemory(
        runtime=RUNTIME_BYTES[engine],
        libraries=_LIBRARY_BYTES[engine],
        tokenizer=_BYTES_OF_A_WORD * vocabulary_size,
        mapped=held if engine == "native" else 0,
        weights=0 if engine == "native" else held,
        methods=outline.blocks * _TEXT_METHOD_BYTES,
        arena=_block_arena(outline, STACK, 1, 0, piece) + scores,
        workspace=max(_workspace(outline, STACK, 1, 0, piece), _head_logits(outline, slots)),
        # Logits of each sequence: of the engine, joined, as probabilities, and sorted.
        states=_FLOAT * (3 * piece * outline.width + 4 * slots * vocabulary_size) + kept,
        saved=0,
        # The bundle's, that of the sequences, and each sequence's beside the others.
        adapter=_FLOAT * numbers * (2 + slots),
        directions=0,
    )


@dataclass(frozen=True)
class Budget:
    """What a bound of a process's memory leaves.

    Attributes:
        limit: bytes that the process may take, pages of mapped files included.
        loaded: bytes of weights that may stay loaded, and beside all of them of saved activations.
        predicted: bytes that it takes at most.
    """

    limit: int
    loaded: int
    predicted: int

    def to_json(self) -> dict[str, int]:
        """What run.json says of it."""
        return {"limit_bytes": self.limit, "predicted_bytes": self.predicted}


def budget_within(
    limit: int, predicted: Callable[[int], int], weights: Weights, process: str, remedy: str
) -> Budget:
    """The most weights and activations that a process may hold and keep a bound.

    Args:
        limit: bytes that the process may take.
        predicted: bytes that it takes with so many bytes of weights loaded, and of what is saved.
        weights: of the bundle.
        process: what takes them, such as `this run`.
        remedy: what needs less.

    Raises:
        ConfigError: it takes more with the largest block alone; the message tells how much.
    """
    smallest = weights.largest
    if (least := predicted(smallest)) > limit:
        # What a process holds before it loads an engine differs a little from start to start.
        named = math.ceil(_STARTS * least / 1e6) * 10**6
        raise ConfigError(
            f"--memory {megabytes(limit)} is too little:",
            [f"{process} needs at least {megabytes(named)}"],
            remedy=remedy,
            code="memory-too-little",
        )
    loaded = bisect_right(range(smallest, max(limit, smallest) + 1), limit, key=predicted) + smallest - 1
    return Budget(limit, loaded, predicted(loaded))


def costs_of(bundle: Bundle) -> tuple[Outline, Weights]:
    """The outline and weights of an opened bundle.

    Raises:
        BundleError: its manifest has no outline, as those of earlier versions, or it can't be read.
    """
    manifest = bundle.manifest
    if "outline" not in manifest:
        raise BundleError(
            f"{bundle.folder} doesn't tell what memory it needs: it is of an earlier version",
            remedy="leave --memory out, or export the bundle again",
            code="outline-missing",
        )
    outline = Outline.from_json(manifest["outline"], bundle.chain)
    quantization = manifest.get("quantization")
    scheme = quantization.get("scheme") if isinstance(quantization, dict) else None
    return outline, weights_of_bundle(
        outline, bundle.chain, lambda name: int(manifest["files"][name]["bytes"]), scheme
    )


def least_memory(bundle: Bundle, role: str, rows: int, length: int, held: int | None = None) -> int:
    """The least `--memory` of a run on the native engine, with some room besides.

    Args:
        bundle: an opened one.
        role: of the run's steps.
        rows: sequences of a call.
        length: tokens of each.
        held: bytes that the process holds before it loads the engine; None: as on the machine of the figures.
    """
    outline, weights = costs_of(bundle)
    shape = StepShape(role, rows, length, length - 1, bundle.chain.vocabulary_size)
    taken = run_memory(outline, shape, weights, bundle.chain.roles, "native", weights.largest)
    return round(_ROOM * (taken.total if held is None else taken.beside(held, "native")))


def memory_table(
    outline: Outline, shapes: Mapping[Any, StepShape], weights: Weights, roles: Collection[str]
) -> list[dict[str, Any]]:
    """Memory of runs on the native engine: for each estimator's call with all weights and activations, and
    with the weights of one block.

    `loaded_bytes` are those of the weights, None for all; `anonymous_bytes` what no file can give back,
    `resident_bytes` the peak with pages of files, which `--memory` bounds.
    """
    rows = []
    for estimator, shape in shapes.items():
        for loaded in (None, weights.largest):
            found = run_memory(outline, shape, weights, roles, "native", loaded)
            sizes = {"anonymous_bytes": found.anonymous, "resident_bytes": found.total}
            rows.append({"estimator": estimator, "loaded_bytes": loaded, **sizes})
    return rows


def memory_text(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a `memory_table`."""
    yield f"  {'estimator':<12}{'loaded':<14}{'anonymous':>12}{'--memory':>12}"
    for row in rows:
        loaded = "everything" if row["loaded_bytes"] is None else "one block"
        sizes = "".join(f"{megabytes(row[name]):>12}" for name in ("anonymous_bytes", "resident_bytes"))
        yield f"  {row['estimator']:<12}{loaded:<14}{sizes}"


def export_memory(outline: Outline, scheme: str, roles: Collection[str], calibrates: bool = False) -> int:
    """Peak memory of an export; `calibrates` makes one kind of block more of layers that stay int8.

    While blocks are verified, the engine has room for the largest call of a block, and the table of
    embeddings, the largest tensor, is there several times.
    """
    bounds = Bounds.for_rows(outline.longest, is_encoder=outline.head is None)
    sizes = _largest_rows(bounds)
    arena = max(_block_arena(outline, role, *sizes[role], outline.longest) for role in sizes if role in roles)
    verified = arena + (16 if scheme == "fp32" else 5) * outline.table_numbers
    of_roles = (_EXPORT_BYTES_OF_ROLE + calibrates * _CALIBRATED_BYTES_OF_ROLE) * len(roles)
    return _EXPORT_BYTES + of_roles + verified


def export_seconds(outline: Outline, roles: Collection[str], calibrates: bool = False) -> float:
    """Time of an export on two idle cores of an x86 server; a guess elsewhere."""
    of_roles = len(roles) + (_SAVING_ROLES if BACK in roles else 0)
    lowering = _SECONDS_OF_ROLE * (of_roles + (1 if outline.blocks_below else 0))
    blocks = outline.blocks + outline.experts
    seconds = _SECONDS + lowering + _SECONDS_OF_BLOCK * blocks + _SECONDS_OF_NUMBER * outline.parameters
    if calibrates:
        seconds += _CALIBRATED_SECONDS_OF_ROLE * of_roles + _CALIBRATED_SECONDS * outline.parameters
    return seconds


def megabytes(count: float) -> str:
    """Bytes as a user writes them in flags: `331 MB`, of a million bytes each."""
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count:.0f} bytes"


def bytes_text(count: object) -> str:
    """A number of bytes as a reader wants it: `3.4 MiB`; `unknown` for what is no number."""
    if not isinstance(count, int | float):
        return "unknown"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _number(value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value < _LARGEST_NUMBER:
        raise ValueError
    return value


def _layer(block: Any) -> Layer:
    inputs, outputs, count = (_number(block[name]) for name in ("inputs", "outputs", "count"))
    # Older bundles have no experts, and don't say so.
    of_experts = bool(block.get("of_experts", False))
    return Layer(inputs, outputs, count, bool(block["bias"]), bool(block["below"]), of_experts)


def _stored(layer: Layer, scheme: str) -> int:
    """Bytes of layers in the files: values and their scales."""
    if scheme == "fp32":
        return 4 * layer.numbers
    if scheme == "8da4w" and layer.inputs % GROUP_SIZE == 0:
        # Half a byte for a value, two for the scale of a group.
        return layer.numbers // 2 + 2 * layer.numbers // GROUP_SIZE
    return layer.numbers + 4 * layer.outputs * layer.count


def _packed(layer: Layer, scheme: str) -> int:
    """Bytes of layers as the engine packs them: beside each output's values a bias, and sums of integers."""
    if scheme == "fp32":
        return 4 * layer.numbers + 4 * layer.outputs * layer.count
    in_groups = scheme == "8da4w" and layer.inputs % GROUP_SIZE == 0
    sums = 4 * (layer.numbers // GROUP_SIZE if in_groups else layer.outputs * layer.count)
    return _stored(layer, scheme) + sums + 4 * layer.outputs * layer.count


def _largest_rows(bounds: Bounds) -> dict[str, tuple[int, int]]:
    """By role: rows and queries of the largest call of a block."""
    return {
        STACK: (bounds.copies * bounds.batch, 0),
        TANGENT: (bounds.batch, bounds.queries),
        BACK: (bounds.batch, 0),
    }


def _block_arena(outline: Outline, role: str, rows: int, queries: int, length: int) -> int:
    """Bytes that a block's program plans outside the backend, between its delegates.

    Queries, states and keys, as many as lie there at once; of tangents also scores and two halves of their
    derivative; on the way back the scores with their slopes, and what the activation's slope is made of.
    """
    width, keys, scores = outline.heads * outline.head_width, outline.key_width, outline.heads * length
    numbers = {
        STACK: 3 * width + 5 * keys,
        TANGENT: (1 + queries) * (3 * width + 5 * keys // 2) + 3 * queries * scores,
        BACK: 7 * width + (6 if outline.gelu else 1) * outline.inner + 2 * scores,
    }
    return 4 * rows * length * numbers[role]


def _head_logits(outline: Outline, asked: int) -> int:
    """Bytes of the logits of a piece of the head."""
    return 4 * asked * outline.head.outputs // outline.pieces if outline.head is not None else 0


def _head_arena(outline: Outline, queries: int, asked: int) -> int:
    """Bytes that the program of a head's piece plans: logits and their exponentials, and tangents of both."""
    return 2 * (1 + queries) * _head_logits(outline, asked)


def _workspace(outline: Outline, role: str, rows: int, queries: int, length: int) -> int:
    """Bytes of XNNPACK's workspace: of what the largest delegate of a block holds at once.

    That is around the activation: results of the wide layers and one more; a tangent of one less, or of the
    parts of GELU's derivative; on the way back slopes of two beside them, less a quarter for what is
    quantized.
    """
    inside = outline.inner_values * outline.inner
    if role == TANGENT:
        inside += queries * (5 if outline.gelu else outline.inner_values - 1) * outline.inner
    elif role == BACK:
        inside += 7 * outline.inner // 4
    else:
        inside = max(inside, 2 * outline.heads * length)
    return 4 * rows * length * inside
