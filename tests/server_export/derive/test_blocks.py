"""JVPs and gradients of the blocks of models are the derivatives of these blocks, at any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from prge.formats.signatures import BACKWARD, BACKWARD_SAVED, FORWARD, FORWARD_SAVE, JVP, Part, Port
from server_export.adapter.layers import convert_conv1d, match_target_modules
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model
from server_export.derive.backward.layers import TRANSPOSED
from server_export.derive.roles import derive, is_head
from server_export.ir.block import Block
from server_export.ir.modules import get_attribute
from server_export.model.chain import ModelChain
from server_export.pipeline import build_chain
from server_export.trace.attention import padding_mask
from tests.server_export.derive.jvp.graphs import random, relative_difference
from tests.tiers import second_tier
from tests.tiny_models import ARCHITECTURES, save_model

torch.set_num_threads(1)

aten = torch.ops.aten

# The linear layers inside the blocks of every architecture. Mamba's step sizes are a product with a weight,
# for which no layer is called.
IN_BLOCKS = (
    r".*(layers|layer|h)\.\d+\..*"
    r"((?<!dt)_proj|c_attn|c_fc|fc1|fc2|query|key|value|dense|[qkvt]_lin|lin1|lin2|W(qkv|o|i))"
)
# Grouped attention with rotations, soft caps, biases, projections outside of the blocks.
DIFFERENT = ("llama", "gemma2", "gpt2", "opt")
RANK, LONGEST = 4, 64
ROWS, TOKENS, QUERIES = 2, 7, 4

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Derived:
    """A block by role, and inputs by port name."""

    blocks: dict[str, Block]
    adapter: list[str]
    inputs: Tensors

    def call(self, role: str, changes: Mapping[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return the outputs of a role, with autograd for inputs that require gradients."""
        inputs = self.inputs | dict(changes or {})
        if role != JVP:
            # In the backward roles every row has a copy.
            copies = 1 if role == FORWARD else len(self.state)
            inputs |= {name: inputs[name].expand(copies, -1, -1) for name in self.adapter}
        return list(self.blocks[role].call(inputs).values())

    @property
    def is_head(self) -> bool:
        return is_head(self.blocks[FORWARD])

    @property
    def grad_output(self) -> str:
        """The port of the gradient of the output."""
        return "grad_parts" if self.is_head else "grad_hidden_states"

    @property
    def state(self) -> torch.Tensor:
        return self.inputs["hidden_states"]


def chain_of(architecture: str, folder: Path, scheme: str, rank: int, trains_a: bool = False) -> ModelChain:
    path = save_model(folder / "model", architecture)
    with torch.device("meta"):
        convert_conv1d(twin := load_meta_model(str(path)).model)
    lora_a = {
        name: random(rank, twin.get_submodule(name).in_features, dtype=torch.float32) * 0.1
        for name in match_target_modules(twin, IN_BLOCKS)
    }
    outline = load_meta_model(str(path))
    scales = dict.fromkeys(lora_a, 1.5) if trains_a else None
    files = find_files(str(path))
    return build_chain(outline, files, lora_a, scales=scales, longest=LONGEST, scheme=scheme)


def derived_of(architecture: str, folder: Path, scheme: str = "fp32", rank: int = RANK) -> list[Derived]:
    """Return the block types of a tiny model, with the weights of the first block of each.

    If the name of the architecture ends in ` lora`, both adapter matrices are trained.
    """
    architecture, _, adapter = architecture.partition(" ")
    chain = chain_of(architecture, folder, scheme, rank, trains_a=adapter == "lora")
    return [derived(chain, number) for number in chain.block_types if number]


def with_weights(chain: ModelChain, number: int) -> Block:
    """Return the block of a type with the tensors of one block."""
    block = chain.block_types[chain.type_of[number]].block
    for name, tensor in chain.tensors(number).items():
        get_attribute(block.graph_module, name).copy_(tensor)
    return block


