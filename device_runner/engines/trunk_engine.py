"""A program that was cut, as the one that it was cut from, with a cache between its parts.

tokens -> trunk, once for a row -> cache -> step, with adapters, every time

With methods of several lengths the step takes the shortest that holds all rows of a call, and the trunk the
shortest that holds a row, whatever else is in the call: so what is kept of a row follows from the row alone.
States are lengthened with zeros, which nothing that counts looks at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from device_runner.engines.length_engine import row_lengths, shortened, shortest
from device_runner.engines.trunk_cache import TrunkCache
from prge.contract import Contract
from prge.engine import Array, Engine, FloatArray

Values = list[FloatArray]


class TrunkEngine:
    """Implements prge.engine.Engine by trunks and steps; `computed` and `reused` count rows.

    Args:
        trunks: engines of the trunk program, by length, shortest first.
        steps: engines of the program above it, of the same lengths.
        program: hash of the program file, by which a row's values are known.
        cache: where they are kept; without one, the trunk runs every time.
    """

    def __init__(
        self,
        trunks: Sequence[Engine],
        steps: Sequence[Engine],
        program: str,
        cache: TrunkCache | None = None,
    ) -> None:
        self._trunks = trunks
        self._steps = steps
        self._program = program
        self._cache = cache
        self._contract = steps[-1].contract.whole
        self.computed = 0
        self.reused = 0

    @property
    def contract(self) -> Contract:
        """Of the program before it was cut."""
        return self._contract

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine.forward."""
        contract = self._trunks[-1].contract
        below = {spec.name: inputs[spec.name] for spec in contract.inputs if spec.name in inputs}
        if len(below) != len(contract.inputs):
            # The engine says which one is missing.
            self._trunks[-1].forward(below)
        lengths = row_lengths(inputs, self._contract)
        rows = self._rows(below, [shortest(self._trunks, length) for length in lengths.tolist()])
        step = shortest(self._steps, int(lengths.max()))
        crossing = {
            spec.name: _stacked([row[index] for row in rows], spec.shape)
            for index, spec in enumerate(step.contract.cut)
        }
        above = {name: value for name, value in inputs.items() if name != "tokens"}
        return step.forward({**crossing, **shortened(above, step.contract, self._contract)})

    def _rows(self, inputs: Mapping[str, Array], trunks: Sequence[Engine]) -> list[Values]:
        """What its trunk makes of every row."""
        if self._cache is None:
            return self._computed(inputs, trunks, list(range(len(trunks))))
        keys = [
            self._cache.key(
                self._program,
                [array[row] for array in shortened(inputs, trunk.contract, self._contract).values()],
            )
            for row, trunk in enumerate(trunks)
        ]
        known = {
            key: self._cache.get(key, trunk.contract.cut) for key, trunk in zip(keys, trunks, strict=True)
        }
        missing = [row for row, key in enumerate(keys) if known[key] is None and keys.index(key) == row]
        if missing:
            for row, values in zip(missing, self._computed(inputs, trunks, missing), strict=True):
                known[keys[row]] = self._cache.rounded(values)
                self._cache.put(keys[row], values)
        self.reused += len(keys) - len(missing)
        return [values for key in keys for values in [known[key]] if values is not None]

    def _computed(
        self, inputs: Mapping[str, Array], trunks: Sequence[Engine], rows: Sequence[int]
    ) -> list[Values]:
        """What their trunks make of some rows: a call for each trunk."""
        found: dict[int, Values] = {}
        for trunk in self._trunks:
            mine = [row for row in rows if trunks[row] is trunk]
            if mine:
                found.update(zip(mine, self._called(trunk, inputs, mine), strict=True))
        return [found[row] for row in rows]

    def _called(self, trunk: Engine, inputs: Mapping[str, Array], rows: list[int]) -> list[Values]:
        """What a trunk makes of some rows; the other slots of its call repeat the first of them."""
        contract = trunk.contract
        chosen = np.array(rows + rows[:1] * (contract.rows - len(rows)))
        shorter = shortened(inputs, contract, self._contract)
        outputs = trunk.forward({name: array[chosen] for name, array in shorter.items()})
        self.computed += len(rows)
        return [[outputs[spec.name][slot] for spec in contract.cut] for slot in range(len(rows))]


def _stacked(rows: Sequence[FloatArray], shape: Sequence[int]) -> FloatArray:
    """Rows as one array of a shape, each with zeros behind it where it is shorter."""
    if all(row.shape == tuple(shape[1:]) for row in rows):
        return np.stack(rows)
    stacked = np.zeros(shape, np.float32)
    for place, row in zip(stacked, rows, strict=True):
        place[tuple(map(slice, row.shape))] = row
    return stacked
