"""Fine-tune language models with nothing but an inference engine (P-RGE, arXiv 2409.15520).

The functions of `prge.api` are available here; they are imported on first use.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_API = (
    *("Model", "Run", "Tuned"),
    *("evaluate", "export", "load", "open_bundle", "run", "tune"),
)
__all__ = ["PrgeError", "__version__", *_API]


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module("prge.api"), name)
    if name == "PrgeError":
        return importlib.import_module("prge.errors").PrgeError
    raise AttributeError(f"module 'prge' has no attribute {name!r}")
