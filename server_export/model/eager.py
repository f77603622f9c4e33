"""One block of a chain in PyTorch, with its own weights, at the sizes of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from prge.engine import FloatArray
from prge.learning.experts import Routing
from prge.model_spec import matrices
from server_export.ir.markers import BATCH, COPIES, TOKENS
from server_export.ir.modules import attribute
from server_export.ir.shapes import resized
from server_export.model.chain import ModelChain
from server_export.trace.cutting import TABLE_PREFIX, TAKEN_PREFIX

aten = torch.ops.aten

Watch = Callable[[Sequence[str], torch.Tensor], None]


class EagerBlock(Interpreter):
    """A block of a chain with its weights; its graph's marked sizes are those of the call.

    `tensors` are those of its graph by name; who changes one changes what the block computes.

    Args:
        chain: in float32.
        number: of the block.

    Raises:
        BundleError: the files lack a weight, or it isn't finite.
    """

    def __init__(self, chain: ModelChain, number: int) -> None:
        self._chain, self.number = chain, number
        kind = chain.kind_of[number]
        super().__init__(chain.kinds[kind].graph_module)
        self.tensors = chain.tensors(number)
        self._layers = _read_by_layers(chain.kinds[kind].graph_module)
        self._watch: Watch | None = None
        self._zeros = {
            matrix.name: torch.zeros(1, matrix.rank, matrix.width) for matrix in matrices(chain.modules)
        }
        self._shape = (0, 0)

    def answer(
        self,
        state: torch.Tensor,
        beside: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        adapter: Mapping[str, torch.Tensor] | None = None,
        watch: Watch | None = None,
        shared: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The state f32 [rows, tokens, width] after the block; of a head [rows, tokens, 2].

        Args:
            state: before it, or tokens i64 [rows, tokens].
            beside: an encoder's additive mask [rows, 1, 1, tokens], or targets i64 [rows, tokens] of a head.
            shift: f32 [rows, tokens, 1] of a head.
            adapter: f32 [1, rank, width] by names of inputs; zeros where there is none.
            watch: is given what the linear layers of these weights see, [rows, tokens, in], or [any, in]
                where a layer sees something else of a row than its tokens. The weights' names are those of
                the kind's graph; layers that see the same share a call.
            shared: values f32 [rows, tokens, width] of these rows by number; the block takes some of them and
                adds others.
        """
        shared = {} if shared is None else shared
        self._watch = watch
        rows, length = self._shape = (int(state.shape[0]), int(state.shape[1]))
        given = {"beside": beside, "shift": shift}
        block, given_adapter = self._chain.blocks[self.number], {**self._zeros, **(adapter or {})}
        inputs = []
        for node in block.graph_module.graph.find_nodes(op="placeholder"):
            name = str(node.target)
            if name.startswith(TABLE_PREFIX):
                table = self._chain.tables.all[block.tables[int(name.removeprefix(TABLE_PREFIX))]]
                inputs.append(table.of(length))
            elif name.startswith(TAKEN_PREFIX):
                inputs.append(shared[block.takes[int(name.removeprefix(TAKEN_PREFIX))]])
            elif name in self._chain.adapter:
                inputs.append(given_adapter[self._chain.adapter[name].name])
            else:
                inputs.append(given.get(name, state))
        answer, *given = self.run(*inputs)
        shared |= {
            value: array.reshape(rows, length, -1) for value, array in zip(block.gives, given, strict=True)
        }
        result: torch.Tensor = answer.reshape(rows, length, -1)
        return result

    def run_node(self, n: Node) -> Any:
        """Also let a layer's input be watched."""
        value = super().run_node(n)
        if self._watch is not None and n in self._layers:
            is_of_tokens = value.numel() == math.prod(self._shape) * value.shape[-1]
            shape = self._shape if is_of_tokens else (-1,)
            self._watch(self._layers[n], value.reshape(*shape, value.shape[-1]))
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A tensor of this block, or one that all of its kind have."""
        tensor = self.tensors.get(str(target))
        return attribute(self.module, str(target)) if tensor is None else tensor

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        """The arguments of a node, with the call's sizes for the markers."""
        return map_aggregate(super().fetch_args_kwargs_from_env(n), self._sized)

    def _sized(self, value: Any) -> Any:
        rows, length = self._shape
        for marker, size in ((COPIES, 1), (BATCH, rows), (TOKENS, length)):
            value = resized(value, marker, size)
        return value


def _read_by_layers(graph_module: GraphModule) -> dict[Node, list[str]]:
    """The nodes that linear layers read, with the names of the layers' weights."""
    found: dict[Node, list[str]] = {}
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.linear.default):
        source, weight = node.args[:2]
        if weight.op == "get_attr":
            found.setdefault(source, []).append(str(weight.target))
    return found


def through_experts(
    chain: ModelChain,
    experts: range,
    states: Sequence[torch.Tensor],
    prepare: Callable[[EagerBlock, torch.Tensor], object] = lambda expert, given: None,
) -> list[torch.Tensor]:
    """States f32 [rows, tokens, width] behind the experts of a layer, with one in memory at a time.

    Args:
        chain: in float32.
        experts: their numbers.
        states: before them.
        prepare: takes each expert and what it is given, f32 [1, tokens, in], before it answers.
    """
    first, behind = (chain.state_widths(number) for number in (experts.start, experts.stop))
    flat = torch.cat([state.reshape(-1, state.shape[-1]) for state in states]).numpy()
    routing = Routing(flat.shape[-1], behind[0], *first, len(experts))

    def run(expert: int, given: FloatArray) -> list[FloatArray]:
        block, states = EagerBlock(chain, experts.start + expert), torch.from_numpy(given)[None]
        prepare(block, states)
        return [block.answer(states)[0].numpy()]

    (found,) = routing.forward(flat, run)
    parts = torch.from_numpy(found).split([state.shape[0] * state.shape[1] for state in states])
    return [part.reshape(*state.shape[:2], -1) for part, state in zip(parts, states, strict=True)]
