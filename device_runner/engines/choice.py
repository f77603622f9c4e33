"""Which engine runs the programs: the stock libraries themselves, or the runtime's Python module with torch.

Both are the same runtime and give the same bits. Neither is imported before it is chosen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from device_runner.engines.base import ProgramEngine
from prge.bundle import STEP_METHOD, Bundle
from prge.engine import EngineName
from prge.errors import EngineError
from prge.memory import tells_no_memory


@dataclass(frozen=True)
class Backend:
    """A chosen engine: `native` or `torch`, and why where that was not the first choice."""

    name: str
    reason: str = ""

    def load(
        self,
        bundle: Bundle,
        threads: int | None = None,
        check: bool = True,
        method: str = STEP_METHOD,
        share_weights: bool = False,
    ) -> ProgramEngine:
        """Load a method of a bundle's program; see the engines' own `load` and, to share, `can_share`.

        Raises:
            BundleError, EngineError: see the engines' own `load`.
        """
        if self.name == "native":
            from device_runner.engines.native.engine import NativeEngine

            return NativeEngine.load(bundle, threads, check, method, share_weights)
        from device_runner.engines.executorch_engine import ExecutorchEngine

        return ExecutorchEngine.load(bundle, threads, check, method)

    def check_method(self, bundle: Bundle, method: str) -> None:
        """Load a method and run it once in a forked child; see the engines' own `check_method`.

        Raises:
            BundleError, EngineError: the child was killed by a signal, or the engine refused the program.
        """
        if self.name == "native":
            from device_runner.engines.native.engine import check_method
        else:
            from device_runner.engines.executorch_engine import check_method
        check_method(bundle, method)

    def can_share(self, bundle: Bundle, methods: Sequence[str] | None = None) -> bool:
        """Whether this engine can load a bundle's methods side by side with the weights in memory once.

        `methods` are some of the bundle's; by default all.
        """
        if self.name != "native":
            return False
        from device_runner.engines.native.engine import can_share

        return can_share(bundle, methods)

    def set_threads(self, threads: int | None) -> int:
        """Set the size of the process's thread pool, unless it is None, and return it.

        Raises:
            EngineError: the runtime is not installed, or engines in use hold a pool of another size.
        """
        if self.name == "native":
            from device_runner.engines.native.engine import set_threads
        else:
            from device_runner.engines.executorch_engine import set_threads
        return set_threads(threads)


def choose(engine: EngineName = "auto") -> Backend:
    """The engine of that name; `auto` takes the native one where it is built or can be, else torch's.

    Raises:
        EngineError: the native engine was asked for, or torch is not there either, and it can't be built.
    """
    if engine == "torch":
        return Backend("torch")
    from device_runner.engines.native.engine import prepare

    try:
        prepare()
    except EngineError as error:
        # torch would take more memory still.
        if engine == "native" or tells_no_memory(error) or importlib.util.find_spec("torch") is None:
            raise
        return Backend("torch", error.what)
    return Backend("native")