def derived(chain: ModelChain, number: int) -> Derived:
    block = with_weights(chain, number)
    blocks = derive(block, {FORWARD, JVP, BACKWARD})
    width = block.inputs[Port("hidden_states")].meta["val"].shape[-1]
    state = random(1 if is_head(block) else ROWS, TOKENS, width, dtype=torch.float32)
    inputs = {
        "hidden_states": state,
        "padding_mask": padding_mask((torch.arange(TOKENS) < torch.tensor([[TOKENS], [3]])).float()),
        "targets": torch.arange(TOKENS).reshape(1, TOKENS),
        "shift": torch.zeros(1, TOKENS, 1),
        "ones": torch.ones(1, TOKENS, 1),
        "tangent_hidden_states": random(QUERIES, *state.shape, seed=3, dtype=torch.float32),
    }
    tables = enumerate(chain.blocks[number].tables)
    inputs |= {f"table.{index}": chain.tables.all[table].of(TOKENS) for index, table in tables}
    adapter = [port for port in block.inputs if port.is_adapter]
    for port in adapter:
        shape = tuple(block.inputs[port].meta["val"].shape[1:])
        inputs[port.name] = random(*shape, seed=1, dtype=torch.float32) * 0.3
        for part, size in zip((Part.U, Part.V), shape, strict=True):
            factor = random(QUERIES, ROWS, size, seed=2, dtype=torch.float32)
            inputs[replace(port, part=part).name] = factor
    return Derived(blocks, [port.name for port in adapter], inputs)


def gradients_of(of_type: Derived, grad_output: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output, and autograd's gradients of hidden states and adapter."""
    differentiated = {
        name: of_type.inputs[name].clone().requires_grad_() for name in ("hidden_states", *of_type.adapter)
    }
    (output,) = of_type.call(FORWARD, differentiated)
    return output.detach(), list(torch.autograd.grad(output, list(differentiated.values()), grad_output))


@pytest.mark.parametrize(
    ("architecture", "rank"),
    [
        ("llama", RANK),
        ("bert", RANK),
        ("llama lora", RANK),
        *second_tier(*((name, RANK) for name in ARCHITECTURES if name not in ("llama", "bert"))),
        *second_tier(("llama", 1), ("bert", 1)),
    ],
)
def test_gradients_equal_autograds_for_each_row_of_the_adapter(
    architecture: str, rank: int, tmp_path: Path
) -> None:
    for of_type in derived_of(architecture, tmp_path, rank=rank):
        grad_output = torch.randn(of_type.call(FORWARD)[0].shape)
        of_rows = [
            grad_output * (torch.arange(len(grad_output)) == row)[:, None, None]
            for row in range(len(grad_output))
        ]
        grad_state = gradients_of(of_type, grad_output)[1][0]
        grad_adapter = zip(*(gradients_of(of_type, of_row)[1][1:] for of_row in of_rows), strict=True)
        expected = [grad_state, *map(torch.stack, grad_adapter)]
        actual_values = of_type.call(BACKWARD, {of_type.grad_output: grad_output})
        largest = float(torch.cat([part.ravel() for part in expected]).abs().max())
        for actual, reference in zip(actual_values, expected, strict=True):
            assert actual.shape == reference.shape
            assert float((actual - reference).abs().max()) < 1e-5 * largest


def linear_layers(block: Block) -> list[str]:
    """Return the names of the weights with more than one row that a block multiplies by."""
    graph = block.graph_module.graph
    weights = [node.args[1] for node in graph.find_nodes(op="call_function", target=aten.linear.default)]
    read = [weight if weight.op == "get_attr" else weight.args[0] for weight in weights]
    return [str(weight.target) for weight in read if len(weight.meta["val"]) > 1]


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("llama", "8da4w"),
        ("bert", "fp32"),
        *second_tier(
            *((name, "fp32") for name in (*ARCHITECTURES, "llama lora", "bert lora") if name != "bert")
        ),
        *second_tier(("bert", "8da8w"), ("gpt2", "8da4w"), ("llama lora", "8da8w")),
    ],
)
def test_the_backward_pass_from_residuals_is_the_same_without_frozen_layers(
    architecture: str, scheme: str, tmp_path: Path
) -> None:
    for of_type in derived_of(architecture, tmp_path, scheme):
        output, *saved = of_type.call(FORWARD_SAVE)
        assert torch.equal(output, of_type.call(FORWARD)[0])
        grad_output = torch.randn(output.shape)
        # The backward pass of a head has another shift.
        changes = {of_type.grad_output: grad_output} | (
            {"shift": of_type.inputs["shift"] + 0.5} if of_type.is_head else {}
        )
        residuals = {f"residual.{number}": value for number, value in enumerate(saved)}
        for actual, reference in zip(
            of_type.call(BACKWARD_SAVED, changes | residuals), of_type.call(BACKWARD, changes), strict=True
        ):
            assert torch.equal(actual, reference)
        forward = {name for name in linear_layers(of_type.blocks[FORWARD]) if not name.startswith("constant")}
        if not forward:
            # After the layers of some encoders there is only a norm.
            assert not saved
            continue
        assert forward & {*linear_layers(of_type.blocks[BACKWARD])}
        backward_layers = {
            name for name in linear_layers(of_type.blocks[BACKWARD_SAVED]) if not name.startswith("constant")
        }
        assert backward_layers and all(name.startswith(TRANSPOSED) for name in backward_layers)
        assert {value.shape[:2] for value in saved} == {of_type.state.shape[:2]}


