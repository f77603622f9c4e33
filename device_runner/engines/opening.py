"""The engine of a bundle, opened: steps, scores and texts share its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from device_runner.engines.activations import ActivationStore
from device_runner.engines.backend import choose
from device_runner.engines.blocks import Blocks
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.generator import ChainSpeaker
from device_runner.engines.trunk_cache import Precision, TrunkCache
from prge.engine import Engine, EngineName
from prge.formats.bundle import Bundle
from prge.formats.signatures import BACKWARD, FORWARD


@dataclass(frozen=True)
class OpenEngine:
    """An engine, the size of its pool, the name of what runs it, and what a user should know."""

    engine: Engine
    threads: int
    name: str
    blocks: Blocks
    store: ActivationStore
    notes: str = ""

    def speaker(
        self, slots: int = 1, context: int | None = None, precision: Precision = "float32"
    ) -> ChainSpeaker:
        """What writes text with the same blocks; see device_runner.engines.generator.ChainSpeaker."""
        return ChainSpeaker(self.blocks, slots, context, precision)


def open_engine(
    bundle: Bundle,
    role: str = FORWARD,
    *,
    threads: int | None = None,
    engine: EngineName = "auto",
    loaded: int | None = None,
    folder: Path | None = None,
    checkpoint_dtype: Precision = "float32",
    trunk: TrunkCache | None = None,
) -> OpenEngine:
    """Open the blocks of a bundle, each tried before it is used.

    Args:
        bundle: an opened one.
        role: of steps: `tangent` where `jvp` is going to be called, `back` for `vjp`.
        threads: size of the engine's thread pool; by default what the runtime picks, performance cores.
        engine: see device_runner.engines.backend.
        loaded: bytes of weights that may stay loaded, as many of activation checkpoints in memory, and what
            is left beside all weights for residuals. See prge.training.costs.Budget.
        folder: of the file of activation checkpoints that take more.
        checkpoint_dtype: of activation checkpoints.
        trunk: keeps what the blocks below the adapter compute.

    Raises:
        BundleError, EngineError: see device_runner.engines.blocks.Blocks.
    """
    backend = choose(engine)
    backend.runtime.prepare()
    # Before any engine loads: a child that tries a program lacks the threads of a running pool.
    notes = [f"the engine is torch's: {backend.reason}"] if backend.reason else []
    bundle.chain.check_role(role)
    blocks = Blocks(bundle, backend, {role}, loaded, notes.append)
    count = backend.runtime.set_threads(threads)
    store = ActivationStore(
        blocks,
        precision=checkpoint_dtype,
        folder=folder,
        checkpoint_bytes=loaded,
        # Residuals of hidden states that checkpoints round would belong to another forward pass.
        residual_bytes=blocks.spare_bytes if role == BACKWARD and checkpoint_dtype == "float32" else None,
        trunk=trunk,
    )
    return OpenEngine(ChainEngine(blocks, count, store), count, backend.name, blocks, store, "; ".join(notes))
