"""Blocks that run the graphs of their roles in PyTorch: what an engine computes, with nothing lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from device_runner.engines.interfaces import AttentionHeads
from device_runner.engines.tables import Tables
from prge.engine import Array
from prge.files import chain as manifest
from prge.files.signatures import (
    BACK,
    DECODE,
    PREFILL,
    PREFILL_BACK,
    PREFILL_TANGENT,
    STACK,
    TANGENT,
    Sharing,
)
from server_export.derive.backprop.layers import with_transposed
from server_export.graph.modules import attribute
from server_export.graph.shapes import with_size
from server_export.lower.roles import PAST, QUERIES, _interface, role_graphs
from server_export.model.chain import ModelChain
from server_export.model.traced import BATCH, COPIES, TOKENS
from tests.server_export.derive.test_blocks import chain_of

ROLES = {STACK, TANGENT, BACK, PREFILL, DECODE, PREFILL_TANGENT, PREFILL_BACK}


class GraphBlocks:
    """Has what chain engine and speaker ask of device_runner.engines.blocks.Blocks.

    Args:
        architecture: of a tiny model, which is written to `folder`.
        bounds: of a call.
    """

    sha256, beside_weights = "", 0

    def __init__(self, architecture: str, folder: Path, bounds: manifest.Bounds) -> None:
        self.model = chain_of(architecture, folder, "fp32", 2)
        made = {first: _graphs(self.model, first) for first in self.model.kinds}
        self.chain = _described(self.model, bounds, [kind for _, kind in made.values()])
        self.tables = _ModelTables(self.chain, self.model)
        self.lora_a = {name: matrix.numpy() for name, matrix in self.model.lora_a.items()}
        self._graphs = {first: graphs for first, (graphs, _) in made.items()}
        self._sized: dict[Any, GraphModule] = {}

    def heads(self, number: int) -> AttentionHeads:
        known = self._shapes(number)
        keys, values = known.get("past_keys", (0, 0, 0)), known.get("past_values", (0, 0, 0))
        return AttentionHeads(keys[0], keys[2], values[2])

    def carried(self, number: int) -> dict[str, tuple[int, ...]]:
        known = self._shapes(number).items()
        return {name.replace("_", "."): shape[1:] for name, shape in known if name.startswith("carried_")}

    def _shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        graph = self._graphs[self.model.kind_of[number]].get(PREFILL)
        nodes = graph.graph.find_nodes(op="placeholder") if graph else []
        return {str(node.target): tuple(node.meta["val"].shape) for node in nodes}

    def interface(self, number: int, role: str) -> manifest.Interface:
        return self.chain.kinds[self.chain.blocks[number].kind].methods[role]

    def width(self, number: int) -> int:
        return self.chain.width

    def shared_width(self, value: int) -> int:
        raise NotImplementedError("these models share nothing")

    def release(self, array: Array) -> None:
        """Nothing is used again."""

    def run(self, number: int, role: str, inputs: Mapping[str, Array], into: Any = None) -> dict[str, Array]:
        interface = self.interface(number, role)
        given = [torch.from_numpy(inputs[name]) for name in interface.inputs]
        assert all(each.is_contiguous() for each in given)
        graph = self._graph(number, role, dict(zip(interface.inputs, given, strict=True)))
        tensors = self.model.tensors(number)
        names = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
        for name, tensor in with_transposed(tensors, names).items():
            if name in names:
                attribute(graph, name).copy_(tensor)
        shapes = [node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            found = graph(*(each.reshape(shape) for each, shape in zip(given, shapes, strict=True)))
        return {
            name: each.clone(memory_format=torch.contiguous_format).numpy()
            for name, each in zip(interface.outputs, found, strict=True)
        }

    def in_a_row(self, role: str, calls: Mapping[int, Any], before: Any = None) -> Callable[[], None]:
        def compute() -> None:
            for number, (given, answers) in calls.items():
                interface = self.interface(number, role)
                found = self.run(number, role, dict(zip(interface.inputs, given, strict=True)))
                for name, answer in zip(interface.outputs, answers, strict=True):
                    answer[...] = found[name].reshape(answer.shape)

        return compute

    def _graph(self, number: int, role: str, given: Mapping[str, torch.Tensor]) -> GraphModule:
        lead = [*given["tokens" if "tokens" in given else "state"].shape]
        lead = lead[: len(lead) - ("state" in given)]
        sizes = dict.fromkeys((COPIES, BATCH, TOKENS, PAST, QUERIES), 1) | {TOKENS: lead[-1]}
        if role == DECODE:
            sizes[COPIES] = lead[0]
        elif role in ROLES - {PREFILL, PREFILL_BACK, PREFILL_TANGENT} and not self.chain.is_head(number):
            sizes[BATCH] = lead[-2]
            sizes[COPIES] = lead[0] if role == STACK else 1
        if "d_state" in given:
            sizes[QUERIES] = len(given["d_state"])
        if "past_keys" in given:
            sizes[PAST] = given["past_keys"].shape[1]
        kind = self.model.kind_of[number]
        key = kind, role, *sizes.values()
        if key not in self._sized:
            graph = self._graphs[kind][role]
            for marker, size in sizes.items():
                graph = with_size(graph, marker, size)
            self._sized[key] = graph
        return self._sized[key]


class _ModelTables(Tables):
    """Tables with the rotations of a model that was not written."""

    def __init__(self, chain: manifest.Chain, model: ModelChain) -> None:
        self._tables = chain.tables
        self._stored = {
            number: _Rows(table.values.numpy())
            for number, table in enumerate(model.tables.all)
            if table.values is not None
        }
        self.of = self._of  # type: ignore[assignment]


class _Rows:
    def __init__(self, values: Array) -> None:
        self._values = values

    def get_shape(self) -> Sequence[int]:
        return self._values.shape

    def __getitem__(self, rows: slice) -> Array:
        return self._values[rows]


def _graphs(model: ModelChain, first: int) -> tuple[dict[str, GraphModule], manifest.Kind]:
    block = model.blocks[first]
    layers = list(dict.fromkeys(model.adapter[name].of for name in block.adapter))
    adapter = {
        name: replace(model.adapter[name], of=str(layers.index(model.adapter[name].of)))
        for name in block.adapter
    }
    roles = ROLES if first else {STACK, PREFILL, DECODE}
    is_head = first >= model.end
    graphs = role_graphs(model.kinds[first].graph_module, adapter, roles, is_head)
    graphs = {role: graph for role, graph in graphs.items() if role in ROLES}
    methods = {role: _interface(graph, role, adapter, is_head, Sharing()) for role, graph in graphs.items()}
    return graphs, manifest.Kind("", methods)


def _described(model: ModelChain, bounds: manifest.Bounds, kinds: Sequence[manifest.Kind]) -> manifest.Chain:
    firsts, numbers = [*model.kinds], {module.name: n for n, module in enumerate(model.modules)}
    blocks = [
        manifest.Block(
            firsts.index(model.kind_of[number]),
            str(number),
            block.tables,
            tuple(dict.fromkeys(numbers[model.adapter[name].of] for name in block.adapter)),
        )
        for number, block in enumerate(model.blocks)
    ]
    return manifest.Chain(
        readout="logprobs",
        pooling="mean",
        width=64,
        vocabulary_size=model.vocabulary_size,
        modules=model.modules,
        bounds=bounds,
        tables=tuple(manifest.Table(t.kind, t.window, t.first, t.members) for t in model.tables.all),
        kinds=tuple(kinds),
        blocks=tuple(blocks),
    )
