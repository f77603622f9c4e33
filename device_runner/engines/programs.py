"""The programs of a bundle as engines that load when they are called: those of steps, or those that score.

P-RGE bundle      one method takes steps and scores
tangent bundle    two methods; with both loaded, weights that the engine can't share are in memory twice
cut step          trunk and step share no layer, so these two stay together; the method that scores has all
several lengths   the variants of a method stay together, each with the weights, where they can't be shared
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from device_runner.engines.choice import choose
from device_runner.engines.length_engine import LengthEngine
from device_runner.engines.lengths import groups, variants_of
from device_runner.engines.trunk_cache import TrunkCache
from device_runner.engines.trunk_engine import TrunkEngine
from prge.bundle import PROGRAM, TRUNK_METHOD, Bundle
from prge.chain import ROLE_OF, STACK
from prge.contract import Contract
from prge.engine import Array, Engine, EngineName


class Engines(Protocol):
    """The engines of a bundle, the size of their pool, what runs them, and what a user should know."""

    step: Engine
    score: Engine
    trunk: TrunkEngine | None
    threads: int
    engine: str
    notes: str


class Programs:
    """The engines `step` and `score` of a bundle; those of a P-RGE bundle may be one.

    The step of a bundle with a trunk is both of its methods in one engine.

    Args:
        bundle: whose contracts the engines have before anything is loaded.
        load: gives the engine of a method.
        keep: whether a loaded method stays when one of the other kind is called.
        threads: size of the engines' thread pool.
        engine: name of what loads them.
        notes: what a user should know of that choice.
        cache: keeps what a trunk made.
        lengths: of the bundle's, those to use; by default the longest alone.
    """

    def __init__(
        self,
        bundle: Bundle,
        load: Callable[[str], Engine],
        keep: bool = False,
        threads: int = 1,
        engine: str = "",
        notes: str = "",
        cache: TrunkCache | None = None,
        lengths: Collection[int] | None = None,
    ) -> None:
        self.threads = threads
        self.engine = engine
        self.notes = notes
        self.lengths = tuple(lengths or bundle.lengths[-1:])
        self._load = load
        self._keep = keep
        self._scoring = set(bundle.variants(bundle.score_method)) if bundle.scoring is not None else set()
        self._loaded: dict[str, Engine] = {}
        steps = self._engines(bundle, bundle.step_method)
        self.step: Engine = _one(steps)
        self.trunk: TrunkEngine | None = None
        if bundle.trunk is not None:
            below = self._engines(bundle, TRUNK_METHOD)
            program = str(bundle.manifest.get("files", {}).get(PROGRAM, {}).get("sha256"))
            self.step = self.trunk = TrunkEngine(below, steps, program, cache)
        self.score: Engine = _one(self._engines(bundle, bundle.score_method))

    def _engines(self, bundle: Bundle, method: str) -> list[Engine]:
        """Those of a method for the lengths that are used, shortest first."""
        variants = bundle.variants(method)
        return [_LazyEngine(self, name, variants[name]) for name in variants_of(bundle, method, self.lengths)]

    def loaded(self, method: str) -> Engine:
        """The engine of a method, loaded now unless it is already."""
        if method not in self._loaded:
            if not self._keep:
                scores = method in self._scoring
                for other in [name for name in self._loaded if (name in self._scoring) != scores]:
                    del self._loaded[other]
            self._loaded[method] = self._load(method)
        return self._loaded[method]


def _one(engines: Sequence[Engine]) -> Engine:
    return engines[0] if len(engines) == 1 else LengthEngine(engines)


class _LazyEngine:
    """Implements prge.engine.Engine by one method of some programs."""

    def __init__(self, programs: Programs, method: str, contract: Contract) -> None:
        self._programs = programs
        self._method = method
        self._contract = contract

    @property
    def contract(self) -> Contract:
        """Shapes, names and adapted modules of the method."""
        return self._contract

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine.forward."""
        return self._programs.loaded(self._method).forward(inputs)


@dataclass
class ChainPrograms:
    """The engines `step` and `score` of a bundle with a chain, which share its blocks; see Programs."""

    step: Engine
    score: Engine
    threads: int
    engine: str
    notes: str = ""
    trunk: TrunkEngine | None = None


def open_programs(
    bundle: Bundle,
    threads: int | None = None,
    keep: bool = False,
    engine: EngineName = "auto",
    cache: TrunkCache | None = None,
    lengths: Collection[int] | None = None,
    only_scoring: bool = False,
) -> Programs:
    """Check the methods of a bundle in a child process; from then on they load when they are called.

    Args:
        bundle: an opened bundle.
        threads: size of the engine's thread pool; by default what the runtime picks.
        keep, cache, lengths: see Programs.
        engine: see device_runner.engines.choice.
        only_scoring: whether no step is going to be taken.

    Raises:
        BundleError, EngineError: as device_runner.engines.base.ProgramEngine.load.
    """
    backend = choose(engine)
    kind = backend.engine
    lengths = tuple(lengths or bundle.lengths[-1:])
    together = groups(bundle, lengths, keep, only_scoring)
    for method in dict.fromkeys(name for group in together for name in group):
        kind.check_method(bundle, method)
    # Methods of one length that are in memory together, a trunk and its step, share no layer.
    sharing: set[str] = set()
    if keep or len(lengths) > 1:
        sharing.update(*(group for group in together if kind.can_share(bundle, group)))

    def load(method: str) -> Engine:
        return kind.load(bundle, threads, check=False, method=method, share_weights=method in sharing)

    notes = f"the engine is torch's: {backend.reason}" if backend.reason else ""
    pool = kind.set_threads(threads)
    return Programs(bundle, load, keep, pool, backend.name, notes, cache, lengths)


def open_chain(
    bundle: Bundle,
    threads: int | None = None,
    engine: EngineName = "auto",
    memory: int | None = None,
    only_scoring: bool = False,
) -> ChainPrograms:
    """Open the blocks of a bundle with a chain, each tried before it is used.

    Args:
        bundle: with the contract of a step; see device_runner.session.settings.bundle_for.
        threads: size of the engine's thread pool.
        engine: see device_runner.engines.choice.
        memory: bytes of weights that may stay loaded.
        only_scoring: whether no step is going to be taken.

    Raises:
        BundleError, EngineError: see device_runner.engines.blocks.Blocks.
    """
    from device_runner.engines.blocks import Blocks
    from device_runner.engines.chain_engine import ChainEngine

    backend = choose(engine)
    backend.engine.prepare()
    # Before any engine loads: a child that tries a program lacks the threads of a running pool.
    told = [f"the engine is torch's: {backend.reason}"] if backend.reason else []
    role = ROLE_OF[STACK if only_scoring else bundle.contract.kind]
    blocks = Blocks(bundle, backend, {role}, memory, told.append)
    count = backend.engine.set_threads(threads)
    step = ChainEngine(bundle.contract, blocks, count)
    score = ChainEngine(bundle.score_contract, blocks, count)
    return ChainPrograms(step, score, count, backend.name, "; ".join(told))


def open_engines(
    bundle: Bundle,
    threads: int | None = None,
    keep: bool = False,
    engine: EngineName = "auto",
    cache: TrunkCache | None = None,
    lengths: Collection[int] | None = None,
    only_scoring: bool = False,
    memory: int | None = None,
) -> Engines:
    """The engines of a bundle of any form; see `open_programs` and `open_chain`."""
    if bundle.chain is not None:
        return open_chain(bundle, threads, engine, memory, only_scoring)
    return open_programs(bundle, threads, keep, engine, cache, lengths, only_scoring)
