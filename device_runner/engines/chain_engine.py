"""The chain of a bundle's blocks as one engine: a call goes through all of them, and back.

tokens -> embedding -> blocks -> states at the targets -> head -> log-probabilities
gradient of log-probabilities -> head -> gradient of states -> blocks, the last one first -> adapter
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from device_runner.engines.activations import ActivationStore
from device_runner.engines.backward import Backward
from device_runner.engines.base import CheckedEngine
from device_runner.engines.blocks import Blocks
from device_runner.engines.forward import Forward
from device_runner.engines.parts import Part
from device_runner.engines.planning import slices, turns
from device_runner.engines.readouts import LogProbabilities, PooledStates, Readout
from prge.engine import Call, Directions, FloatArray
from prge.errors import EngineError
from prge.files.signatures import BACK, STACK, TANGENT

_READOUTS: dict[str, type[Readout]] = {"logprobs": LogProbabilities, "pooled": PooledStates}


class ChainEngine(CheckedEngine):
    """Implements prge.engine.Engine.

    Args:
        blocks: of the bundle.
        threads: size of the engine's pool.
        store: holds activations; without it in memory, and blocks save none.
    """

    def __init__(self, blocks: Blocks, threads: int, store: ActivationStore | None = None) -> None:
        super().__init__(blocks.chain.model, threads)
        self._blocks = blocks
        self._chain = blocks.chain
        self._store = store or ActivationStore(blocks)
        self._above = range(self._chain.lowest_adapted, self._chain.end)

    def _forward(self, call: Call) -> FloatArray:
        forward, readout = self._passes(call)
        outputs = readout.empty(len(call.adapters))
        for numbers in turns(forward.lengths, len(call.adapters)):
            parts = forward.with_copies(numbers, forward.below(numbers))
            forward.through(parts, STACK, self._above)
            readout.forward(parts, outputs)
        return outputs

    def _jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        self._check_role(TANGENT, call)
        forward, readout = self._passes(call)
        queries = len(next(iter(directions.values())))
        outputs, derivatives = readout.empty(), readout.empty(queries)
        for numbers in turns(forward.lengths, 1 + queries):
            parts = forward.of_one_copy(numbers, forward.below(numbers))
            for mine in slices(queries, self._chain.bounds.queries):
                moved = forward.with_directions(parts, directions, mine)
                forward.through(moved, TANGENT, self._above)
                readout.jvp(moved, outputs, derivatives[mine])
        return outputs, derivatives

    def _vjp(self, call: Call, grad_fn: Callable[[FloatArray], FloatArray]) -> tuple[FloatArray, FloatArray]:
        self._check_role(BACK, call)
        forward, readout = self._passes(call)
        numbers = np.arange(len(call.sequences))
        parts = forward.of_one_copy(numbers, forward.below(numbers))
        self._begin(forward, parts, call.target_count)
        forward.through(parts, STACK, self._above, self._store)
        outputs, slopes = readout.vjp(parts, grad_fn, self._store)
        gradient = Backward(forward, self._store).through(parts, slopes, self._above)
        self._store.end()
        return outputs, gradient

    def _check_role(self, role: str, call: Call) -> None:
        """A bundle may score longer sequences than it has derivatives of."""
        self._chain.check_role(role)
        most, longest = self._chain.longest(role), max(len(each.tokens) for each in call.sequences)
        if longest > most:
            raise EngineError(
                f"a sequence has {longest} tokens, the bundle takes {most} in the role {role}",
                remedy="give shorter ones, or export the bundle again",
                code="sequence-of-other-length",
            )

    def _passes(self, call: Call) -> tuple[Forward, Readout]:
        """What takes a call through the blocks, and what reads the states behind them."""
        readout = _READOUTS[self._chain.model.readout](self._blocks, call.sequences)
        return Forward(self._blocks, call, readout, self._store.trunk), readout

    def _begin(self, forward: Forward, parts: list[Part], targets: int) -> None:
        """Make room for the activations of a call."""
        blocks = [turn.start for turn in self._chain.turns(self._above)]
        checkpoints = [n for part in parts for block in blocks for n in forward.kept_numbers(part, block)]
        # A row in pieces saves no residuals.
        whole = [(part.rows.size, 0 if forward.in_pieces(part) else part.length) for part in parts]
        self._store.begin(checkpoints, whole, targets)