@pytest.mark.parametrize(
    ("architecture", "rank"),
    [("llama", 1), ("bert", RANK), ("llama lora", RANK), *second_tier(*((name, RANK) for name in DIFFERENT))],
)
def test_tangents_agree_with_backpropagation(architecture: str, rank: int, tmp_path: Path) -> None:
    for of_type in derived_of(architecture, tmp_path, rank=rank):
        output, tangents = of_type.call(JVP)
        assert relative_difference(output, of_type.call(FORWARD)[0]) < 1e-5
        # A row of tangents times weights equals its direction times the gradients of the weighted output.
        for row in range(of_type.state.shape[0]):
            weights = torch.zeros_like(output)
            weights[row] = random(*output.shape[1:], seed=4, dtype=torch.float32)
            _, (grad_state, *grad_adapter) = gradients_of(of_type, weights)
            expected = torch.einsum("qrtw,rtw->q", of_type.inputs["tangent_hidden_states"], grad_state)
            for name, grad_output in zip(of_type.adapter, grad_adapter, strict=True):
                matrix, _, number = name.partition(".")
                letter = "_a" if matrix == "lora_a" else ""
                u, v = (of_type.inputs[f"{factor}{letter}.{number}"][:, row] for factor in "uv")
                expected += torch.einsum("qi,ij,qj->q", u, grad_output, v)
            actual_values = (tangents * weights).flatten(1).sum(1)
            assert relative_difference(actual_values, expected) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [("llama", "8da4w"), *second_tier(("bert", "8da8w"), ("qwen3", "8da8w"), ("gpt2", "8da4w"))],
)
def test_derivatives_of_a_quantized_block_are_those_of_its_weights(
    architecture: str, scheme: str, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    for of_type, plain in zip(
        derived_of(architecture, tmp_path, scheme), derived_of(architecture, tmp_path / "plain"), strict=True
    ):
        grad_output = torch.randn(of_type.call(FORWARD)[0].shape)
        for role in (JVP, BACKWARD):
            pairs = zip(
                of_type.call(role, {of_type.grad_output: grad_output}),
                plain.call(role, {of_type.grad_output: grad_output}),
                strict=True,
            )
            for actual, reference in pairs:
                assert float(F.cosine_similarity(actual.ravel(), reference.ravel(), dim=0)) > 0.97
