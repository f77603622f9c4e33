"""Tables: inputs of a chain's blocks that all blocks share and no weight is in, such as masks and rotations.

A model asks for them while it is traced: they are operators of its graph, of any length, until the graph is
cut into blocks, whose inputs they become. A device makes them for the length of a call.
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

from prge.files.chain import MASKED, RECURRENT_PIECE
from prge.files.relations import RELATIONS, relation, relation_shape
from server_export.adapter.layers import replace_module
from server_export.trace.attention import causal_mask


@torch.library.custom_op("prge::table", mutates_args=())
def table(number: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The table of that number; traced, never run."""
    raise NotImplementedError("a table is traced and becomes an input, it is never run")


@table.register_fake
def _(number: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


TABLE = torch.ops.prge.table.default


@dataclass(frozen=True)
class ModelTable:
    """What a table holds for sequences of some length.

    `kind` is `causal`, a mask f32 [members, length, length] that lets a token see itself and `window` - 1
    tokens before; `rotary`, the first rows of `values` f32 [longest, width] as [1, length, width];
    `positions`, i64 [1, length] counted from `first`; `zeros`, i64 [1, length]; `relative`, [members, length,
    length] of `values` [2 longest - 1], one for each distance of a token from another; or one of
    prge.files.relations.
    """

    kind: str
    window: int | None = None
    first: int = 0
    members: int = 1
    values: torch.Tensor | NDArray[Any] | None = None

    def of(self, length: int) -> torch.Tensor:
        """The table for sequences of `length` tokens."""
        if self.kind == "causal":
            return causal_mask(length, self.window, torch.float32).repeat(self.members, 1, 1)
        if self.kind == "positions":
            return torch.arange(self.first, self.first + length).reshape(1, length)
        if self.kind == "zeros":
            return torch.zeros(1, length, dtype=torch.long)
        if self.kind in RELATIONS:
            return torch.from_numpy(relation(self.kind, length, self.first, self.window))
        assert self.values is not None
        values = torch.as_tensor(self.values)
        if self.kind == "relative":
            place = torch.arange(length)
            distance = place[:, None] - place + len(values) // 2
            return values[distance].repeat(self.members, 1, 1)
        return values[:length].unsqueeze(0)


class ModelTables:
    """The tables that a model asks for; its blocks know them by their place in `all`.

    Args:
        longest: tokens of the longest sequence.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.piece = min(longest, RECURRENT_PIECE)
        self.all: list[ModelTable] = []
        self._numbers: dict[Hashable, int] = {}

    def causal(self, length: int, window: int | None, members: int) -> torch.Tensor:
        """A causal mask f32 [members, length, length], for the queries of a group of heads."""
        window = None if window is None or window >= self.longest else window
        return self.ask(
            ("causal", window, members),
            lambda: ModelTable("causal", window, members=members),
            (members, length, length),
            torch.float32,
        )

    def window(self, length: int, window: int, members: int) -> torch.Tensor:
        """A mask f32 [members, length, length] that lets a token see `window` - 1 others on each side."""
        # In numpy: while a model is traced, tensors have no numbers.
        distance = np.abs(np.arange(1 - self.longest, self.longest))
        values = np.where(distance < window, np.float32(0), np.float32(MASKED))
        return self.ask(
            ("window", window, members),
            lambda: ModelTable("relative", members=members, values=values),
            (members, length, length),
            torch.float32,
        )

    def positions(self, length: int, first: int) -> torch.Tensor:
        """Numbers of positions i64 [1, length]."""
        return self.ask("positions", lambda: ModelTable("positions", first=first), (1, length), torch.long)

    def zeros(self, length: int) -> torch.Tensor:
        """Types of tokens i64 [1, length]: all are of the first."""
        return self.ask("zeros", lambda: ModelTable("zeros"), (1, length), torch.long)

    def relation(self, kind: str, length: int, first: int = 0, window: int | None = None) -> torch.Tensor:
        """A table f32 of which token stands where to which other."""
        return self.ask(
            (kind, first, window),
            lambda: ModelTable(kind, window, first),
            relation_shape(kind, length, window),
            torch.float32,
        )

    @property
    def recurs(self) -> bool:
        """Whether a model has asked for those of a recurrence."""
        # A convolution asks for the one before alone.
        return any(table.kind == "behind" and (table.window is None or table.first > 1) for table in self.all)

    def ask(
        self, key: Hashable, make: Callable[[], ModelTable], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A table in the graph that is traced; the same key gives the same one."""
        number = self.number(key, make)
        result: torch.Tensor = TABLE(number, list(shape), dtype, torch.get_default_device())
        return result

    def number(self, key: Hashable, make: Callable[[], ModelTable]) -> int:
        """The place of a table in `all`; the same key gives the same one."""
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(make())
        return self._numbers[key]


def asked(
    before: Node, tables: ModelTables, key: Any, table: ModelTable, shape: list[int], dtype: Any
) -> Node:
    """A table in a graph that was traced, in front of a node; the same key gives the same one."""
    number = tables.number(key, lambda: table)
    with before.graph.inserting_before(before):
        node = before.graph.call_function(TABLE, (number, shape, dtype, torch.device("meta")))
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return node


class TableRotary(nn.Module):
    """A rotary embedding whose cosines and sines are tables.

    Args:
        tables: where they are asked for.
        values: cosines and sines f32 [longest, width] by type of layer.
        config: of the embedding whose place it takes; some models read it there.
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
        # By the name that transformers has for them: some models ask for each.
        self.layer_types = [kind for kind in values if kind is not None]

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Cosines and sines f32 [1, length, width]."""
        length = position_ids.shape[-1]
        return tuple(
            self.tables.ask(
                (id(self), layer_type, part),
                lambda part=part: ModelTable("rotary", values=self.values[layer_type][part]),  # type: ignore[misc]
                (1, length, self.values[layer_type][part].shape[-1]),
                torch.float32,
            )
            for part in range(len(self.values[layer_type]))
        )


def rotary_names(model: nn.Module) -> list[str]:
    """Paths of a model's rotary embeddings."""
    return [
        name
        for name, module in model.named_modules()
        if hasattr(module, "rope_type") and "position_ids" in inspect.signature(module.forward).parameters
    ]


def make_rotary_tables(model: nn.Module, tables: ModelTables) -> int:
    """Make tables of the rotary embeddings of a model that answer cosines and sines; returns how many.

    Args:
        model: which may lack its weights.
        tables: of the model.
    """
    count = 0
    for name in rotary_names(model):
        values = rotary_values(model, name, tables.longest)
        if all(isinstance(parts, tuple) for parts in values.values()):
            config = getattr(model.get_submodule(name), "config", None)
            by_type = {
                kind: tuple(part.reshape(part.shape[-2:]) for part in parts) for kind, parts in values.items()
            }
            replace_module(model, name, TableRotary(tables, by_type, config))
            count += 1
    return count


def rotary_values(model: nn.Module, name: str, longest: int) -> dict[str | None, Any]:
    """What a rotary embedding of a model answers of so many positions, by type of layer."""
    old: Any = model.get_submodule(name)
    config = getattr(old, "config", model.config)
    # Made anew: that of a model without weights has no frequencies either.
    rotary: Any = type(old)(config=config)
    parameters = inspect.signature(rotary.forward).parameters
    named = getattr(config, "layer_types", None) if "layer_type" in parameters else None
    given = getattr(config, "rope_parameters", None) or {}
    by_type = {kind: given[kind] for kind in named or () if kind in given}
    # Layers of a type without rotation have no entry, or an empty one.
    types = sorted({kind for kind in named if by_type.get(kind, not by_type)}) if named else [None]
    positions, marker = torch.arange(longest).reshape(1, longest), torch.zeros(1)
    with torch.no_grad():
        return {kind: rotary(marker, positions, *([] if kind is None else [kind])) for kind in types}
