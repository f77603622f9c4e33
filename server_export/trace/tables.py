"""Tables: inputs without weights that the blocks of a chain share, such as masks and rotary tables.

A model requests tables while it is traced. They are operators of its graph, of any length, until the graph is
cut into blocks, whose inputs they become. The device computes them for the length of a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.fx import Node

from prge.formats.chain import MASKED, RECURRENT_CHUNK
from prge.formats.relations import RELATIONS, relation, relation_shape
from server_export.adapter.layers import replace_module
from server_export.trace.attention import causal_mask


@torch.library.custom_op("prge::table", mutates_args=())
def table(number: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the table with this number; the operator is traced and never run."""
    raise NotImplementedError("A table is traced and becomes an input; the operator is never run.")


@table.register_fake
def _(number: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


TABLE = torch.ops.prge.table.default


@dataclass(frozen=True)
class ModelTable:
    """The contents of a table for sequences of any length.

    Types of tables; see also prge.formats.chain.TableSpec:

    - `causal`: a mask f32 [members, length, length]; a token sees itself and `window` - 1 tokens before it.
    - `rotary`: the first rows of `values` f32 [longest, width], as [1, length, width].
    - `positions`: i64 [1, length], counted from `first`.
    - `zeros`: i64 [1, length].
    - `relative`: [members, length, length] of `values` [2 longest - 1], one per distance of tokens.
    - a type of prge.formats.relations.
    """

    type: str
    window: int | None = None
    first: int = 0
    members: int = 1
    values: torch.Tensor | NDArray[Any] | None = None

    def of(self, length: int) -> torch.Tensor:
        """Return the table for sequences of `length` tokens."""
        if self.type == "causal":
            return causal_mask(length, self.window, torch.float32).repeat(self.members, 1, 1)
        if self.type == "positions":
            return torch.arange(self.first, self.first + length).reshape(1, length)
        if self.type == "zeros":
            return torch.zeros(1, length, dtype=torch.long)
        if self.type in RELATIONS:
            return torch.from_numpy(relation(self.type, length, self.first, self.window))
        assert self.values is not None
        values = torch.as_tensor(self.values)
        if self.type == "relative":
            positions = torch.arange(length)
            distance = positions[:, None] - positions + len(values) // 2
            return values[distance].repeat(self.members, 1, 1)
        return values[:length].unsqueeze(0)


class ModelTables:
    """The tables that a model requests; its blocks refer to them by their index in `all`.

    Args:
        longest: the number of tokens of the longest sequence.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.chunk = min(longest, RECURRENT_CHUNK)
        self.all: list[ModelTable] = []
        self._numbers: dict[Hashable, int] = {}

    def causal(self, length: int, window: int | None, members: int) -> torch.Tensor:
        """Return a causal mask f32 [members, length, length] for the queries of a group of heads."""
        window = None if window is None or window >= self.longest else window
        return self.request(
            ("causal", window, members),
            lambda: ModelTable("causal", window, members=members),
            (members, length, length),
            torch.float32,
        )

    def window(self, length: int, window: int, members: int) -> torch.Tensor:
        """Return a mask f32 [members, length, length]: a token sees `window` - 1 tokens on each side."""
        # numpy, because tensors have no values while a model is traced.
        distance = np.abs(np.arange(1 - self.longest, self.longest))
        values = np.where(distance < window, np.float32(0), np.float32(MASKED))
        return self.request(
            ("window", window, members),
            lambda: ModelTable("relative", members=members, values=values),
            (members, length, length),
            torch.float32,
        )

    def positions(self, length: int, first: int) -> torch.Tensor:
        """Return position ids i64 [1, length]."""
        return self.request(
            "positions", lambda: ModelTable("positions", first=first), (1, length), torch.long
        )

    def zeros(self, length: int) -> torch.Tensor:
        """Return token types i64 [1, length] that are all 0."""
        return self.request("zeros", lambda: ModelTable("zeros"), (1, length), torch.long)

    def relation(
        self, table_type: str, length: int, first: int = 0, window: int | None = None
    ) -> torch.Tensor:
        """Return a table f32 that relates the positions of tokens; see prge.formats.relations."""
        return self.request(
            (table_type, first, window),
            lambda: ModelTable(table_type, window, first),
            relation_shape(table_type, length, window),
            torch.float32,
        )

    @property
    def has_recurrence(self) -> bool:
        """Whether the model has requested tables of a recurrence."""
        # A convolution only requests the table of the previous token.
        return any(table.type == "behind" and (table.window is None or table.first > 1) for table in self.all)

    def request(
        self, key: Hashable, make: Callable[[], ModelTable], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Write a table into the graph that is being traced; equal keys give the same table."""
        number = self.number(key, make)
        result: torch.Tensor = TABLE(number, list(shape), dtype, torch.get_default_device())
        return result

    def number(self, key: Hashable, make: Callable[[], ModelTable]) -> int:
        """Return the index of a table in `all`; equal keys give the same table."""
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(make())
        return self._numbers[key]


def insert_table(
    before: Node, tables: ModelTables, key: Any, table: ModelTable, shape: list[int], dtype: Any
) -> Node:
    """Insert a table before a node of a traced graph; equal keys give the same table."""
    number = tables.number(key, lambda: table)
    with before.graph.inserting_before(before):
        node = before.graph.call_function(TABLE, (number, shape, dtype, torch.device("meta")))
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return node


class TableRotary(nn.Module):
    """A rotary embedding whose cosines and sines are tables.

    Args:
        tables: the tables of the model.
        values: cosines and sines f32 [longest, width] by layer type.
        config: the configuration of the replaced embedding, which some models read.
    """

    def __init__(
        self,
        tables: ModelTables,
        values: dict[str | None, tuple[torch.Tensor, ...]],
        config: Any = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.tables = tables
        self.values = values
        # Some models of transformers read this attribute.
        self.layer_types = [layer_type for layer_type in values if layer_type is not None]

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return cosines and sines f32 [1, length, width]."""
        length = position_ids.shape[-1]
        return tuple(
            self.tables.request(
                (id(self), layer_type, part),
                lambda part=part: ModelTable("rotary", values=self.values[layer_type][part]),  # type: ignore[misc]
                (1, length, self.values[layer_type][part].shape[-1]),
                torch.float32,
            )
            for part in range(len(self.values[layer_type]))
        )


def rotary_names(model: nn.Module) -> list[str]:
    """Return the paths of a model's rotary embeddings."""
    return [
        name
        for name, module in model.named_modules()
        if hasattr(module, "rope_type") and "position_ids" in inspect.signature(module.forward).parameters
    ]


def make_rotary_tables(model: nn.Module, tables: ModelTables) -> int:
    """Replace rotary embeddings that return cosines and sines by tables; return how many were replaced.

    Args:
        model: may lack its weights.
        tables: the tables of the model.
    """
    count = 0
    for name in rotary_names(model):
        values = rotary_values(model, name, tables.longest)
        if all(isinstance(parts, tuple) for parts in values.values()):
            config = getattr(model.get_submodule(name), "config", None)
            by_type = {
                layer_type: tuple(part.reshape(part.shape[-2:]) for part in parts)
                for layer_type, parts in values.items()
            }
            replace_module(model, name, TableRotary(tables, by_type, config))
            count += 1
    return count


def rotary_values(model: nn.Module, name: str, longest: int) -> dict[str | None, Any]:
    """Return the outputs of a model's rotary embedding for `longest` positions, by layer type."""
    embedding: Any = model.get_submodule(name)
    config = getattr(embedding, "config", model.config)
    # A new instance, because the one of a model without weights has no frequencies.
    rotary: Any = type(embedding)(config=config)
    parameters = inspect.signature(rotary.forward).parameters
    layer_types = getattr(config, "layer_types", None) if "layer_type" in parameters else None
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    by_type = {
        layer_type: rope_parameters[layer_type]
        for layer_type in layer_types or ()
        if layer_type in rope_parameters
    }
    # Layer types without rotation have no entry, or an empty one.
    types = (
        sorted({layer_type for layer_type in layer_types if by_type.get(layer_type, not by_type)})
        if layer_types
        else [None]
    )
    positions, marker = torch.arange(longest).reshape(1, longest), torch.zeros(1)
    with torch.no_grad():
        return {
            layer_type: rotary(marker, positions, *([] if layer_type is None else [layer_type]))
            for layer_type in types
        }
