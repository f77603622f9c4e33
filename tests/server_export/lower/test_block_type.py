"""One lowered block type with the weights of several blocks: the stock engine against eager PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import ExportedProgram

from prge.errors import Refusal
from server_export.ir.rewriting import rewritten_graph
from server_export.lower.block_type import LAYOUTS, LoweredBlockType, StandInConstants, lower_block_type
from server_export.lower.sizes import Size, dynamic_program
from server_export.publishing.module_quantization import Int8Embedding
from server_export.quantize.quantization import quantize_layers
from tests.refusals import raises, refusal

torch.set_num_threads(1)

aten = torch.ops.aten

WIDTH, INNER, RANK, VOCABULARY = 64, 96, 4, 40
SIZES = {"rows": Size(10007, 3, 1, 8), "tokens": Size(10009, 5, 1, 16)}
HIDDEN_STATES = (10007, 10009, WIDTH)
SHAPES = [(3, 5), (1, 1), (8, 16), (2, 7)]
TOLERANCE = {"fp32": 2e-5, "8da8w": 0.02, "8da4w": 0.02}


class Block(nn.Module):
    """A block with a norm, a gated layer with a bias, and an adapted layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # Norms of ones, so that constants are equal.
        self.norm, self.gate_norm = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.register_buffer("lora_a", torch.randn(1, WIDTH, RANK) / 8)

    def forward(self, state: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = state.shape
        normed = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm
        gated = F.silu(self.gate(normed)) * self.up(normed * self.gate_norm)
        flat = normed.reshape(1, rows * tokens, width)
        low_rank = torch.bmm(torch.bmm(flat, self.lora_a), lora_b.reshape(1, RANK, width))
        return state + self.down(gated) + low_rank.reshape(rows, tokens, width)


class Backward(nn.Module):
    """Reads constants of a block, and a transposed weight of its own."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.up = block.norm, block.up
        self.transposed_up = nn.Linear(INNER, WIDTH, bias=False)
        self.transposed_up.weight = nn.Parameter(block.up.weight.detach().t().contiguous())

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.transposed_up(self.up(state * self.norm))


class Embedding(nn.Module):
    """An embedding with a table of floats or of int8 rows."""

    def __init__(self, seed: int, quantized: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        table = torch.randn(VOCABULARY, WIDTH)
        self.table = Int8Embedding([table], len(table)) if quantized else nn.Embedding.from_pretrained(table)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


class Layer(nn.Module):
    """One layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.layer(state)


class Wide(nn.Module):
    """Two layers with large activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4096, bias=False), nn.Linear(4096, WIDTH, bias=False)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(state))


class Head(nn.Module):
    """A head that computes the log-probability of a target for each hidden state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.layer = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, state: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chances = torch.softmax(self.layer(state * self.norm), -1)
        return torch.log(torch.gather(chances, 1, targets))


def program(module: nn.Module, *inputs: torch.Tensor, sizes: Mapping[str, Size] = SIZES) -> ExportedProgram:
    """Return a program with dynamic sizes, made from a graph with markers.

    Args:
        module: the module.
        inputs: inputs on the meta device, with markers in their shapes.
        sizes: dynamic sizes by name.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Fake tensors take no memory.
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in inputs)
    graph_module = rewritten_graph(module, fake)
    return dynamic_program(graph_module, sizes)


def tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    return {**program.state_dict, **program.constants}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def quantized(module: nn.Module, scheme: str) -> nn.Module:
    if scheme != "fp32":
        quantize_layers(module, scheme)
    return module.eval().requires_grad_(False)


def block_program(module: nn.Module) -> ExportedProgram:
    return program(module, meta(*HIDDEN_STATES), meta(RANK, WIDTH))


def engine_output(
    folder: Path,
    block_type: LoweredBlockType,
    weights: Mapping[str, torch.Tensor],
    method: str,
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """Return the output of a method in the engine, with the weights of a block."""
    return engine_of(folder, block_type, weights).run_method(method, inputs)[0]


def engine_of(folder: Path, block_type: LoweredBlockType, weights: Mapping[str, torch.Tensor]) -> Any:
    from executorch.extension.pybindings.portable_lib import _load_for_executorch

    (folder / "block_type.pte").write_bytes(block_type.program)
    block_type.weights.write(folder / "block.ptd", weights)
    return _load_for_executorch(str(folder / "block_type.pte"), str(folder / "block.ptd"))


@pytest.mark.parametrize("scheme", ["fp32", "8da8w", "8da4w"])
def test_a_block_type_runs_with_the_weights_of_its_blocks(scheme: str, tmp_path: Path) -> None:
    first, second = (quantized(Block(seed), scheme) for seed in (1, 2))
    block_type = lower_block_type({"score": block_program(first)}, SIZES.values())
    assert len(block_type.program) < 20_000
    for block in (first, second):
        weights = tensors(block_program(block))
        for rows, tokens in SHAPES:
            inputs = torch.randn(rows, tokens, WIDTH), torch.randn(RANK, WIDTH)
            difference = engine_output(tmp_path, block_type, weights, "score", *inputs) - block(*inputs)
            assert difference.abs().max() < TOLERANCE[scheme]
            assert difference.abs().median() < 1e-6


def anonymous_megabytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system doesn't show it")
def test_memory_of_a_call_depends_on_its_own_sizes(tmp_path: Path) -> None:
    """XNNPACK touches all of its workspace, which is at least as large as its program requires."""
    bounds = {**SIZES, "tokens": replace(SIZES["tokens"], maximum=4096)}
    exported = program(quantized(Wide(), "fp32"), meta(*HIDDEN_STATES), sizes=bounds)
    block_type, before = lower_block_type({"score": exported}, bounds.values()), anonymous_megabytes()
    engine = engine_of(tmp_path, block_type, tensors(exported))
    engine.run_method("score", (torch.randn(3, 5, WIDTH),))
    # Activations between the layers take 537 MB in the largest call.
    assert anonymous_megabytes() - before < 100


@pytest.mark.parametrize("is_quantized", [False, True])
def test_an_embedding_runs_with_other_tables(is_quantized: bool, tmp_path: Path) -> None:
    first, second = (Embedding(seed, is_quantized) for seed in (1, 2))
    ids = meta(*HIDDEN_STATES[:2], dtype=torch.int64)
    block_type = lower_block_type({"score": program(first, ids)}, SIZES.values())
    for block in (first, second):
        weights = tensors(program(block, ids))
        for shape in SHAPES:
            tokens = torch.randint(VOCABULARY, shape)
            torch.testing.assert_close(
                engine_output(tmp_path, block_type, weights, "score", tokens), block(tokens)
            )


@pytest.mark.parametrize("scheme", ["fp32", "8da4w"])
def test_a_head_runs_with_other_weights(scheme: str, tmp_path: Path) -> None:
    first, second = (quantized(Head(seed), scheme) for seed in (1, 2))
    inputs = meta(HIDDEN_STATES[0], WIDTH), meta(HIDDEN_STATES[0], 1, dtype=torch.int64)
    block_type = lower_block_type({"score": program(first, *inputs)}, SIZES.values())
    for block in (first, second):
        weights = tensors(program(block, *inputs))
        for rows in (1, 3, 8):
            state, targets = torch.randn(rows, WIDTH), torch.randint(VOCABULARY, (rows, 1))
            difference = engine_output(tmp_path, block_type, weights, "score", state, targets) - block(
                state, targets
            )
            assert difference.abs().max() < TOLERANCE[scheme]


def test_constants_of_one_method_are_in_the_file_only_with_that_method(tmp_path: Path) -> None:
    block = quantized(Block(1), "8da4w")
    backward = Backward(quantized(Block(1), "fp32"))
    quantize_layers(backward, "8da8w")
    backward.up = block.up
    methods = {
        "score": block_program(block),
        "backward": program(backward.eval().requires_grad_(False), meta(*HIDDEN_STATES)),
    }
    weights = tensors(methods["score"]) | tensors(methods["backward"])
    together, alone = (
        lower_block_type(methods, SIZES.values()),
        lower_block_type({"score": methods["score"]}, SIZES.values()),
    )
    # Without `backward`, the file lacks the constants that only this method reads.
    names = ({entry.name for entry in block_type.weights.entries} for block_type in (together, alone))
    own = {name for name in weights if name.startswith("transposed_up") and "zero" not in name}
    assert set.difference(*names) == own
    inputs = torch.randn(2, 7, WIDTH), torch.randn(RANK, WIDTH)
    for block_type in (together, alone):
        difference = engine_output(tmp_path, block_type, weights, "score", *inputs) - block(*inputs)
        assert difference.abs().max() < TOLERANCE["8da4w"]
    difference = engine_output(tmp_path, together, weights, "backward", inputs[0]) - backward(inputs[0])
    assert difference.abs().max() < TOLERANCE["8da8w"]


@pytest.fixture(scope="module")
def lowered() -> tuple[LoweredBlockType, dict[str, torch.Tensor]]:
    """Return a block type with an int4 layer, and the constants of a block."""
    exported = program(quantized(Layer(), "8da4w"), meta(*HIDDEN_STATES))
    return lower_block_type({"score": exported}, SIZES.values()), tensors(exported)


def test_layouts_are_known(lowered: tuple[LoweredBlockType, dict[str, torch.Tensor]]) -> None:
    block_type, _ = lowered
    layouts = {entry.name: entry.layout for entry in block_type.weights.entries}
    assert layouts == {
        "layer_weight_qdata": "int4",
        "layer_weight_scale": "as it is",
        "layer.bias": "as it is",
    }
    assert set(block_type.weights.fixed) == {"layer_weight_zero_point"}


def test_a_table_is_packed_only_if_a_part_of_the_file_has_that_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed copy of a large table would take memory in addition to the table."""
    packed, laid_out = LAYOUTS["int4"], list[bool]()

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.int8:
            laid_out.append(tensor.is_meta)
        return packed(tensor)

    monkeypatch.setitem(LAYOUTS, "int4", watched)
    lower_block_type(
        {"embed": program(Embedding(1, True), meta(10007, 10009, dtype=torch.long))}, SIZES.values()
    )
    assert laid_out and all(laid_out)


def test_scales_of_float32_are_stored_as_bfloat16() -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    layer = Layer()
    settings = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32), weight_scale_dtype=torch.float32
    )
    quantize_(layer, settings)
    block_type = lower_block_type(
        {"score": program(layer.eval().requires_grad_(False), meta(*HIDDEN_STATES))}, SIZES.values()
    )
    layouts = {entry.name: entry.layout for entry in block_type.weights.entries}
    assert layouts["layer_weight_scale"] == "bfloat16"


