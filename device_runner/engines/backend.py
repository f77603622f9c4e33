"""Which engine runs the programs: the stock libraries themselves, or the runtime's Python module with torch.

Both are the same runtime and give the same bits. Neither is imported before it is chosen.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from prge.engine import EngineName
from prge.errors import EngineError
from prge.system.memory import is_out_of_memory


@dataclass(frozen=True)
class Backend:
    """A chosen engine: `native` or `torch`, and why where that was not the first choice."""

    name: str
    reason: str = ""

    @property
    def runtime(self) -> Any:
        """Its module: `prepare`, `set_threads`, `Program`, `WeightsFile`, and natively `Arena`."""
        if self.name == "native":
            from device_runner.engines.native import runtime

            return runtime
        from device_runner.engines import torch_runtime

        return torch_runtime


def choose(engine: EngineName = "auto") -> Backend:
    """The engine of that name; `auto` takes the native one where it is built or can be, else torch's.

    Raises:
        EngineError: the native engine was asked for, or torch is not there either, and it can't be built.
    """
    if engine == "torch":
        return Backend("torch")
    from device_runner.engines.native import runtime

    try:
        runtime.prepare()
    except EngineError as error:
        # torch would take more memory still.
        if engine == "native" or is_out_of_memory(error) or importlib.util.find_spec("torch") is None:
            raise
        return Backend("torch", error.what)
    return Backend("native")
