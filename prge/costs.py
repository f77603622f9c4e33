"""What a program costs, by arithmetic alone: numbers of a model and a contract in; bytes, operations out.

    file       weights as they are stored, and the graph
    memory     of a run: runtime, packed weights, table of embeddings, planned values, workspace, adapter
    work       multiply-accumulates of matrix products, and numbers that pass through all other operators

Weights and tables follow from shapes. The rest (workspace, planned values, passes) is modelled on what the
engine was measured to take; `scripts/bench/estimate.py` holds all of it against the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from prge.adapter import adapter_size
from prge.contract import Contract

MIB = 1 << 20
GROUP_SIZE = 32
# Of weights and planned values: programs of several lengths are loaded side by side up to here by themselves.
PROGRAM_BYTES = 1 << 30

# Resident memory of a process with the driver and an engine, before it loads a program: Python 3.11 and
# ExecuTorch 1.5.1 on Linux x86_64, as `scripts/bench/device_memory.py` measures it.
RUNTIME_BYTES = {"native": 52 * MIB, "torch": 237 * MIB}

# Resident memory of an export besides weights: while it loads, with all of ExecuTorch's exporter, and of the
# graph of a block in a method; logits are there up to three times while a program is verified.
_LOADING_BYTES = 420 * 10**6
_LOWERING_BYTES = 530 * 10**6
_BLOCK_GRAPH_BYTES = 5 * 10**6
_LOGITS_AT_ONCE = 2.75

# Of an operator in XNNPACK's own tables.
_OPERATOR_BYTES = 4600
_BLOCK_OPERATORS = {"stack": 137, "trunk": 130, "tangent": 252, "exact": 318}
# Of a block's graph in the file.
_BLOCK_FILE_BYTES = {"stack": 13_000, "trunk": 12_000, "tangent": 17_000, "exact": 22_000}


@dataclass(frozen=True)
class Layer:
    """Linear layers of one shape: `count` of them below the first adapted block, or from it on."""

    inputs: int
    outputs: int
    count: int
    bias: bool = False
    below: bool = False

    @property
    def numbers(self) -> int:
        """Weights of all of them."""
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True)
class Outline:
    """A model in numbers, as an export would use it.

    `layers` are the frozen linear layers without the vocabulary head, which is `head`; `table_numbers` the
    entries of the token embedding, `other_numbers` what stays float32: norms, biases, other tables.
    `parameters` counts all, tied ones once. `blocks_below` lie under the first adapted layer.
    """

    width: int
    blocks: int
    blocks_below: int
    heads: int
    head_width: int
    layers: tuple[Layer, ...]
    head: Layer | None
    table_numbers: int
    other_numbers: int
    parameters: int

    @property
    def inner(self) -> int:
        """Width of the widest layer of a block."""
        return max(max(layer.inputs, layer.outputs) for layer in self.layers)

    @property
    def inner_values(self) -> int:
        """How many values of that width a block holds at once: those layers' results, and one more."""
        wide = sum(layer.count for layer in self.layers if layer.outputs == self.inner)
        return round(wide / self.blocks) + 1


@dataclass(frozen=True)
class Weights:
    """Bytes of a program's weights: `layers`, which the engine packs, in the file; `packed`; the table of
    embeddings, which is read where it lies; and what stays float32."""

    layers: int
    packed: int
    table: int
    other: int

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return self.layers + self.table + self.other


@dataclass(frozen=True)
class RunMemory:
    """Bytes of a run while one method is loaded, by cause; None is what isn't known.

    `transient` is what loading takes beyond the packed weights: the file's weights, whose pages the native
    engine gives back while it reads them and the torch engine keeps until all are packed.
    """

    runtime: int
    weights: int | None
    transient: int | None
    arena: int | None
    workspace: int | None
    adapter: int
    directions: int

    @property
    def total(self) -> int:
        """All that is resident while steps are taken, as far as it is known."""
        parts = (self.weights, self.arena, self.workspace)
        return self.runtime + self.adapter + self.directions + sum(part or 0 for part in parts)

    @property
    def while_loading(self) -> int:
        """All that is resident when the last weight is packed."""
        parts = (self.weights, self.transient, self.arena)
        return self.runtime + self.adapter + sum(part or 0 for part in parts)

    @property
    def peak(self) -> int:
        """The larger of the two."""
        return max(self.total, self.while_loading)

    def to_json(self) -> dict[str, int | None]:
        """Parts and sums, each with `_bytes` after its name."""
        named = {**asdict(self), "total": self.total, "while_loading": self.while_loading, "peak": self.peak}
        return {f"{name}_bytes": value for name, value in named.items()}


@dataclass(frozen=True)
class Work:
    """What one call computes.

    `layers` and `products` are multiply-accumulates, of frozen layers and of two computed values; `passes`
    are numbers that other operators write, `answers` logits that become probabilities.
    """

    layers: int
    products: int
    passes: int
    answers: int

    @property
    def operations(self) -> int:
        """Floating point operations of all matrix products."""
        return 2 * (self.layers + self.products)

    def to_json(self) -> dict[str, int]:
        """Its numbers by name."""
        return {**asdict(self), "operations": self.operations}


