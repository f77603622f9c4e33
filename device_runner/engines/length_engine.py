"""Rows as short as they are: of several methods that differ in their length only, the shortest that fits.

    tokens, positions -> how many tokens the answers depend on -> a method -> the answers, as of the longest

What lies behind the last token that counts changes no answer, so that it may be cut off: a decoder's position
sees no later ones, and an encoder's padding is masked. Which method runs follows from the rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prge.contract import Contract
from prge.engine import Array, Engine, IntArray

# Their second dimension is the row's length.
_BY_TOKEN = ("tokens", "attention_mask")


class LengthEngine:
    """Implements prge.engine.Engine by the engines of some methods, shortest first."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    @property
    def contract(self) -> Contract:
        """Of the longest method."""
        return self._engines[-1].contract

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine.forward."""
        engine = shortest(self._engines, int(row_lengths(inputs, self.contract).max()))
        return engine.forward(shortened(inputs, engine.contract, self.contract))


def row_lengths(inputs: Mapping[str, Array], contract: Contract) -> IntArray:
    """How many tokens of each row its answers depend on, i64 [rows]; all where the inputs aren't right."""
    rows, length = contract.given_rows, contract.sequence_length
    wanted = {"tokens": length}
    wanted |= {"attention_mask": length} if contract.is_encoder else {"positions": contract.positions}
    if any(name not in inputs or inputs[name].shape != (rows, width) for name, width in wanted.items()):
        return np.full(rows, length)
    if contract.is_encoder:
        # From the last one on; a row without any token counts whole.
        return length - (inputs["attention_mask"][:, ::-1] != 0).argmax(1)
    return np.asarray(inputs["positions"].max(1) + 1, np.int64)


def shortest(engines: Sequence[Engine], tokens: int) -> Engine:
    """The first engine, of shortest first, that holds rows of so many tokens; else the last one."""
    return next((engine for engine in engines if engine.contract.sequence_length >= tokens), engines[-1])


def shortened(inputs: Mapping[str, Array], contract: Contract, longest: Contract) -> dict[str, Array]:
    """Inputs of the longest method as those of one for shorter rows; its own are left to it as they are."""
    length = contract.sequence_length
    if length == longest.sequence_length:
        return dict(inputs)
    return {name: array[:, :length] if name in _BY_TOKEN else array for name, array in inputs.items()}