def test_an_unknown_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LAYOUTS, "int4")
    exported = program(quantized(Layer(), "8da4w"), meta(*HIDDEN_STATES))
    with raises(Refusal, "unknown-constant", containing="256 bytes"):
        lower_block_type({"score": exported}, SIZES.values())


def test_two_equal_constants_are_refused() -> None:
    class Booleans(nn.Module):
        """A module with three boolean constants, of which two are equal."""

        def __init__(self) -> None:
            super().__init__()
            for name in "abc":
                self.register_buffer(name, torch.tensor([name != "a"]))

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            positive = state > 0
            return torch.logical_or(torch.logical_xor(positive, self.a), positive == self.b) & self.c

    with refusal("ambiguous-constant"):
        lower_block_type({"score": program(Booleans(), meta(*HIDDEN_STATES))}, SIZES.values())


def test_constants_that_differ_from_the_block_type_are_named(
    lowered: tuple[LoweredBlockType, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    block_type, weights = lowered
    (fixed,), name = block_type.weights.fixed, block_type.weights.entries[0].name
    for changed, code, wrong in (
        ({n: t for n, t in weights.items() if n != name}, "constant-missing", name),
        ({**weights, fixed: weights[fixed] + 1}, "constant-differs-from-program", fixed),
    ):
        with raises(Refusal, code, containing=wrong):
            block_type.weights.write(tmp_path / "block.ptd", changed)
        assert not (tmp_path / "block.ptd").exists()
    with raises(Refusal, "constant-of-another-shape", containing=name):
        block_type.weights.write(tmp_path / "block.ptd", {**weights, name: torch.zeros(3)})


def test_a_weight_that_another_operator_reads_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, WIDTH))

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return F.linear(state, self.weight) * self.weight

    with raises(Refusal, "weight-read-otherwise", containing="weight"):
        lower_block_type(
            {"score": program(Tied().requires_grad_(False), meta(*HIDDEN_STATES))}, SIZES.values()
        )


def test_a_functional_program_is_not_traced_again() -> None:
    program = StandInConstants({"score": block_program(Block(1))}).as_placeholders(block_program(Block(1)))
    targets = {node.target for node in program.graph.nodes}
    assert not targets & {aten.reshape.default, aten._assert_scalar.default}
    assert program.run_decompositions({}) is program
    # Tracing rewrites nothing.
    traced = ExportedProgram.run_decompositions(program, {})
    assert operators(traced) == operators(program)


def test_an_operator_that_may_share_memory_is_traced_again() -> None:
    class Contiguous(nn.Module):
        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return state.transpose(1, 2).contiguous()

    exported = program(Contiguous(), meta(*HIDDEN_STATES))
    traced = StandInConstants({"score": exported}).as_placeholders(exported).run_decompositions({})
    assert traced is not exported and aten.contiguous.default not in operators(traced)


def operators(program: ExportedProgram) -> list[object]:
    """Return the operators that compute tensors, in order."""
    return [
        node.target
        for node in program.graph.nodes
        if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor)
    ]