def weights_of(outline: Outline, contract: Contract, scheme: str, int8_table: bool) -> Weights:
    """Bytes of the weights of a program in a scheme (`fp32`, `8da8w`, `8da4w`)."""
    layers, stored = [*outline.layers], sum(_stored(layer, scheme) for layer in outline.layers)
    if outline.head:
        layers.append(_used_head(outline.head, contract))
        stored += _stored(layers[-1], "8da8w" if scheme == "8da4w" else scheme)
    if contract.is_exact:
        # The way back has the weights above the first adapter transposed, in int8 at least.
        back = [
            replace(layer, inputs=layer.outputs, outputs=layer.inputs, bias=False)
            for layer in layers
            if not layer.below
        ]
        stored += sum(_stored(layer, "fp32" if scheme == "fp32" else "8da8w") for layer in back)
        layers += back
    # Beside each output's values the engine keeps their sum (of integers) and a bias.
    packed = stored + sum(layer.outputs * layer.count for layer in layers) * (4 if scheme == "fp32" else 8)
    lora_a = sum(module.rank * module.in_features for module in contract.modules)
    table = outline.table_numbers + 4 * (outline.table_numbers // outline.width)
    return Weights(
        layers=stored,
        packed=packed,
        table=table if int8_table else 4 * outline.table_numbers,
        other=4 * (outline.other_numbers + lora_a),
    )


def file_bytes(outline: Outline, methods: Sequence[Contract], weights: Weights) -> int:
    """Bytes of the program file: weights once, the graph of every method."""
    graphs = sum(_BLOCK_FILE_BYTES[method.kind] * outline.blocks for method in methods)
    return weights.stored + graphs


def run_memory(
    contract: Contract,
    engine: str,
    weights: int | None,
    arena: int | None,
    workspace: int | None,
    layers: int | None = None,
) -> RunMemory:
    """Memory of a run on an engine (`native`, `torch`).

    Args:
        contract: of the method that is loaded.
        engine: which way of calling the runtime.
        weights: bytes that all weights take in memory, packed or where they lie.
        arena: bytes that the program planned.
        workspace: bytes of XNNPACK's workspace.
        layers: bytes of the weights in the file that are packed; without it all of them.
    """
    width = sum(module.rank + module.out_features for module in contract.modules)
    layers = weights if layers is None else layers
    return RunMemory(
        runtime=RUNTIME_BYTES[engine],
        weights=weights,
        transient=layers if engine == "torch" else None if weights is None else 0,
        arena=arena,
        workspace=workspace,
        adapter=contract.copies * adapter_size(contract.modules) * 4,
        # Float32 inputs of the program, and the signs that they are filled from.
        directions=contract.queries * contract.rows * width * (4 + 1),
    )


def estimated_memory(outline: Outline, contract: Contract, weights: Weights, engine: str) -> RunMemory:
    """Memory of a run of a program that isn't there yet."""
    operators = _BLOCK_OPERATORS[contract.kind] * outline.blocks * _OPERATOR_BYTES
    resident = weights.packed + weights.table + weights.other + operators
    return run_memory(
        contract,
        engine,
        resident,
        arena_bytes(outline, contract),
        workspace_bytes(outline, contract),
        weights.layers,
    )


def together(memories: Sequence[RunMemory]) -> RunMemory:
    """Memory of a run with several methods loaded, the largest last; they take turns with a workspace."""
    largest = memories[-1]
    return replace(
        largest,
        weights=_sum(memory.weights for memory in memories),
        arena=_sum(memory.arena for memory in memories),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum of numbers that are all known."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def arena_bytes(outline: Outline, contract: Contract) -> int:
    """Bytes that a program plans outside the backend: inputs, then embedded tokens or, later, logits.

    A decoder's way back is in another delegate, so that what is kept for it lies here.
    """
    inputs = sum(math.prod(spec.shape) * (8 if spec.dtype == "int64" else 4) for spec in contract.inputs)
    states = 4 * contract.given_rows * contract.sequence_length * outline.width
    if contract.is_encoder or contract.kind == "trunk":
        return inputs + 2 * states
    return inputs + _kept_bytes(outline, contract) + max(2 * states, _logits_bytes(contract))


def _logits_bytes(contract: Contract) -> int:
    """Bytes of a decoder's logits at all asked positions of a call."""
    classes = 0 if contract.is_encoder else len(contract.label_tokens) or contract.vocabulary_size
    return 4 * contract.positions * classes * contract.computed_rows


def workspace_bytes(outline: Outline, contract: Contract) -> int:
    """Bytes of XNNPACK's workspace: the most values that are alive at once, inside a block."""
    rows = contract.rows if contract.is_exact else contract.computed_rows
    tokens = rows * contract.sequence_length
    inside = outline.inner_values * outline.inner + outline.width
    heads = outline.heads * outline.head_width
    scores = outline.heads * contract.sequence_length
    # An encoder is one delegate, forward and back.
    kept = _kept_bytes(outline, contract) if contract.is_encoder else 0
    return kept + 4 * tokens * max(inside, outline.width + 3 * heads + 2 * scores)


def _kept_bytes(outline: Outline, contract: Contract) -> int:
    """Bytes of what an exact program keeps of the blocks above the first adapter until it comes back."""
    if not contract.is_exact:
        return 0
    heads = outline.heads * outline.head_width
    # Sums and norms; queries, keys, values and what is mixed of them; weights; the inner layer's results.
    values = 4 * outline.width + 4 * heads + outline.heads * contract.sequence_length
    values += (outline.inner_values - 1) * outline.inner
    return 4 * contract.rows * contract.sequence_length * values * (outline.blocks - outline.blocks_below)


def work_of(outline: Outline, contract: Contract, part: str = "whole") -> Work:
    """What one call of a method computes.

    Args:
        outline: the model.
        contract: of the method, as it is before it is cut.
        part: `whole`, or of a program that is to be cut the `trunk` below the adapter or the `step` above it.
    """
    length = contract.sequence_length
    shared = contract.shared_rows or part == "trunk"
    once = 0 if part == "step" else contract.batch_size if shared else contract.rows
    rows = {True: once, False: 0 if part == "trunk" else contract.computed_rows}
    layers = sum(layer.numbers * rows[layer.below] * length for layer in outline.layers)
    head = _used_head(outline.head, contract) if outline.head else None
    if head is not None:
        layers += head.numbers * rows[False] * contract.positions
    products = passes = 0
    heads = outline.heads * outline.head_width
    for below, blocks in ((True, outline.blocks_below), (False, outline.blocks - outline.blocks_below)):
        # A way back costs in a product what a tangent does: two terms.
        derivatives = 1 if contract.is_exact else contract.queries
        tangents = 0.0 if below else derivatives / (1 + derivatives)
        tokens = blocks * rows[below] * length
        # Scores and mixed values; each of the two has two terms in a derivative.
        products += round(tokens * 2 * heads * length * (1 + tangents))
        passes += round(tokens * _passes(outline, length) * (1 + 0.5 * tangents))
    adapted = sum(module.rank * (module.in_features + module.out_features) for module in contract.modules)
    answers = head.outputs * rows[False] * contract.positions if head else 0
    return Work(layers, products + adapted * rows[False] * length, passes, answers)


def export_memory(
    outline: Outline, weights: Weights, scheme: str, stored_bytes: int, methods: Sequence[Contract]
) -> int:
    """Peak memory of an export's larger process.

    While it loads, the model in float32 lies beside the mapped files of `stored_bytes`. While it lowers, the
    model, quantized to a byte a number, lies beside what one method is made from, and every method has what
    the engine is to pack.
    """
    model = 4 * outline.parameters
    quantized = sum(layer.numbers for layer in outline.layers) + weights.table + weights.other
    quantized += outline.head.numbers if outline.head else 0
    held = model if scheme == "fp32" else quantized
    lowering = _LOWERING_BYTES + len(methods) * (weights.layers + outline.blocks * _BLOCK_GRAPH_BYTES)
    logits = max(_logits_bytes(method) for method in methods)
    return max(_LOADING_BYTES + model + stored_bytes, lowering + 2 * held + round(_LOGITS_AT_ONCE * logits))


def export_seconds(outline: Outline, methods: int) -> float:
    """Time of an export: lowering goes by operators, quantization and verification by weights.

    As on two idle cores of an x86 server, which share the methods; a guess elsewhere.
    """
    return 7 + 0.2 * outline.blocks * (1 + methods) + 3.8e-8 * outline.parameters


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


def _used_head(head: Layer, contract: Contract) -> Layer:
    """The vocabulary head, cut to the label words of a verbalizer."""
    return replace(head, outputs=len(contract.label_tokens)) if contract.label_tokens else head


def _stored(layer: Layer, scheme: str) -> int:
    """Bytes of layers in the file: values, their scales, biases."""
    biases = 4 * layer.outputs * layer.count if layer.bias else 0
    if scheme == "fp32":
        return 4 * layer.numbers + biases
    if scheme == "8da4w" and layer.inputs % GROUP_SIZE == 0:
        # Half a byte for a value, two for the scale of a group.
        return layer.numbers // 2 + 2 * layer.numbers // GROUP_SIZE + biases
    return layer.numbers + 4 * layer.outputs * layer.count + biases


def _passes(outline: Outline, length: int) -> int:
    """Numbers that the operators besides matrix products write for one token in one block.

    Norms, residuals, adapters, rotation and reordering of heads; gate and activation; scores: scaled, masked
    and normalized.
    """
    return 24 * outline.width + outline.inner_values * outline.inner + 5 * outline.heads * length
