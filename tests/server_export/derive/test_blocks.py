"""Tangents and the way back of the blocks of models: the derivatives of the same blocks, at any size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from prge.files.signatures import BACK, BACK_SAVED, SAVE, STACK, TANGENT
from server_export.adapter.layers import convert_conv1d, match_target_modules
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import outline_model
from server_export.derive.backprop.layers import TRANSPOSED
from server_export.ir import markers
from server_export.ir.modules import attribute
from server_export.ir.shapes import with_size
from server_export.lower.roles import role_graphs
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from server_export.trace.attention import padding_mask
from tests.server_export.derive.tangent.graphs import inputs_of, random, relative_difference
from tests.tiers import rest
from tests.tiny_models import ARCHITECTURES, DECODERS, save_model

torch.set_num_threads(1)

aten = torch.ops.aten

# The linear layers inside of blocks, of every architecture.
# Mamba's steps are a product with a weight that no layer is called for.
IN_BLOCKS = (
    r".*(layers|layer|h)\.\d+\..*"
    r"((?<!dt)_proj|c_attn|c_fc|fc1|fc2|query|key|value|dense|[qkvt]_lin|lin1|lin2|W(qkv|o|i))"
)
# Grouped attention with rotations, soft caps, biases, projections beside the blocks.
DIFFERENT = ("llama", "gemma2", "gpt2", "opt")
RANK, LONGEST = 4, 64
ROWS, TOKENS, QUERIES = 2, 7, 4
SIZES = {markers.COPIES: 1, markers.BATCH: ROWS, markers.TOKENS: TOKENS, markers.QUERIES: QUERIES}
OF_BACKWARD = {markers.COPIES: ROWS, markers.TOKENS: TOKENS}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """Graphs of a kind of block by role, and inputs of their names."""

    graphs: dict[str, GraphModule]
    adapter: list[str]
    inputs: Tensors

    def call(self, role: str, **changes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a role's graph answers, with gradients where an input wants them."""
        given = self.inputs | changes
        if role != TANGENT:
            # In the backward roles every row has a copy.
            copies = 1 if role == STACK else len(self.state)
            given |= {name: given[name].expand(copies, -1, -1) for name in self.adapter}
        return tuple(self.graphs[role](*(given[name] for name in inputs_of(self.graphs[role]))))

    @property
    def is_head(self) -> bool:
        return self.inputs["state"].shape[0] == 1

    @property
    def state(self) -> torch.Tensor:
        return self.inputs["state"]


def chain_of(architecture: str, folder: Path, scheme: str, rank: int, trains_a: bool = False) -> ModelChain:
    path = save_model(folder / "model", architecture)
    with torch.device("meta"):
        convert_conv1d(twin := outline_model(str(path)).model)
    lora_a = {
        name: random(rank, twin.get_submodule(name).in_features, dtype=torch.float32) * 0.1
        for name in match_target_modules(twin, IN_BLOCKS)
    }
    outline = outline_model(str(path))
    scales = dict.fromkeys(lora_a, 1.5) if trains_a else None
    files = find_files(str(path))
    return build_chain(outline, files, lora_a, scales=scales, longest=LONGEST, scheme=scheme)


def kinds_of(architecture: str, folder: Path, scheme: str = "fp32", rank: int = RANK) -> list[Kind]:
    """The kinds of a tiny model's blocks above the embedding, with the weights of the first of each.

    Of an architecture with the word `lora` behind it both matrices are trained.
    """
    architecture, _, kind = architecture.partition(" ")
    chain = chain_of(architecture, folder, scheme, rank, trains_a=kind == "lora")
    last = len(chain.blocks) - 1
    return [
        kind_of(chain, number, is_head=architecture in DECODERS and number == last)
        for number in chain.kinds
        if number
    ]


def kind_of(chain: ModelChain, number: int, is_head: bool) -> Kind:
    block, kind = chain.blocks[number], chain.kinds[number]
    for name, tensor in chain.tensors(number).items():
        attribute(kind.graph_module, name).copy_(tensor)
    adapter = {name: chain.adapter[name] for name in block.adapter}
    graphs = role_graphs(kind.graph_module, adapter, {STACK, TANGENT, BACK}, is_head)
    for role in graphs:
        for marker, size in (SIZES if role in (STACK, TANGENT) else OF_BACKWARD).items():
            graphs[role] = with_size(graphs[role], marker, size)
    width = graphs[STACK].graph.find_nodes(op="placeholder")[0].meta["val"].shape[-1]
    state = random(1 if is_head else ROWS, TOKENS, width, dtype=torch.float32)
    beside = torch.arange(TOKENS).reshape(1, TOKENS)
    if not is_head:
        beside = padding_mask((torch.arange(TOKENS) < torch.tensor([[TOKENS], [3]])).float())
    shift = torch.zeros(1, TOKENS, 1)
    inputs = {"state": state, "beside": beside, "shift": shift, "ones": torch.ones(1, TOKENS, 1)}
    inputs |= {f"table_{n}": chain.tables.all[table].of(TOKENS) for n, table in enumerate(block.tables)}
    for name, matrix in adapter.items():
        shape = matrix.rank, matrix.width
        inputs[name] = random(*shape, seed=1, dtype=torch.float32) * 0.3
        for factor, width in zip("uv", shape, strict=True):
            inputs[f"{factor}_{name}"] = random(QUERIES, ROWS, width, seed=2, dtype=torch.float32)
    inputs["d_state"] = random(QUERIES, *state.shape, seed=3, dtype=torch.float32)
    return Kind(graphs, list(adapter), inputs)


