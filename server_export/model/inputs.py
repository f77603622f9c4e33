"""What a model's adapted layers see of some rows, computed block by block.

Every block runs over the states of all rows before the next one is read. So there is one block's weights in
memory, and one state of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from server_export.graph.cutting import TABLE_PREFIX
from server_export.graph.modules import attribute
from server_export.graph.shapes import resized
from server_export.model.attention import padding_mask
from server_export.model.chain import Chain, layer_of
from server_export.model.frozen import ADAPTER_WEIGHT
from server_export.model.traced import BATCH, COPIES, TOKENS

aten = torch.ops.aten

# Tokens of a forward, padding included; a row of more has one of its own.
_TOKENS = 2048


def watch_inputs(
    chain: Chain, rows: Sequence[Sequence[int]], watch: Callable[[Sequence[str], torch.Tensor], None]
) -> Iterator[None]:
    """Run a chain in PyTorch, as the model is without an adapter; yields when a block has seen all rows.

    Args:
        chain: in float32.
        rows: their tokens; they are padded on the right.
        watch: is given f32 [tokens, in], what the layers of these names see, without padding; layers that
            see the same share a call. It must not keep them.

    Raises:
        BundleError: the files lack a weight, or it isn't finite.
    """
    batches = [_padded(batch) for batch in _batches(rows)]
    states = [tokens for tokens, _ in batches]
    adapted = [number for number, block in enumerate(chain.blocks) if block.adapter]
    for number in range(adapted[-1] + 1):
        block = _Block(chain, number, watch)
        for place, (_, mask) in enumerate(batches):
            states[place] = block.answer(states[place], mask)
        yield


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Rows of about one length together, of no more than `_TOKENS` tokens."""
    batch: list[Sequence[int]] = []
    for row in sorted(rows, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > _TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens i64 and mask bool, [rows, longest]."""
    longest = max(map(len, rows))
    mask = torch.tensor([[place < len(row) for place in range(longest)] for row in rows])
    # Any token does as padding: no other one sees it.
    return torch.tensor([[*row, *[row[0]] * (longest - len(row))] for row in rows]), mask


class _Block(Interpreter):
    """A block of a chain with its weights; its graph's marked sizes are those of the call."""

    def __init__(
        self, chain: Chain, number: int, watch: Callable[[Sequence[str], torch.Tensor], None]
    ) -> None:
        self._chain, self._number, self._watch = chain, number, watch
        kind = chain.kind_of[number]
        super().__init__(chain.kinds[kind].graph_module)
        self._tensors = chain.tensors(number)
        self._watched = _watched(
            chain.kinds[kind].graph_module,
            dict(zip(chain.blocks[kind].weights, chain.blocks[number].weights, strict=True)),
        )
        self._outputs = {module.name: module.out_features for module in chain.modules}
        self._sizes: Mapping[int, int] = {}
        self._mask = torch.zeros(0)

    def answer(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The state f32 [rows, tokens, width] after the block, of one or of tokens before it."""
        rows, length = mask.shape
        self._sizes, self._mask = {COPIES: 1, BATCH: rows, TOKENS: length}, mask
        block = self._chain.blocks[self._number]
        inputs = []
        for node in block.graph_module.graph.find_nodes(op="placeholder"):
            name = str(node.target)
            if name.startswith(TABLE_PREFIX):
                table = self._chain.tables.all[block.tables[int(name.removeprefix(TABLE_PREFIX))]]
                inputs.append(table.of(length))
            elif name in self._chain.adapter:
                inputs.append(torch.zeros(1, 1, self._outputs[self._chain.adapter[name]]))
            else:
                inputs.append(padding_mask(mask.float()) if name == "beside" else state)
        with torch.no_grad():
            (answer,) = self.run(*inputs)
        return answer.reshape(rows, length, -1)

    def run_node(self, n: Node) -> Any:
        """Also let a layer's input be watched."""
        value = super().run_node(n)
        if n in self._watched:
            self._watch(self._watched[n], value.reshape(*self._mask.shape, -1)[self._mask])
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A tensor of this block, or one that all of its kind have."""
        tensor = self._tensors.get(str(target))
        return attribute(self.module, str(target)) if tensor is None else tensor

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        """The arguments of a node, with the call's sizes for the markers."""
        return map_aggregate(super().fetch_args_kwargs_from_env(n), self._sized)

    def _sized(self, value: Any) -> Any:
        for marker, size in self._sizes.items():
            value = resized(value, marker, size)
        return value


def _watched(graph_module: GraphModule, own: Mapping[str, str]) -> dict[Node, list[str]]:
    """The nodes that adapted layers read, with the layers' names; `own` are a block's names of weights."""
    found: dict[Node, list[str]] = {}
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.linear.default):
        source, weight = node.args[:2]
        name = own.get(str(weight.target), "")
        if name.endswith(f".{ADAPTER_WEIGHT}"):
            found.setdefault(source, []).append(layer_of(name))
    return found
