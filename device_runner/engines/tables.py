"""The tables that a chain's blocks are given: masks, rotations and positions for the length of a call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from prge.engine import Array
from prge.errors import BundleError
from prge.files.bundle import TABLES, Bundle
from prge.files.chain import MASKED, STORED_TABLES, Chain
from prge.files.relations import RELATIONS, relation, relation_shape
from prge.files.signatures import PREFILL

# Tables of one length, of which masks of long rows take megabytes.
_KEPT = 8
# Of numbers by distance.
_DTYPES = {"F32": "float32", "I64": "int64"}
_REMEDY = "export the bundle again"


class Tables:
    """Tables of an opened bundle's chain, by their number.

    Raises:
        BundleError: the tables file lacks rows that the chain needs.
    """

    def __init__(self, bundle: Bundle, chain: Chain) -> None:
        self._tables = chain.tables
        self._stored: dict[int, Any] = {}
        path = bundle.file(TABLES)
        listed = [number for number, table in enumerate(chain.tables) if table.kind in STORED_TABLES]
        writes = PREFILL in chain.roles
        longest = max(chain.bounds.tokens, chain.bounds.context if writes else 0)
        try:
            # Rows are read when they are asked for: a model's longest text has many.
            stored: Any = safe_open(path, "numpy") if listed else None
            names = stored.keys() if listed else []
            for number in listed:
                values = stored.get_slice(str(number)) if str(number) in names else None
                is_relative = chain.tables[number].kind == "relative"
                dtypes, dimensions = (_DTYPES, 1) if is_relative else (("F32",), 2)
                if (
                    values is None
                    or values.get_dtype() not in dtypes
                    or len(values.get_shape()) != dimensions
                    or (is_relative and values.get_shape()[0] % 2 == 0)
                ):
                    raise BundleError(f"{path} has no table {number}", remedy=_REMEDY, code="table-missing")
                rows = values.get_shape()[0]
                rows = (rows + 1) // 2 if is_relative else rows
                if rows < longest:
                    raise BundleError(
                        f"{path}: table {number} is for {rows} tokens, the manifest says {longest}",
                        remedy=_REMEDY,
                        code="table-of-other-length",
                    )
                self._stored[number] = values
        except (OSError, ValueError, SafetensorError) as error:
            raise BundleError(
                f"{path} can't be read: {error}", remedy=_REMEDY, code="file-unreadable"
            ) from None
        self.of = lru_cache(maxsize=_KEPT)(self._of)

    def tensor(self, number: int, length: int) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of the table of that number, which isn't made for that."""
        table = self._tables[number]
        if table.kind == "rotary":
            return "float32", (1, length, self._stored[number].get_shape()[1])
        if table.kind == "relative":
            dtype = _DTYPES[self._stored[number].get_dtype()]
            return dtype, (table.members, length, length)
        if table.kind == "causal":
            return "float32", (table.members, length, length)
        if table.kind in RELATIONS:
            return "float32", relation_shape(table.kind, length, table.window)
        return "int64", (1, length)

    def _of(self, number: int, length: int, start: int = 0) -> Array:
        """The table of that number for rows of `length` tokens, of which `start` others come before."""
        table = self._tables[number]
        if table.kind == "rotary":
            return np.ascontiguousarray(self._stored[number][start : start + length])[None]
        if table.kind == "relative":
            values, place = np.asarray(self._stored[number][:]), np.arange(length)
            return np.repeat(values[place[:, None] - place + len(values) // 2][None], table.members, 0)
        if table.kind == "positions":
            first = table.first + start
            return np.arange(first, first + length).reshape(1, length)
        if table.kind == "zeros":
            return np.zeros((1, length), np.int64)
        if table.kind in RELATIONS:
            # What a piece's tokens are to each other is the same wherever it begins.
            return relation(table.kind, length, table.first, table.window)
        mask = np.triu(np.full((length, length), MASKED, np.float32), 1)
        if table.window is not None and table.window < length:
            mask += np.tril(np.full((length, length), MASKED, np.float32), -table.window)
        return np.repeat(mask[None], table.members, 0)
