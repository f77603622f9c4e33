"""The engine of a bundle, opened: steps, scores and texts share its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from device_runner.engines.blocks import Blocks
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.choice import choose
from device_runner.engines.kept_states import KeptStates
from device_runner.engines.saved_values import SavedValues
from device_runner.engines.speaking import ChainSpeaker
from device_runner.engines.trunk_cache import Precision, TrunkCache
from prge.engine import Engine, EngineName
from prge.files.bundle import Bundle
from prge.files.signatures import BACK, STACK


@dataclass(frozen=True)
class OpenEngine:
    """An engine, the size of its pool, the name of what runs it, and what a user should know."""

    engine: Engine
    threads: int
    name: str
    blocks: Blocks
    notes: str = ""
    saved: SavedValues | None = None

    def speaker(
        self, slots: int = 1, context: int | None = None, precision: Precision = "float32"
    ) -> ChainSpeaker:
        """What writes text with the same blocks; see device_runner.engines.speaking.ChainSpeaker."""
        return ChainSpeaker(self.blocks, slots, context, precision)


def open_engine(
    bundle: Bundle,
    role: str = STACK,
    *,
    threads: int | None = None,
    engine: EngineName = "auto",
    loaded: int | None = None,
    cache: TrunkCache | None = None,
    kept: KeptStates | None = None,
) -> OpenEngine:
    """Open the blocks of a bundle, each tried before it is used.

    Args:
        bundle: an opened one.
        role: of steps: `tangent` where `jvp` is going to be called, `back` for `vjp`.
        threads: size of the engine's thread pool; by default what the runtime picks, performance cores.
        engine: see device_runner.engines.choice.
        loaded: bytes of weights that may stay loaded; beside all of them, of what a `vjp` saves. See
            prge.learning.costs.Budget.
        cache: keeps what the blocks below the adapter make of sequences.
        kept: keeps the states that enter the blocks of a `vjp`.

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
    saved = None
    # What is rounded between blocks has to go through them again.
    if role == BACK and (kept is None or kept.precision == "float32"):
        saved = SavedValues(blocks, blocks.beside_weights)
    opened = ChainEngine(blocks, count, cache, kept, saved)
    return OpenEngine(opened, count, backend.name, blocks, "; ".join(notes), saved)
