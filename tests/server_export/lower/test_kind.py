"""One lowered kind with the weights of several blocks, in the stock engine against eager."""

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
from server_export.lower.kind import LAYOUTS, Constants, LoweredKind, lower_kind
from server_export.lower.sizes import Size, dynamic_program
from server_export.publishing.module_quantization import Int8Embedding
from server_export.quantize.quantization import quantize_layers
from tests.refusals import raises, refusal

torch.set_num_threads(1)

aten = torch.ops.aten

WIDTH, INNER, RANK, VOCABULARY = 64, 96, 4, 40
SIZES = {"rows": Size(10007, 3, 1, 8), "tokens": Size(10009, 5, 1, 16)}
STATE = (10007, 10009, WIDTH)
SHAPES = [(3, 5), (1, 1), (8, 16), (2, 7)]
TOLERANCE = {"fp32": 2e-5, "8da8w": 0.02, "8da4w": 0.02}


class Block(nn.Module):
    """A norm, a gated layer with a bias, an adapted one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # Norms of ones, in both blocks: equal constants.
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


class Back(nn.Module):
    """Reads what the block does, and a transposed weight of its own."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.up = block.norm, block.up
        self.transposed_up = nn.Linear(INNER, WIDTH, bias=False)
        self.transposed_up.weight = nn.Parameter(block.up.weight.detach().t().contiguous())

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.transposed_up(self.up(state * self.norm))


class Embedding(nn.Module):
    """Tokens to states, by a table of floats or of int8 rows."""

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
    """Two layers with much between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4096, bias=False), nn.Linear(4096, WIDTH, bias=False)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(state))


class Head(nn.Module):
    """States to the log-probabilities of a token each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.layer = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, state: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chances = torch.softmax(self.layer(state * self.norm), -1)
        return torch.log(torch.gather(chances, 1, targets))


def program(module: nn.Module, *inputs: torch.Tensor, sizes: Mapping[str, Size] = SIZES) -> ExportedProgram:
    """The program of a module of any size, by way of a graph with markers.

    Args:
        module: as it is.
        inputs: on the meta device, with markers in their shapes.
        sizes: that a call chooses.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    # What is fake takes no memory, whatever its size.
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
    return program(module, meta(*STATE), meta(RANK, WIDTH))


def answer(
    folder: Path, kind: LoweredKind, weights: Mapping[str, torch.Tensor], method: str, *inputs: torch.Tensor
) -> torch.Tensor:
    """What the engine answers with a block's weights, all in one file of each name."""
    return engine_of(folder, kind, weights).run_method(method, inputs)[0]


def engine_of(folder: Path, kind: LoweredKind, weights: Mapping[str, torch.Tensor]) -> Any:
    from executorch.extension.pybindings.portable_lib import _load_for_executorch

    (folder / "kind.pte").write_bytes(kind.program)
    kind.weights.write(folder / "block.ptd", weights)
    return _load_for_executorch(str(folder / "kind.pte"), str(folder / "block.ptd"))


@pytest.mark.parametrize("scheme", ["fp32", "8da8w", "8da4w"])
def test_a_kind_runs_with_the_weights_of_its_blocks(scheme: str, tmp_path: Path) -> None:
    first, second = (quantized(Block(seed), scheme) for seed in (1, 2))
    kind = lower_kind({"score": block_program(first)}, SIZES.values())
    assert len(kind.program) < 20_000
    for block in (first, second):
        weights = tensors(block_program(block))
        for rows, tokens in SHAPES:
            inputs = torch.randn(rows, tokens, WIDTH), torch.randn(RANK, WIDTH)
            difference = answer(tmp_path, kind, weights, "score", *inputs) - block(*inputs)
            assert difference.abs().max() < TOLERANCE[scheme]
            assert difference.abs().median() < 1e-6


