"""Return freed memory to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def release_freed_memory() -> None:
    """Collect reference cycles, such as those of graphs, and let glibc return its free pages."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
