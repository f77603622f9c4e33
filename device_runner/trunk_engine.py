"""A program that was cut, as the one that it was cut from, with a cache between its parts.

tokens -> trunk, once for a row -> cache -> step, with adapters, every time
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from device_runner.trunk_cache import TrunkCache
from prge.contract import Contract
from prge.engine import Array, Engine, FloatArray

Values = list[FloatArray]


class TrunkEngine:
    """Implements prge.engine.Engine by a trunk and a step; `computed` and `reused` count rows.

    Args:
        trunk: engine of the trunk program.
        step: engine of the program above it.
        program: hash of the program file, by which a row's values are known.
        cache: where they are kept; without one, the trunk runs every time.
    """

    def __init__(self, trunk: Engine, step: Engine, program: str, cache: TrunkCache | None = None) -> None:
        self._trunk = trunk
        self._step = step
        self._program = program
        self._cache = cache
        self._contract = step.contract.whole
        self.computed = 0
        self.reused = 0

    @property
    def contract(self) -> Contract:
        """Of the program before it was cut."""
        return self._contract

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine.forward."""
        contract = self._trunk.contract
        below = {spec.name: inputs[spec.name] for spec in contract.inputs if spec.name in inputs}
        if len(below) != len(contract.inputs):
            # The engine says which one is missing.
            self._trunk.forward(below)
        rows = self._rows(below)
        crossing = {
            spec.name: np.stack([row[index] for row in rows]) for index, spec in enumerate(contract.cut)
        }
        above = {name: value for name, value in inputs.items() if name != "tokens"}
        return self._step.forward({**crossing, **above})

    def _rows(self, inputs: Mapping[str, Array]) -> list[Values]:
        """What the trunk makes of every row."""
        contract = self._trunk.contract
        if self._cache is None:
            return self._computed(inputs, list(range(contract.rows)))
        parts = [[array[row] for array in inputs.values()] for row in range(contract.rows)]
        keys = [self._cache.key(self._program, part) for part in parts]
        known = {key: self._cache.get(key, contract.cut) for key in keys}
        missing = [row for row, key in enumerate(keys) if known[key] is None and keys.index(key) == row]
        if missing:
            for row, values in zip(missing, self._computed(inputs, missing), strict=True):
                known[keys[row]] = self._cache.rounded(values)
                self._cache.put(keys[row], values)
        self.reused += len(keys) - len(missing)
        return [values for key in keys for values in [known[key]] if values is not None]

    def _computed(self, inputs: Mapping[str, Array], rows: list[int]) -> list[Values]:
        """What the trunk makes of some rows; the other slots of its call repeat the first of them."""
        contract = self._trunk.contract
        chosen = np.array(rows + rows[:1] * (contract.rows - len(rows)))
        outputs = self._trunk.forward({name: array[chosen] for name, array in inputs.items()})
        self.computed += len(rows)
        return [[outputs[spec.name][slot] for spec in contract.cut] for slot in range(len(rows))]
