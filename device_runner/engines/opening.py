"""Opens the engine of a bundle: training, scoring and generation share its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from device_runner.engines.activations import ActivationStore
from device_runner.engines.backend import choose_backend
from device_runner.engines.blocks import Blocks
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.generator import ChainGenerationEngine
from device_runner.engines.trunk_cache import Precision, TrunkCache
from prge.engine import Engine, EngineName
from prge.formats.bundle import Bundle
from prge.formats.signatures import BACKWARD, FORWARD


@dataclass(frozen=True)
class OpenEngine:
    """An engine, the size of its thread pool, its backend's name, its blocks, and notes for the user."""

    engine: Engine
    threads: int
    name: str
    blocks: Blocks
    store: ActivationStore
    notes: str = ""

    def generation_engine(
        self, slots: int = 1, context: int | None = None, precision: Precision = "float32"
    ) -> ChainGenerationEngine:
        """Return a generation engine with the same blocks; see device_runner.engines.generator."""
        return ChainGenerationEngine(self.blocks, slots, context, precision)


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
    """Open the blocks of a bundle; each is tried in a child process before it is used.

    Args:
        bundle: an opened bundle.
        role: role of training steps: `jvp` if `jvp` will be called, `backward` for `vjp`.
        threads: size of the engine's thread pool; by default the number of performance cores.
        engine: see device_runner.engines.backend.
        loaded: bytes of weights that may stay loaded, and of activation checkpoints that may lie in memory;
            what is left next to all weights may hold residuals. See prge.training.costs.Budget.
        folder: folder of the file for larger activation checkpoints.
        checkpoint_dtype: dtype of activation checkpoints.
        trunk: cache of the hidden states that enter the lowest adapted block.

    Raises:
        BundleError, EngineError: see device_runner.engines.blocks.Blocks.
    """
    backend = choose_backend(engine)
    backend.runtime.prepare()
    # Blocks are tried before any engine runs: a forked child lacks the threads of a running pool.
    notes = [f"using the torch engine: {backend.reason}"] if backend.reason else []
    bundle.chain.check_role(role)
    blocks = Blocks(bundle, backend, {role}, loaded, notes.append)
    count = backend.runtime.set_threads(threads)
    store = ActivationStore(
        blocks,
        precision=checkpoint_dtype,
        folder=folder,
        checkpoint_bytes=loaded,
        # Rounded checkpoints force recomputation: residuals would belong to another forward pass.
        residual_bytes=blocks.spare_bytes if role == BACKWARD and checkpoint_dtype == "float32" else None,
        trunk=trunk,
    )
    return OpenEngine(ChainEngine(blocks, count, store), count, backend.name, blocks, store, "; ".join(notes))
