"""The chain of a bundle's blocks as one engine: a call goes through all of them, and back.

tokens -> embedding -> blocks -> states at the targets -> head -> log-probabilities
gradient of log-probabilities -> head -> gradient of states -> blocks, the last one first -> adapter
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from device_runner.engines.backward import Backward
from device_runner.engines.base import CheckedEngine
from device_runner.engines.blocks import Blocks
from device_runner.engines.forward import Forward
from device_runner.engines.kept_states import KeptStates
from device_runner.engines.parts import Part
from device_runner.engines.planning import slices, turns
from device_runner.engines.readouts import LogProbabilities, PooledStates, Readout
from device_runner.engines.saved_values import SavedValues
from device_runner.engines.trunk_cache import TrunkCache
from prge.engine import Call, Directions, FloatArray
from prge.errors import EngineError
from prge.files.signatures import BACK, STACK, TANGENT


class ChainEngine(CheckedEngine):
    """Implements prge.engine.Engine.

    Args:
        blocks: of the bundle.
        threads: size of the engine's pool.
        cache: keeps the states that enter the lowest adapted block, sequence by sequence.
        kept: keeps the states that enter the blocks of a `vjp`.
        saved: what forward passes save for the way back; without it all is computed again.
    """

    def __init__(
        self,
        blocks: Blocks,
        threads: int,
        cache: TrunkCache | None = None,
        kept: KeptStates | None = None,
        saved: SavedValues | None = None,
    ) -> None:
        super().__init__(blocks.chain.model, threads)
        self._blocks = blocks
        self._chain = blocks.chain
        self._cache = cache
        self._kept = kept or KeptStates()
        self._saved = saved
        self._above = range(self._chain.lowest_adapted, self._chain.end)

    def _forward(self, call: Call) -> FloatArray:
        forward, readout = self._passes(call)
        outputs = readout.empty(len(call.adapters))
        for numbers in turns(forward.lengths, len(call.adapters)):
            parts = forward.with_copies(numbers)
            forward.through(parts, STACK, self._above)
            readout.forward(parts, outputs)
        return outputs

    def _jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        self._check_role(TANGENT, call)
        forward, readout = self._passes(call)
        queries = len(next(iter(directions.values())))
        outputs, derivatives = readout.empty(), readout.empty(queries)
        for numbers in turns(forward.lengths, 1 + queries):
            below = forward.of_one_copy(numbers)
            for mine in slices(queries, self._chain.bounds.queries):
                parts = forward.with_directions(below, directions, mine)
                forward.through(parts, TANGENT, self._above)
                readout.jvp(parts, outputs, derivatives[mine])
        return outputs, derivatives

    def _vjp(self, call: Call, grad_fn: Callable[[FloatArray], FloatArray]) -> tuple[FloatArray, FloatArray]:
        self._check_role(BACK, call)
        forward, readout = self._passes(call)
        parts = forward.of_one_copy(np.arange(len(call.sequences)))
        self._make_room(forward, parts, call.target_count)
        forward.through(parts, STACK, self._above, self._kept, self._saved)
        outputs, slopes = readout.vjp(parts, grad_fn, self._saved)
        gradient = Backward(forward, self._kept, self._saved).through(parts, slopes, self._above)
        if not (self._saved and self._saved.most):
            self._kept.forget()
        return outputs, gradient

    def _check_role(self, role: str, call: Call) -> None:
        """A bundle may score longer sequences than it has derivatives of."""
        self._chain.check_role(role)
        most, longest = self._chain.longest(role), max(len(each.tokens) for each in call.sequences)
        if longest > most:
            raise EngineError(
                f"a sequence has {longest} tokens, the bundle takes {most} in the role {role}",
                remedy="give shorter ones, or export the bundle again",
            )

    def _passes(self, call: Call) -> tuple[Forward, Readout]:
        """What takes a call through the blocks, and what reads the states behind them."""
        readout = PooledStates if self._chain.is_encoder else LogProbabilities
        return Forward(self._blocks, call, self._cache), readout(self._blocks, call.sequences)

    def _make_room(self, forward: Forward, parts: list[Part], targets: int) -> None:
        """Room for what a forward pass keeps and saves."""
        blocks = [turn.start for turn in self._chain.turns(self._above)]
        numbers = [count for part in parts for block in blocks for count in forward.kept_numbers(part, block)]
        self._kept.begin(len(numbers), sum(numbers))
        if self._saved is not None:
            asked = 0 if self._chain.is_encoder else targets
            # A row in pieces saves nothing.
            whole = [(part.rows.size, 0 if forward.in_pieces(part) else part.length) for part in parts]
            self._saved.begin(whole, asked)
