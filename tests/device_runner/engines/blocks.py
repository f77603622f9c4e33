"""Two blocks of one type, lowered without weights: one program, and a weights file for each block."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir._serialize._program import PTEFile, serialize_pte_binary
from executorch.exir._serialize.data_serializer import DataEntry, DataPayload
from executorch.exir.passes import MemoryPlanningPass
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from torch import nn
from torch.export import Dim, export

from prge.engine import Array

WIDTH, HIDDEN, RANK = 32, 64, 4
MAX_ROWS, MAX_TOKENS = 6, 12
METHODS = ("score", "backward")
# As a share of the largest value: rounding, and its effect with int8 activations.
TOLERANCE = {"fp32": 2e-6, "8da4w": 5e-3}


class Block(nn.Module):
    """Self-attention, a gated layer and an adapter; `role` selects what a call computes."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up, self.gate = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.register_buffer("lora_a", torch.randn(WIDTH, RANK) * 0.1)

    def forward(self, state: Any, other: Any, lora_b: Any) -> Any:
        """Return hidden states for `score`, or gradients of hidden states and `lora_b` for `backward`."""
        normed = state * torch.rsqrt((state * state).mean(-1, keepdim=True) + 1e-5) * self.norm
        reduced = normed @ self.lora_a
        if self.role == "backward":
            gradient = torch.bmm(reduced.flatten(0, 1)[None].transpose(1, 2), other.flatten(0, 1)[None])
            return other + self.down(self.gate(normed)) + reduced @ lora_b, gradient[0]
        attended = torch.softmax(normed @ normed.transpose(1, 2) + other, -1) @ normed
        layer = self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return state + attended + layer + reduced @ lora_b


@dataclass(frozen=True)
class LoweredBlocks:
    """A lowered program, the weights files of two blocks, and the blocks themselves by role."""

    scheme: str
    dynamic: bool
    program: Path
    weights: tuple[Path, Path]
    eager: tuple[dict[str, nn.Module], dict[str, nn.Module]]

    def expected(self, block: int, method: str, inputs: list[Array]) -> list[Array]:
        """Return the outputs of PyTorch."""
        with torch.no_grad():
            result = self.eager[block][method](*map(torch.from_numpy, inputs))
        return [value.numpy() for value in (result if isinstance(result, tuple) else (result,))]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Yield the rows and tokens that the methods take."""
        largest = (MAX_ROWS, MAX_TOKENS)
        return [largest, (1, 2), (3, 7), largest] if self.dynamic else [largest]

    def assert_right(self, block: int, method: str, inputs: list[Array], result: list[Array]) -> None:
        """Compare outputs with PyTorch."""
        for array, want in zip(result, self.expected(block, method, inputs), strict=True):
            assert array.shape == want.shape
            np.testing.assert_allclose(array, want, rtol=0, atol=TOLERANCE[self.scheme] * np.abs(want).max())


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_inputs(method: str, rows: int = MAX_ROWS, tokens: int = MAX_TOKENS, seed: int = 0) -> list[Array]:
    """Return inputs of a method, by default of the largest shape."""
    random = np.random.default_rng([seed, rows, tokens])
    state = random.standard_normal((rows, tokens, WIDTH), np.float32)
    lora_b = random.standard_normal((RANK, WIDTH), np.float32)
    mask = np.triu(np.full((tokens, tokens), -1e9, np.float32), 1)
    return [state, mask if method == "score" else random.standard_normal(state.shape, np.float32), lora_b]


def make_outputs(method: str, rows: int = MAX_ROWS, tokens: int = MAX_TOKENS) -> list[Array]:
    """Allocate memory for a method's outputs."""
    shapes: dict[str, list[tuple[int, ...]]] = {
        "score": [(rows, tokens, WIDTH)],
        "backward": [(rows, tokens, WIDTH), (RANK, WIDTH)],
    }
    return [np.full(shape, np.nan, np.float32) for shape in shapes[method]]