def slopes(kind: Kind, slope: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Answer, and slopes by state and adapter, of autograd through the block."""
    wanted = {name: kind.inputs[name].clone().requires_grad_() for name in ("state", *kind.adapter)}
    (answer,) = kind.call(STACK, **wanted)
    return answer.detach(), list(torch.autograd.grad(answer, list(wanted.values()), slope))


@pytest.mark.parametrize(
    ("architecture", "rank"),
    [
        ("llama", RANK),
        ("bert", RANK),
        ("llama lora", RANK),
        *rest(*((name, RANK) for name in ARCHITECTURES if name not in ("llama", "bert"))),
        *rest(("llama", 1), ("bert", 1)),
    ],
)
def test_the_way_back_gives_the_slopes_of_autograd_by_the_adapter_those_of_each_row(
    architecture: str, rank: int, tmp_path: Path
) -> None:
    for kind in kinds_of(architecture, tmp_path, rank=rank):
        slope = torch.randn(kind.call(STACK)[0].shape)
        of_rows = [slope * (torch.arange(len(slope)) == row)[:, None, None] for row in range(len(slope))]
        by_state = slopes(kind, slope)[1][0]
        by_adapter = zip(*(slopes(kind, of_row)[1][1:] for of_row in of_rows), strict=True)
        expected = [by_state, *map(torch.stack, by_adapter)]
        found = kind.call(BACK, slope=slope)
        largest = float(torch.cat([part.ravel() for part in expected]).abs().max())
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            assert float((ours - theirs).abs().max()) < 1e-5 * largest


def linear_layers(graph: GraphModule) -> list[str]:
    """Names of the weights that a graph multiplies by, of more than one row."""
    weights = [
        node.args[1] for node in graph.graph.find_nodes(op="call_function", target=aten.linear.default)
    ]
    read = [weight if weight.op == "get_attr" else weight.args[0] for weight in weights]
    return [str(weight.target) for weight in read if len(weight.meta["val"]) > 1]


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("llama", "8da4w"),
        ("bert", "fp32"),
        *rest(*((name, "fp32") for name in (*ARCHITECTURES, "llama lora", "bert lora") if name != "bert")),
        *rest(("bert", "8da8w"), ("gpt2", "8da4w"), ("llama lora", "8da8w")),
    ],
)
def test_from_what_was_saved_the_way_back_is_the_same_without_a_frozen_layer_of_the_forward_pass(
    architecture: str, scheme: str, tmp_path: Path
) -> None:
    for kind in kinds_of(architecture, tmp_path, scheme):
        answer, *saved = kind.call(SAVE)
        assert torch.equal(answer, kind.call(STACK)[0])
        slope = torch.randn(answer.shape)
        # A head goes back with a shift of its own.
        changes = {"slope": slope} | ({"shift": kind.inputs["shift"] + 0.5} if kind.is_head else {})
        given = {f"saved_{number}": value for number, value in enumerate(saved)}
        for ours, theirs in zip(
            kind.call(BACK_SAVED, **changes, **given), kind.call(BACK, **changes), strict=True
        ):
            assert torch.equal(ours, theirs)
        forward = {name for name in linear_layers(kind.graphs[STACK]) if not name.startswith("constant")}
        if not forward:
            # Behind the layers of some encoders is a norm alone.
            assert not saved
            continue
        assert forward & {*linear_layers(kind.graphs[BACK])}
        back = {name for name in linear_layers(kind.graphs[BACK_SAVED]) if not name.startswith("constant")}
        assert back and all(name.startswith(TRANSPOSED) for name in back)
        assert {value.shape[:2] for value in saved} == {kind.state.shape[:2]}


@pytest.mark.parametrize(
    ("architecture", "rank"),
    [("llama", 1), ("bert", RANK), ("llama lora", RANK), *rest(*((name, RANK) for name in DIFFERENT))],
)
def test_tangents_are_those_of_backpropagation(architecture: str, rank: int, tmp_path: Path) -> None:
    for kind in kinds_of(architecture, tmp_path, rank=rank):
        answer, tangents = kind.call(TANGENT)
        assert relative_difference(answer, kind.call(STACK)[0]) < 1e-5
        # A row of tangents times weights is its direction times the slopes by these weights.
        for row in range(kind.state.shape[0]):
            weights = torch.zeros_like(answer)
            weights[row] = random(*answer.shape[1:], seed=4, dtype=torch.float32)
            _, (by_state, *by_adapter) = slopes(kind, weights)
            expected = torch.einsum("qrtw,rtw->q", kind.inputs["d_state"], by_state)
            for name, slope in zip(kind.adapter, by_adapter, strict=True):
                u, v = (kind.inputs[f"{factor}_{name}"][:, row] for factor in "uv")
                expected += torch.einsum("qi,ij,qj->q", u, slope, v)
            found = (tangents * weights).flatten(1).sum(1)
            assert relative_difference(found, expected) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [("llama", "8da4w"), *rest(("bert", "8da8w"), ("qwen3", "8da8w"), ("gpt2", "8da4w"))],
)
def test_derivatives_of_a_quantized_block_are_those_of_its_weights(
    architecture: str, scheme: str, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    for kind, plain in zip(
        kinds_of(architecture, tmp_path, scheme), kinds_of(architecture, tmp_path / "plain"), strict=True
    ):
        slope = torch.randn(kind.call(STACK)[0].shape)
        for role in (TANGENT, BACK):
            pairs = zip(kind.call(role, slope=slope), plain.call(role, slope=slope), strict=True)
            for ours, theirs in pairs:
                assert float(F.cosine_similarity(ours.ravel(), theirs.ravel(), dim=0)) > 0.97
