"""The tables that blocks take as inputs: masks, rotations and positions for the length of a call."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from device_runner.engines.planning import Layout
from prge.engine import Array
from prge.errors import BundleError
from prge.formats.bundle import TABLES, Bundle
from prge.formats.chain import MASKED, STORED_TABLES, Chain
from prge.formats.relations import RELATIONS, relation, relation_shape
from prge.formats.signatures import PREFILL

# The newest tables are cached, and older ones within a bound: masks of long rows take megabytes.
_KEPT, _MAX_CACHED_BYTES = 8, 1 << 22
# dtypes of tables of values by distance.
_DTYPES = {"F32": "float32", "I64": "int64"}
_REMEDY = "Export the bundle again."


class Tables:
    """Tables of an opened bundle's chain, by number.

    Raises:
        BundleError: the tables file lacks rows that the chain needs.
    """

    def __init__(self, bundle: Bundle, chain: Chain) -> None:
        self._tables = chain.tables
        self._stored: dict[int, Any] = {}
        path = bundle.file(TABLES)
        listed = [number for number, table in enumerate(chain.tables) if table.type in STORED_TABLES]
        can_generate = PREFILL in chain.roles
        longest = max(chain.bounds.tokens, chain.bounds.context if can_generate else 0)
        try:
            # Rows are read on demand: a model's longest sequence has many.
            stored: Any = safe_open(path, "numpy") if listed else None
            names = stored.keys() if listed else []
            for number in listed:
                values = stored.get_slice(str(number)) if str(number) in names else None
                is_relative = chain.tables[number].type == "relative"
                dtypes, dimensions = (_DTYPES, 1) if is_relative else (("F32",), 2)
                if (
                    values is None
                    or values.get_dtype() not in dtypes
                    or len(values.get_shape()) != dimensions
                    or (is_relative and values.get_shape()[0] % 2 == 0)
                ):
                    raise BundleError(f"{path} has no table {number}.", remedy=_REMEDY, code="table-missing")
                rows = values.get_shape()[0]
                rows = (rows + 1) // 2 if is_relative else rows
                if rows < longest:
                    raise BundleError(
                        f"{path}: table {number} is for {rows} tokens, the manifest says {longest}.",
                        remedy=_REMEDY,
                        code="table-of-other-length",
                    )
                self._stored[number] = values
        except (OSError, ValueError, SafetensorError) as error:
            raise BundleError(
                f"{path} can't be read: {error}", remedy=_REMEDY, code="file-unreadable"
            ) from None
        self._cached: OrderedDict[tuple[int, int, int, tuple[int, ...]], Array] = OrderedDict()
        self._cached_bytes = 0

    def tensor(self, number: int, length: int) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of a table without computing it."""
        table = self._tables[number]
        if table.type == "rotary":
            return "float32", (1, length, self._stored[number].get_shape()[1])
        if table.type == "relative":
            dtype = _DTYPES[self._stored[number].get_dtype()]
            return dtype, (table.members, length, length)
        if table.type == "causal":
            return "float32", (table.members, length, length)
        if table.type in RELATIONS:
            return "float32", relation_shape(table.type, length, table.window)
        return "int64", (1, length)

    def of(self, number: int, length: int, start: int = 0, branches: tuple[int, ...] = ()) -> Array:
        """Return a table for `length` tokens of a row, the first of which is at position `start`.

        Args:
            number: number of the table.
            length: tokens of a row.
            start: position of the first token.
            branches: where the branches of the rows start, for rows without tokens before them.
        """
        key = (number, length, start, branches)
        if key in self._cached:
            self._cached.move_to_end(key)
            return self._cached[key]
        table = self._cached[key] = self._computed(number, Layout(length, branches), start)
        self._cached_bytes += table.nbytes
        while len(self._cached) > _KEPT and self._cached_bytes > _MAX_CACHED_BYTES:
            _, oldest = self._cached.popitem(last=False)
            self._cached_bytes -= oldest.nbytes
        return table

    def _computed(self, number: int, layout: Layout, start: int) -> Array:
        table, length, positions = self._tables[number], layout.length, layout.positions
        if table.type == "rotary":
            rows = self._stored[number][start : start + int(positions.max(initial=0)) + 1]
            return np.ascontiguousarray(rows[positions])[None]
        if table.type == "relative":
            values = np.asarray(self._stored[number][:])
            return np.repeat(
                values[positions[:, None] - positions + len(values) // 2][None], table.members, 0
            )
        if table.type == "positions":
            return (table.first + start + positions)[None]
        if table.type == "zeros":
            return np.zeros((1, length), np.int64)
        if table.type in RELATIONS:
            # The relation between tokens of one chunk is the same wherever the chunk starts.
            return relation(table.type, length, table.first, table.window)
        mask = np.where(layout.hides(table.window), np.float32(MASKED), np.float32(0))
        return np.repeat(mask[None], table.members, 0)