def anonymous_megabytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system doesn't tell")
def test_a_call_takes_memory_for_its_own_sizes_whatever_the_bounds(tmp_path: Path) -> None:
    """XNNPACK writes to all of its workspace, which is at least as large as its program says."""
    bounds = {**SIZES, "tokens": replace(SIZES["tokens"], maximum=4096)}
    exported = program(quantized(Wide(), "fp32"), meta(*STATE), sizes=bounds)
    kind, before = lower_kind({"score": exported}, bounds.values()), anonymous_megabytes()
    engine = engine_of(tmp_path, kind, tensors(exported))
    engine.run_method("score", (torch.randn(3, 5, WIDTH),))
    # What lies between the layers takes 537 MB in the largest call.
    assert anonymous_megabytes() - before < 100


@pytest.mark.parametrize("is_quantized", [False, True])
def test_an_embedding_runs_with_other_tables(is_quantized: bool, tmp_path: Path) -> None:
    first, second = (Embedding(seed, is_quantized) for seed in (1, 2))
    ids = meta(*STATE[:2], dtype=torch.int64)
    kind = lower_kind({"score": program(first, ids)}, SIZES.values())
    for block in (first, second):
        weights = tensors(program(block, ids))
        for shape in SHAPES:
            tokens = torch.randint(VOCABULARY, shape)
            torch.testing.assert_close(answer(tmp_path, kind, weights, "score", tokens), block(tokens))


@pytest.mark.parametrize("scheme", ["fp32", "8da4w"])
def test_a_head_runs_with_other_weights(scheme: str, tmp_path: Path) -> None:
    first, second = (quantized(Head(seed), scheme) for seed in (1, 2))
    inputs = meta(STATE[0], WIDTH), meta(STATE[0], 1, dtype=torch.int64)
    kind = lower_kind({"score": program(first, *inputs)}, SIZES.values())
    for block in (first, second):
        weights = tensors(program(block, *inputs))
        for rows in (1, 3, 8):
            state, targets = torch.randn(rows, WIDTH), torch.randint(VOCABULARY, (rows, 1))
            difference = answer(tmp_path, kind, weights, "score", state, targets) - block(state, targets)
            assert difference.abs().max() < TOLERANCE[scheme]


def test_what_one_method_alone_reads_can_be_a_file_of_its_own(tmp_path: Path) -> None:
    block = quantized(Block(1), "8da4w")
    back = Back(quantized(Block(1), "fp32"))
    quantize_layers(back, "8da8w")
    back.up = block.up
    methods = {
        "score": block_program(block),
        "back": program(back.eval().requires_grad_(False), meta(*STATE)),
    }
    weights = tensors(methods["score"]) | tensors(methods["back"])
    together, alone = (
        lower_kind(methods, SIZES.values()),
        lower_kind({"score": methods["score"]}, SIZES.values()),
    )
    # Without `back`, the file lacks what it alone reads.
    names = ({entry.name for entry in kind.weights.entries} for kind in (together, alone))
    own = {name for name in weights if name.startswith("transposed_up") and "zero" not in name}
    assert set.difference(*names) == own
    inputs = torch.randn(2, 7, WIDTH), torch.randn(RANK, WIDTH)
    for kind in (together, alone):
        difference = answer(tmp_path, kind, weights, "score", *inputs) - block(*inputs)
        assert difference.abs().max() < TOLERANCE["8da4w"]
    difference = answer(tmp_path, together, weights, "back", inputs[0]) - back(inputs[0])
    assert difference.abs().max() < TOLERANCE["8da8w"]


@pytest.fixture(scope="module")
def lowered() -> tuple[LoweredKind, dict[str, torch.Tensor]]:
    """A kind of int4 layers, and the constants of a block."""
    exported = program(quantized(Layer(), "8da4w"), meta(*STATE))
    return lower_kind({"score": exported}, SIZES.values()), tensors(exported)


def test_layouts_are_known(lowered: tuple[LoweredKind, dict[str, torch.Tensor]]) -> None:
    kind, _ = lowered
    layouts = {entry.name: entry.layout for entry in kind.weights.entries}
    assert layouts == {
        "layer_weight_qdata": "int4",
        "layer_weight_scale": "as it is",
        "layer.bias": "as it is",
    }
    assert set(kind.weights.fixed) == {"layer_weight_zero_point"}