def compute_outputs(programs: LoweredBlocks, blocks: list[dict[str, Any]]) -> list[bytes]:
    """Return the outputs of both blocks' methods at every shape, after comparing them with PyTorch."""
    result = []
    for shape in programs.shapes:
        for name in METHODS:
            for block, methods in enumerate(blocks):
                inputs, outputs = make_inputs(name, *shape), make_outputs(name, *shape)
                assert methods[name].run(inputs, outputs) == [output.shape for output in outputs]
                programs.assert_right(block, name, inputs, outputs)
                result += [output.tobytes() for output in outputs]
    return result


def make_block_types(folder: Path, scheme: str) -> dict[bool, LoweredBlocks]:
    """Lower two blocks; returns them by whether rows and tokens are dynamic.

    The program is the first block's without its data; both blocks have a weights file with the same keys.
    """
    blocks = _block(1, scheme), _block(2, scheme)
    # A block's forward pass reads all of its constants.
    first, second = _lower(blocks[0], dynamic=True), _lower({"score": blocks[1]["score"]}, dynamic=True)
    keys = [(key, layout) for key, _, layout in _constants(first)]
    assert len({key for key, _ in keys}) == len(keys)
    weights = []
    for name, lowered in (("a.ptd", first), ("b.ptd", second)):
        assert len(_constants(lowered)) == len(keys)
        entries = {key: DataEntry(index, 16, layout) for index, (key, layout) in enumerate(keys)}
        payload = DataPayload([content for _, content, _ in _constants(lowered)], entries)
        weights.append(folder / name)
        weights[-1].write_bytes(bytes(FlatTensorSerializer().serialize(payload)))
    block_types = {}
    for dynamic, lowered in ((True, first), (False, _lower(blocks[0], dynamic=False))):
        program = folder / f"{'dynamic' if dynamic else 'static'}.pte"
        file = PTEFile(program=lowered.executorch_program, mutable_data=None, named_data=None)
        program.write_bytes(bytes(serialize_pte_binary(file, segment_alignment=128)))
        block_types[dynamic] = LoweredBlocks(scheme, dynamic, program, (weights[0], weights[1]), blocks)
    return block_types


def _block(seed: int, scheme: str) -> dict[str, nn.Module]:
    modules = {}
    for role in METHODS:
        torch.manual_seed(seed)
        modules[role] = Block(role).eval()
        if scheme != "fp32":
            from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
            from torchao.quantization.granularity import PerGroup

            quantize_(
                modules[role],
                Int8DynamicActivationIntxWeightConfig(
                    weight_dtype=torch.int4, weight_granularity=PerGroup(32)
                ),
            )
    return modules


def _lower(block: dict[str, nn.Module], dynamic: bool) -> Any:
    rows, tokens = Dim("rows", min=1, max=MAX_ROWS), Dim("tokens", min=2, max=MAX_TOKENS)
    state = {0: rows, 1: tokens}
    shapes: dict[str, list[tuple[int, ...]]] = {
        "score": (state, {0: tokens, 1: tokens}, None),
        "backward": (state, state, None),
    }
    exported = {
        method: export(
            module,
            tuple(map(torch.from_numpy, make_inputs(method))),
            dynamic_shapes=shapes[method] if dynamic else None,
            strict=True,
        )
        for method, module in block.items()
    }
    edge = to_edge_transform_and_lower(
        exported,
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    return edge.to_executorch(ExecutorchBackendConfig(external_constants=True, memory_planning_pass=planning))


def _constants(lowered: Any) -> list[tuple[str, bytes, Any]]:
    """Return key, content and layout of every constant, in an order that blocks of one graph share."""
    named = lowered._named_data
    result = [
        (key, bytes(named.buffers[entry.buffer_index]), entry.tensor_layout)
        for key, entry in named.pte_data.items()
    ]
    for blob in lowered._tensor_data.values():
        payload = FlatTensorSerializer().deserialize(blob)
        result += [
            (key, bytes(payload.buffers[entry.buffer_index]), entry.tensor_layout)
            for key, entry in payload.named_data.items()
        ]
    return result
