"""Blocks whose methods are graphs in PyTorch, as programs are lowered from: a driver without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Interpreter

from device_runner.engines.interfaces import AttentionHeads, read_routings
from prge.engine import Array
from prge.files import chain as manifest
from prge.files.chain import PAST_KEYS, PAST_VALUES, Bounds, Interface
from prge.files.relations import RELATIONS
from prge.files.signatures import ALL_ROLES, BACK, DECODE, OF_BACK, PREFILL, STACK, STEP_ROLES, TANGENT
from prge.learning.experts import Routing
from server_export.checkpoint.files import find_files
from server_export.checkpoint.loading import outline_model
from server_export.derive.backprop.layers import with_transposed
from server_export.ir.markers import BATCH, COPIES, PAST, QUERIES, TOKENS
from server_export.ir.modules import attribute
from server_export.ir.shapes import with_size
from server_export.lower import roles
from server_export.pipeline import build_chain
from server_export.trace.cutting import moves

_MARKERS = (COPIES, BATCH, TOKENS, QUERIES, PAST)


class GraphBlocks:
    """What `device_runner.engines.blocks.Blocks` is to the driver.

    Args:
        model: folder of a tiny model; of an encoder the first state is answered.
        lora_a: f32 [rank, in] by adapted layer.
        bounds: of calls.
    """

    def __init__(self, model: Path, lora_a: Mapping[str, torch.Tensor], bounds: Bounds) -> None:
        outline, files = outline_model(str(model)), find_files(str(model))
        self._model = build_chain(outline, files, dict(lora_a), longest=bounds.context)
        self.lora_a = {name: matrix.numpy() for name, matrix in lora_a.items()}
        self.sha256 = "no bundle"
        self._graphs: dict[int, dict[str, GraphModule]] = {}
        self._methods: dict[int, dict[str, Interface]] = {}
        self._sharing = {number: self._derive(number) for number in self._model.kinds}
        self.chain = self._described(bounds)
        widths = [(0, self._width(0)), *map(self._model.state_widths, range(1, len(self._model.blocks)))]
        self._routings = read_routings(self.chain, widths)
        self.tables = SimpleNamespace(of=self._table, tensor=self._table_tensor)
        self._sized = lru_cache(None)(self._graph_of_sizes)
        self._tensors = lru_cache(None)(self._tensors_of)

    def _derive(self, number: int) -> Any:
        model, block = self._model, self._model.blocks[number]
        graph, is_head = model.kinds[number].graph_module, number >= model.end
        changes = moves(model.blocks)
        sharing = roles.sharing_of(graph, [changes[v] for v in block.takes], len(block.gives), ALL_ROLES)
        lowest = next(place for place, each in enumerate(model.blocks) if each.adapter)
        wanted = ALL_ROLES if number in model.kind_of[lowest:] else (STACK, PREFILL, DECODE)
        if not model.is_decoder:
            wanted = tuple(role for role in wanted if role in (*STEP_ROLES, *OF_BACK))
        if block.is_expert:
            wanted = (STACK, TANGENT, BACK) if wanted is ALL_ROLES else (STACK,)
        layers = list(dict.fromkeys(model.adapter[name].of for name in block.adapter))
        place = {layer: str(index) for index, layer in enumerate(layers)}
        adapter = {
            name: replace(model.adapter[name], of=place[model.adapter[name].of]) for name in block.adapter
        }
        graphs = roles.role_graphs(graph, adapter, wanted, is_head, sharing, not block.is_expert)
        self._graphs[number] = graphs
        self._methods[number] = {
            role: roles._interface(each, role, adapter, is_head, sharing) for role, each in graphs.items()
        }
        return sharing

    def _described(self, bounds: Bounds) -> manifest.Chain:
        model = self._model
        kinds, files = list(model.kinds), dict[Any, int]()
        number_of = {module.name: number for number, module in enumerate(model.modules)}
        blocks = [
            manifest.Block(
                kinds.index(kind),
                f"{files.setdefault((kind, block.weights), number)}.ptd",
                block.tables,
                tuple(
                    number_of[name]
                    for name in dict.fromkeys(model.adapter[each].of for each in block.adapter)
                ),
                block.takes,
                self._sharing[kind].past,
            )
            for number, (block, kind) in enumerate(zip(model.blocks, model.kind_of, strict=True))
        ]
        tables = [manifest.Table(t.kind, t.window, t.first, t.members) for t in model.tables.all]
        readout, pooling = ("logprobs", "mean") if model.is_decoder else ("pooled", "first")
        return manifest.Chain(
            readout, pooling, self._width(model.end - 1), model.vocabulary_size, model.modules, bounds,
            tuple(tables), tuple(
                manifest.Kind(f"{kind}.pte", self._methods[kind], model.blocks[kind].is_expert)
                for kind in kinds
            ), tuple(blocks), tuple(model.shared),
        )  # fmt: skip

    def _width(self, number: int) -> int:
        """Width of what a block answers."""
        graph = self._graphs[self._model.kind_of[number]][STACK]
        return int(graph.graph.output_node().args[0][0].meta["val"].shape[-1])

    def width(self, number: int) -> int:
        if routing := self._routings.get(number):
            return routing.entering
        return self._model.state_widths(number)[0] if number < len(self._model.blocks) else self.chain.width

    def routing(self, number: int) -> Routing:
        return self._routings[number]

    def shared_width(self, value: int) -> int:
        maker = self._model.shared[value]
        answers = self._graphs[self._model.kind_of[maker]][STACK].graph.output_node().args[0]
        return int(answers[1 + self.chain.gives(maker).index(value)].meta["val"].shape[-1])

    def saved_widths(self, number: int) -> dict[str, int]:
        names, graph = self.chain.saved(number), self._graphs[self._model.kind_of[number]].get("save")
        answers = graph.graph.output_node().args[0][1:] if graph else ()
        return {name: int(answer.meta["val"].shape[-1]) for name, answer in zip(names, answers, strict=False)}

    def heads(self, number: int) -> AttentionHeads:
        found = self._before(number)
        if PAST_KEYS not in found:
            return AttentionHeads(0, 0, 0)
        return AttentionHeads(found[PAST_KEYS][0], found[PAST_KEYS][2], found[PAST_VALUES][2])

    def carried(self, number: int) -> dict[str, tuple[int, ...]]:
        shapes = self._before(number).items()
        return {name.replace("_", "."): shape[1:] for name, shape in shapes if name.startswith("carried_")}

    def _before(self, number: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what a piece of a row is given."""
        graph = self._graphs[self._model.kind_of[number]].get(PREFILL)
        nodes = graph.graph.find_nodes(op="placeholder") if graph else []
        return {str(node.target): tuple(node.meta["val"].shape) for node in nodes}

    def interface(self, number: int, role: str) -> Interface:
        return self._methods[self._model.kind_of[number]][role]

    def release(self, array: Array) -> None:
        pass

    def run(
        self,
        number: int,
        role: str,
        inputs: Mapping[str, Array],
        into: Mapping[str, Array] = MappingProxyType({}),
    ) -> dict[str, Array]:
        interface, kind = self.interface(number, role), self._model.kind_of[number]
        given = [torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in interface.inputs]
        placeholders = self._graphs[kind][role].graph.find_nodes(op="placeholder")
        sizes = {}
        for node, array in zip(placeholders, given, strict=True):
            marked = [n for n in node.meta["val"].shape]
            if len(marked) != array.dim():
                # Products of sizes are dimensions of their own in a program.
                marked = [factor for n in marked for factor in _factors(n)]
            for size, length in zip(marked, array.shape, strict=True):
                for marker in _MARKERS:
                    if size % marker == 0:
                        assert length % (size // marker) == 0, (number, role, node.target, array.shape)
                        assert sizes.setdefault(marker, length // (size // marker)) == length // (
                            size // marker
                        )
        graph = self._sized(kind, role, tuple(sorted(sizes.items())))
        shaped = [
            array.reshape(node.meta["val"].shape)
            for array, node in zip(given, graph.graph.find_nodes(op="placeholder"), strict=True)
        ]
        answers = _Run(graph, self._tensors(number)).run(*shaped)
        found = dict(zip(interface.outputs, (answer.contiguous().numpy() for answer in answers), strict=True))
        for name, memory in into.items():
            memory[: found[name].size] = found[name].ravel()
        return found

    def in_a_row(
        self,
        role: str,
        calls: Mapping[int, tuple[Sequence[Array], Sequence[Array]] | Callable[[], None]],
        before: Callable[[int], None] | None = None,
    ) -> Callable[[], None]:
        def compute() -> None:
            for number, call in calls.items():
                if before is not None:
                    before(number)
                if callable(call):
                    call()
                    continue
                given, answers = call
                interface = self.interface(number, role)
                found = self.run(number, role, dict(zip(interface.inputs, given, strict=True)))
                for name, array in zip(interface.outputs, answers, strict=True):
                    array[...] = found[name].reshape(array.shape)

        return compute

    def _graph_of_sizes(self, kind: int, role: str, sizes: tuple[tuple[int, int], ...]) -> GraphModule:
        graph = self._graphs[kind][role]
        for marker, size in sizes:
            graph = with_size(graph, marker, size)
        return graph

    def _tensors_of(self, number: int) -> dict[str, torch.Tensor]:
        graphs = self._graphs[self._model.kind_of[number]].values()
        names = {str(node.target) for graph in graphs for node in graph.graph.find_nodes(op="get_attr")}
        return with_transposed(self._model.tensors(number), names)

    def _table(self, number: int, length: int, start: int = 0) -> Array:
        table = self._model.tables.all[number]
        if table.kind == "causal" or table.kind in RELATIONS:
            return table.of(length).numpy()
        return table.of(start + length)[:, start:].contiguous().numpy()

    def _table_tensor(self, number: int, length: int) -> tuple[str, tuple[int, ...]]:
        array = self._table(number, length)
        return array.dtype.name, array.shape


class _Run(Interpreter):
    """A graph with the tensors of a block."""

    def __init__(self, graph: GraphModule, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(graph)
        self._tensors = tensors

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        tensor = self._tensors.get(str(target))
        return attribute(self.module, str(target)) if tensor is None else tensor


def _factors(number: int) -> list[int]:
    found = []
    for marker in _MARKERS:
        while number % marker == 0:
            found.append(marker)
            number //= marker
    return found if number == 1 and found else [*found, number]
