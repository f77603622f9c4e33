"""The programs of a bundle as engines that load when they are called, one in memory at a time.

stack bundle     one method takes steps and scores
tangent bundle   two methods; with both loaded, weights that the engine can't share are in memory twice
cut step         trunk and step share no layer, so these two stay together; the method that scores has all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from device_runner.engines import EngineName, choose
from device_runner.trunk_cache import TrunkCache
from device_runner.trunk_engine import TrunkEngine
from prge.bundle import PROGRAM, TRUNK_METHOD, Bundle
from prge.contract import Contract
from prge.engine import Array, Engine


class Programs:
    """The engines `step` and `score` of a bundle; those of a stack bundle may be one.

    The step of a bundle with a trunk is both of its methods in one engine.

    Args:
        bundle: whose contracts the engines have before anything is loaded.
        load: gives the engine of a method.
        keep: whether a loaded method stays when the other one is called.
        threads: size of the engines' thread pool.
        engine: name of what loads them.
        notes: what a user should know of that choice.
        cache: keeps what a trunk made.
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
    ) -> None:
        self.threads = threads
        self.engine = engine
        self.notes = notes
        self.step: Engine = _LazyEngine(self, bundle.step_method, bundle.contract)
        self.trunk: TrunkEngine | None = None
        if bundle.trunk is not None:
            below = _LazyEngine(self, TRUNK_METHOD, bundle.trunk)
            program = str(bundle.manifest.get("files", {}).get(PROGRAM, {}).get("sha256"))
            self.step = self.trunk = TrunkEngine(below, self.step, program, cache)
        self.score: Engine = _LazyEngine(self, bundle.score_method, bundle.score_contract)
        self._load = load
        self._keep = keep
        self._whole = {bundle.score_method} if bundle.trunk else set(bundle.methods)
        self._loaded: dict[str, Engine] = {}

    def loaded(self, method: str) -> Engine:
        """The engine of a method, loaded now unless it is already."""
        if method not in self._loaded:
            if not self._keep and (method in self._whole or not self._whole.isdisjoint(self._loaded)):
                self._loaded.clear()
            self._loaded[method] = self._load(method)
        return self._loaded[method]


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


def open_programs(
    bundle: Bundle,
    threads: int | None = None,
    keep: bool = False,
    engine: EngineName = "auto",
    cache: TrunkCache | None = None,
) -> Programs:
    """Check every method of a bundle in a child process; from then on they load when they are called.

    Args:
        bundle: an opened bundle.
        threads: size of the engine's thread pool; by default what the runtime picks.
        keep, cache: see Programs.
        engine: see device_runner.engines.

    Raises:
        BundleError, EngineError: as device_runner.engines.Backend.load.
    """
    backend = choose(engine)
    for method in bundle.methods:
        backend.check_method(bundle, method)
    share = keep and backend.can_share(bundle)

    def load(method: str) -> Engine:
        return backend.load(bundle, threads, check=False, method=method, share_weights=share)

    notes = f"the engine is torch's: {backend.reason}" if backend.reason else ""
    return Programs(bundle, load, keep, backend.set_threads(threads), backend.name, notes, cache)
