"""Blocks whose methods are PyTorch graphs before lowering: tests of the driver without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from device_runner.engines.base import BoundCall
from device_runner.engines.planning import Layout
from device_runner.engines.shapes import AttentionHeads, read_routings
from prge.engine import Array
from prge.formats import chain as manifest
from prge.formats.chain import MASKED, Bounds, Interface
from prge.formats.relations import RELATIONS
from prge.formats.signatures import (
    ALL_ROLES,
    BACKWARD,
    DECODE,
    FORWARD,
    JVP,
    PAST_KEYS,
    PAST_VALUES,
    PREFILL,
    RESIDUAL_ROLES,
    STEP_ROLES,
    Port,
)
from prge.numerics.expert_routing import Routing
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import load_meta_model
from server_export.derive.backward.layers import add_transposed_weights
from server_export.derive.roles import derive
from server_export.ir.block import Block
from server_export.lower.roles import past_inputs
from server_export.pipeline import build_chain


class GraphBlocks:
    """Implements what the driver uses of `device_runner.engines.blocks.Blocks`.

    Args:
        model: folder of a tiny model; of an encoder the first state is the output.
        lora_a: f32 [rank, in] by adapted layer.
        bounds: bounds of calls.
    """

    def __init__(self, model: Path, lora_a: Mapping[str, torch.Tensor], bounds: Bounds) -> None:
        outline, files = load_meta_model(str(model)), find_files(str(model))
        self._model = build_chain(outline, files, dict(lora_a), longest=bounds.context)
        self.lora_a = {name: matrix.numpy() for name, matrix in lora_a.items()}
        self.sha256 = "no bundle"
        self._blocks: dict[int, dict[str, Block]] = {}
        self._past: dict[int, tuple[int, ...]] = {}
        for number in self._model.block_types:
            self._derive(number)
        self.chain = self._described(bounds)
        widths = [(0, self._width(0)), *map(self._model.hidden_widths, range(1, len(self._model.blocks)))]
        self._routings = read_routings(self.chain, widths)
        self.tables = SimpleNamespace(of=self._table, tensor=self._table_tensor)
        self._tensors = lru_cache(None)(self._tensors_of)

    def _derive(self, number: int) -> None:
        model, block = self._model, self._model.blocks[number]
        lowest = next(position for position, each in enumerate(model.blocks) if each.modules)
        roles = ALL_ROLES if number in model.type_of[lowest:] else (FORWARD, PREFILL, DECODE)
        if not model.is_decoder:
            roles = tuple(role for role in roles if role in (*STEP_ROLES, *RESIDUAL_ROLES))
        if block.is_expert:
            roles = (FORWARD, JVP, BACKWARD) if roles is ALL_ROLES else (FORWARD,)
        of_type = model.block_types[number].block
        self._blocks[number] = derive(of_type, roles, not block.is_expert)
        self._past[number] = past_inputs(of_type, roles)

    def _described(self, bounds: Bounds) -> manifest.Chain:
        model = self._model
        types, files = list(model.block_types), dict[Any, int]()
        number_of = {module.name: number for number, module in enumerate(model.modules)}
        blocks = [
            manifest.BlockSpec(
                types.index(first),
                f"{files.setdefault((first, block.weights), number)}.ptd",
                block.tables,
                tuple(number_of[module] for module in block.modules),
                block.shared_in,
                self._past[first],
            )
            for number, (block, first) in enumerate(zip(model.blocks, model.type_of, strict=True))
        ]
        tables = [manifest.TableSpec(t.type, t.window, t.first, t.members) for t in model.tables.all]
        readout, pooling = ("logprobs", "mean") if model.is_decoder else ("pooled", "first")
        return manifest.Chain(
            readout, pooling, self._width(model.head_start - 1), model.vocabulary_size, model.modules, bounds,
            tuple(tables), tuple(
                manifest.BlockProgram(
                    f"{first}.pte", _methods(self._blocks[first]), model.blocks[first].is_expert
                )
                for first in types
            ), tuple(blocks), tuple(model.shared),
        )  # fmt: skip

    def _width(self, number: int) -> int:
        """Return the width of a block's output."""
        block = self._blocks[self._model.type_of[number]][FORWARD]
        return block.value(block.outputs[0]).shape[-1]

    def width(self, number: int) -> int:
        if routing := self._routings.get(number):
            return routing.entering
        return self._model.hidden_widths(number)[0] if number < len(self._model.blocks) else self.chain.width

    def routing(self, number: int) -> Routing:
        return self._routings[number]

    def shared_width(self, value: int) -> int:
        maker = self._model.shared[value]
        block = self._blocks[self._model.type_of[maker]][FORWARD]
        return block.value(Port("shared_out", self.chain.shared_out(maker).index(value))).shape[-1]

    def residual_widths(self, number: int) -> dict[str, int]:
        block = self._blocks[self._model.type_of[number]].get("forward_save")
        saved = [port for port in block.outputs if port.value == "residual"] if block else []
        return {port.name: block.value(port).shape[-1] for port in saved if block}

    def heads(self, number: int) -> AttentionHeads:
        result = self._before(number)
        if PAST_KEYS not in result:
            return AttentionHeads(0, 0, 0)
        return AttentionHeads(result[PAST_KEYS][0], result[PAST_KEYS][2], result[PAST_VALUES][2])

    def recurrent_states(self, number: int) -> dict[str, tuple[int, ...]]:
        shapes = self._before(number).items()
        return {name: shape[1:] for name, shape in shapes if name.startswith("recurrent_state.")}

    def _before(self, number: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a chunk's inputs."""
        block = self._blocks[self._model.type_of[number]].get(PREFILL)
        inputs = block.inputs.items() if block else ()
        return {port.name: tuple(node.meta["val"].shape) for port, node in inputs}

    def interface(self, number: int, role: str) -> Interface:
        return self.chain.programs[self.chain.blocks[number].program].methods[role]

    def release(self, array: Array) -> None:
        pass

    def run(
        self,
        number: int,
        role: str,
        inputs: Mapping[str, Array],
        into: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        block = self._blocks[self._model.type_of[number]][role]
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
        answers = block.call(tensors, self._tensors(number))
        result = {name: answer.contiguous().numpy() for name, answer in answers.items()}
        for name, memory in into.items():
            memory[: result[name].size] = result[name].ravel()
        return result

    def bind_calls(
        self,
        role: str,
        calls: Mapping[int, BoundCall | Callable[[], None]],
        before: Callable[[int], None] | None = None,
    ) -> Callable[[], None]:
        def compute() -> None:
            for number, call in calls.items():
                if before is not None:
                    before(number)
                if not isinstance(call, BoundCall):
                    call()
                    continue
                interface = self.interface(number, role)
                result = self.run(number, role, dict(zip(interface.inputs, call.inputs, strict=True)))
                for name, array in zip(interface.outputs, call.outputs, strict=True):
                    array[...] = result[name].reshape(array.shape)
                for store in call.stores:
                    store.run()

        return compute

    def _tensors_of(self, number: int) -> dict[str, torch.Tensor]:
        graphs = [block.graph_module.graph for block in self._blocks[self._model.type_of[number]].values()]
        names = {str(node.target) for graph in graphs for node in graph.find_nodes(op="get_attr")}
        return add_transposed_weights(self._model.tensors(number), names)

    def _table(self, number: int, length: int, start: int = 0, branches: tuple[int, ...] = ()) -> Array:
        table = self._model.tables.all[number]
        if branches:
            values, layout = table.of(length).numpy(), Layout(length, branches)
            if table.type != "causal":
                return np.ascontiguousarray(values[:, layout.positions])
            by_distance = values[:, layout.positions[:, None], layout.positions]
            return np.where(layout.hides(), np.float32(MASKED), by_distance)
        if table.type == "causal" or table.type in RELATIONS:
            return table.of(length).numpy()
        return table.of(start + length)[:, start:].contiguous().numpy()

    def _table_tensor(self, number: int, length: int) -> tuple[str, tuple[int, ...]]:
        array = self._table(number, length)
        return array.dtype.name, array.shape


def _methods(blocks: Mapping[str, Block]) -> dict[str, Interface]:
    def names(ports: Iterable[Port]) -> tuple[str, ...]:
        return tuple(port.name for port in ports)

    return {role: Interface(names(block.inputs), names(block.outputs)) for role, block in blocks.items()}
