"""The tables that a chain's blocks are given: masks, rotations and positions for the length of a call."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from prge.bundle import TABLES, Bundle
from prge.chain import MASKED, Chain
from prge.engine import Array, FloatArray
from prge.errors import BundleError

# Tables of one length, of which masks of long rows take megabytes.
_KEPT = 8
_REMEDY = "export the bundle again"


class Tables:
    """Tables of an opened bundle's chain, by their number.

    Raises:
        BundleError: the tables file lacks rows that the chain needs.
    """

    def __init__(self, bundle: Bundle, chain: Chain) -> None:
        self._tables = chain.tables
        self._values: dict[str, FloatArray] = {}
        rotary = [str(number) for number, table in enumerate(chain.tables) if table.kind == "rotary"]
        if rotary:
            try:
                self._values = load_file(bundle.file(TABLES))
            except (OSError, ValueError, SafetensorError) as error:
                raise BundleError(f"{bundle.file(TABLES)} can't be read: {error}", remedy=_REMEDY) from None
        for name in rotary:
            values = self._values.get(name)
            if values is None or values.dtype != np.float32 or values.ndim != 2:
                raise BundleError(f"{bundle.file(TABLES)} has no table {name}", remedy=_REMEDY)
            if len(values) < chain.bounds.tokens:
                raise BundleError(
                    f"{bundle.file(TABLES)}: table {name} is for {len(values)} tokens, rows may have "
                    f"{chain.bounds.tokens}",
                    remedy=_REMEDY,
                )
        self.of = lru_cache(maxsize=_KEPT)(self._of)

    def tensor(self, number: int, length: int) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of the table of that number, which isn't made for that."""
        table = self._tables[number]
        if table.kind == "rotary":
            return "float32", (1, length, self._values[str(number)].shape[1])
        if table.kind == "causal":
            return "float32", (table.members, length, length)
        return "int64", (1, length)

    def _of(self, number: int, length: int) -> Array:
        """The table of that number for rows of `length` tokens."""
        table = self._tables[number]
        if table.kind == "rotary":
            return self._values[str(number)][None, :length]
        if table.kind == "positions":
            return np.arange(table.first, table.first + length).reshape(1, length)
        if table.kind == "zeros":
            return np.zeros((1, length), np.int64)
        mask = np.triu(np.full((length, length), MASKED, np.float32), 1)
        if table.window is not None and table.window < length:
            mask += np.tril(np.full((length, length), MASKED, np.float32), -table.window)
        return np.repeat(mask[None], table.members, 0)
