"""The choice of the engine: ExecuTorch's stock libraries, or its Python module with torch.

Both are the same runtime and give the same bits. Neither is imported before it is chosen.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from prge.engine import EngineName
from prge.errors import EngineError, as_clause
from prge.system.memory import is_out_of_memory


@dataclass(frozen=True)
class Backend:
    """An engine, `native` or `torch`, and the reason for it if it wasn't the first choice."""

    name: str
    reason: str = ""

    @property
    def runtime(self) -> Any:
        """The engine's module: `prepare`, `set_threads`, `Program`, `WeightsFile`, and natively `Arena`."""
        if self.name == "native":
            from device_runner.engines.native import runtime

            return runtime
        from device_runner.engines import torch_runtime

        return torch_runtime


def choose_backend(engine: EngineName = "auto") -> Backend:
    """Return the engine of this name; `auto` prefers the native one if it is built or can be built.

    Raises:
        EngineError: the native engine can't be built, and it was requested or torch is missing too.
    """
    if engine == "torch":
        return Backend("torch")
    from device_runner.engines.native import runtime

    try:
        runtime.prepare()
    except EngineError as error:
        # torch would need even more memory.
        if engine == "native" or is_out_of_memory(error) or importlib.util.find_spec("torch") is None:
            raise
        return Backend("torch", as_clause(error.what))
    return Backend("native")