def test_a_table_is_laid_out_in_no_way_that_no_part_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of a large table would be in memory beside it."""
    packed, laid_out = LAYOUTS["int4"], list[bool]()

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is torch.int8:
            laid_out.append(tensor.is_meta)
        return packed(tensor)

    monkeypatch.setitem(LAYOUTS, "int4", watched)
    lower_kind({"embed": program(Embedding(1, True), meta(10007, 10009, dtype=torch.long))}, SIZES.values())
    assert laid_out and all(laid_out)


def test_scales_of_float32_are_stored_as_bfloat16() -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    layer = Layer()
    settings = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32), weight_scale_dtype=torch.float32
    )
    quantize_(layer, settings)
    kind = lower_kind({"score": program(layer.eval().requires_grad_(False), meta(*STATE))}, SIZES.values())
    layouts = {entry.name: entry.layout for entry in kind.weights.entries}
    assert layouts["layer_weight_scale"] == "bfloat16"


def test_a_layout_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LAYOUTS, "int4")
    exported = program(quantized(Layer(), "8da4w"), meta(*STATE))
    with raises(Refusal, "unknown-constant", saying="256 bytes"):
        lower_kind({"score": exported}, SIZES.values())


def test_two_constants_with_one_key_are_told() -> None:
    class Chosen(nn.Module):
        """Of three numbers that are 0 or 1, two are equal."""

        def __init__(self) -> None:
            super().__init__()
            for name in "abc":
                self.register_buffer(name, torch.tensor([name != "a"]))

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            positive = state > 0
            return torch.logical_or(torch.logical_xor(positive, self.a), positive == self.b) & self.c

    with refusal("ambiguous-constant"):
        lower_kind({"score": program(Chosen(), meta(*STATE))}, SIZES.values())


def test_constants_that_are_not_the_kinds_are_named(
    lowered: tuple[LoweredKind, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    kind, weights = lowered
    (fixed,), name = kind.weights.fixed, kind.weights.entries[0].name
    for changed, code, wrong in (
        ({n: t for n, t in weights.items() if n != name}, "constant-missing", name),
        ({**weights, fixed: weights[fixed] + 1}, "constant-differs-from-program", fixed),
    ):
        with raises(Refusal, code, saying=wrong):
            kind.weights.write(tmp_path / "block.ptd", changed)
        assert not (tmp_path / "block.ptd").exists()
    with raises(Refusal, "constant-of-another-shape", saying=name):
        kind.weights.write(tmp_path / "block.ptd", {**weights, name: torch.zeros(3)})


def test_a_weight_that_another_operator_reads_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1, WIDTH))

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return F.linear(state, self.weight) * self.weight

    with raises(Refusal, "weight-read-otherwise", saying="weight"):
        lower_kind({"score": program(Tied().requires_grad_(False), meta(*STATE))}, SIZES.values())


def test_a_functional_program_is_not_traced_again() -> None:
    program = Constants({"score": block_program(Block(1))}).as_placeholders(block_program(Block(1)))
    targets = {node.target for node in program.graph.nodes}
    assert not targets & {aten.reshape.default, aten._assert_scalar.default}
    assert program.run_decompositions({}) is program
    # Tracing finds nothing that it writes otherwise.
    traced = ExportedProgram.run_decompositions(program, {})
    assert operators(traced) == operators(program)


def test_what_may_share_memory_is_traced() -> None:
    class Odd(nn.Module):
        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return state.transpose(1, 2).contiguous()

    given = program(Odd(), meta(*STATE))
    found = Constants({"score": given}).as_placeholders(given).run_decompositions({})
    assert found is not given and aten.contiguous.default not in operators(found)


def operators(program: ExportedProgram) -> list[object]:
    """What computes tensors, in order."""
    return [
        node.target
        for node in program.graph.nodes
        if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor)
    ]
