"""The engines of a bundle: the one that takes steps and the one that scores share its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from device_runner.engines.blocks import Blocks
from device_runner.engines.chain_engine import ChainEngine
from device_runner.engines.choice import choose
from device_runner.engines.kept_states import KeptStates
from device_runner.engines.saved_values import SavedValues
from device_runner.engines.speaking import ChainSpeaker
from device_runner.engines.trunk_cache import Precision, TrunkCache
from prge.contract import Contract
from prge.engine import Engine, EngineName
from prge.files.bundle import Bundle
from prge.files.signatures import DECODE, PREFILL


@dataclass(frozen=True)
class Engines:
    """The engines of a bundle, the size of their pool, what runs them, and what a user should know."""

    step: Engine
    score: Engine
    threads: int
    engine: str
    blocks: Blocks
    notes: str = ""
    saved: SavedValues | None = None

    def speaker(
        self, slots: int = 1, context: int | None = None, precision: Precision = "float32"
    ) -> ChainSpeaker:
        """What writes text with the same blocks; see device_runner.engines.speaking.ChainSpeaker."""
        return ChainSpeaker(self.blocks, slots, context, precision)


def open_engines(
    bundle: Bundle,
    contract: Contract | None = None,
    threads: int | None = None,
    engine: EngineName = "auto",
    loaded: int | None = None,
    scoring: Contract | None = None,
    cache: TrunkCache | None = None,
    kept: KeptStates | None = None,
    speaks: bool = False,
) -> Engines:
    """Open the blocks of a bundle, each tried before it is used.

    Args:
        bundle: an opened one.
        contract: of the calls that take steps; without one they only score.
        threads: size of the engine's thread pool; by default what the runtime picks, performance cores.
        engine: see device_runner.engines.choice.
        loaded: bytes of weights that may stay loaded; beside all of them, of what an exact step saves. See
            prge.learning.costs.Budget.
        scoring: contract of the calls that score; by default the chain's own.
        cache: keeps what the blocks below the adapter make of rows of steps.
        kept: keeps the states that enter the blocks of an exact step.
        speaks: whether texts are to be written too, see `Engines.speaker`.

    Raises:
        BundleError, EngineError: see device_runner.engines.blocks.Blocks.
    """
    backend = choose(engine)
    backend.runtime.prepare()
    # Before any engine loads: a child that tries a program lacks the threads of a running pool.
    told = [f"the engine is torch's: {backend.reason}"] if backend.reason else []
    scoring = scoring or bundle.chain.scoring
    contract = contract or scoring
    roles = {contract.role, *((PREFILL, DECODE) if speaks else ())}
    blocks = Blocks(bundle, backend, roles, loaded, told.append)
    count = backend.runtime.set_threads(threads)
    saved = None
    # What is rounded between blocks has to go through them again.
    if contract.is_exact and (kept is None or kept.precision == "float32"):
        saved = SavedValues(blocks, blocks.beside_weights)
    step = ChainEngine(contract, blocks, count, cache, kept, saved)
    score = ChainEngine(scoring, blocks, count)
    return Engines(step, score, count, backend.name, blocks, "; ".join(told), saved)
