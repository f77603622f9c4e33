"""The chain of a bundle's blocks as one engine with forward, jvp and vjp.

tokens -> embedding -> blocks -> hidden states at the targets -> head -> log-probabilities
gradient of log-probabilities -> head -> gradient of hidden states -> blocks, the last one first -> adapter
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from device_runner.engines.activations import ActivationStore
from device_runner.engines.backward import Backward
from device_runner.engines.base import CheckedEngine
from device_runner.engines.batch import Batch
from device_runner.engines.blocks import Blocks
from device_runner.engines.forward import Forward
from device_runner.engines.planning import slices
from device_runner.engines.readouts import LogProbabilities, PooledStates, Readout
from prge.engine import Call, Directions, FloatArray
from prge.errors import EngineError
from prge.formats.signatures import BACKWARD, FORWARD, JVP

_READOUTS: dict[str, type[Readout]] = {"logprobs": LogProbabilities, "pooled": PooledStates}


class ChainEngine(CheckedEngine):
    """Implements prge.engine.Engine with the blocks of a bundle.

    Args:
        blocks: blocks of the bundle.
        threads: size of the engine's thread pool.
        store: storage of activations; by default they are in memory, and blocks save no residuals.
    """

    def __init__(self, blocks: Blocks, threads: int, store: ActivationStore | None = None) -> None:
        super().__init__(blocks.chain.model, threads)
        self._blocks = blocks
        self._chain = blocks.chain
        self._store = store or ActivationStore(blocks)
        self._above = range(self._chain.lowest_adapted, self._chain.head_start)

    def _forward(self, call: Call) -> FloatArray:
        forward, readout = self._passes(call)
        outputs = readout.empty(len(call.adapters))
        # Sequences in chunks are computed with one copy at a time. So more of them are held, and the states
        # that enter the lowest adapted block with them.
        for numbers in forward.micro_batches(len(call.adapters), chunk_passes=2):
            trunk = forward.trunk(numbers)
            for copies in forward.copies_together(numbers):
                parts = forward.with_copies(numbers, trunk, copies)
                forward.run_blocks(parts, FORWARD, self._above)
                readout.forward(parts, outputs)
        return outputs

    def _jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        self._check_role(JVP, call)
        forward, readout = self._passes(call)
        queries = len(next(iter(directions.values())))
        outputs, derivatives = readout.empty(), readout.empty(queries)
        for numbers in forward.micro_batches(1 + queries):
            parts = forward.of_one_copy(numbers, forward.trunk(numbers), queries)
            for query_slice in slices(queries, self._chain.bounds.queries):
                directed = forward.with_directions(parts, directions, query_slice)
                forward.run_blocks(directed, JVP, self._above)
                readout.jvp(directed, outputs, derivatives[query_slice])
        return outputs, derivatives

    def _vjp(self, call: Call, grad_fn: Callable[[FloatArray], FloatArray]) -> tuple[FloatArray, FloatArray]:
        self._check_role(BACKWARD, call)
        forward, readout = self._passes(call)
        numbers = np.arange(len(call.sequences))
        parts = forward.of_one_copy(numbers, forward.trunk(numbers))
        self._begin(forward, parts, call.target_count)
        forward.run_blocks(parts, FORWARD, self._above, self._store)
        outputs, gradients = readout.vjp(parts, grad_fn, self._store)
        gradient = Backward(forward, self._store).run_blocks(parts, gradients, self._above)
        self._store.end()
        return outputs, gradient

    def _check_role(self, role: str, call: Call) -> None:
        """Check that the bundle has a role for the lengths of a call; `forward` may allow longer ones."""
        self._chain.check_role(role)
        limit, longest = self._chain.longest(role), max(len(each.tokens) for each in call.sequences)
        if longest > limit:
            raise EngineError(
                f"A sequence has {longest} tokens, the role {role} of the bundle takes at most {limit}.",
                remedy="Use shorter sequences, or export the bundle again.",
                code="sequence-of-other-length",
            )

    def _passes(self, call: Call) -> tuple[Forward, Readout]:
        """Return the forward pass of a call and the readout of its hidden states."""
        readout = _READOUTS[self._chain.model.readout](self._blocks, call.sequences)
        return Forward(self._blocks, call, readout, self._store.trunk), readout

    def _begin(self, forward: Forward, parts: list[Batch], targets: int) -> None:
        """Allocate memory for the activations of a call."""
        blocks = [group.start for group in self._chain.block_groups(self._above)]
        checkpoints = [n for part in parts for block in blocks for n in forward.checkpoint_sizes(part, block)]
        # A row that is computed in chunks saves no residuals.
        whole = [(part.rows.size, 0 if forward.in_chunks(part) else part.length) for part in parts]
        self._store.begin(checkpoints, whole, targets)
