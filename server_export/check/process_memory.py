"""How much memory this process holds, precisely enough to see what one call adds."""

from __future__ import annotations

import ctypes
from pathlib import Path

_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int | None:
    """Resident memory that is no file's, after what the allocator keeps for later was given back.

    None where the system doesn't tell.
    """
    try:
        # Freed memory that is used again would hide what a call takes.
        ctypes.CDLL(None).malloc_trim(0)
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except (OSError, AttributeError, TypeError):
        return None
    counts = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
    return counts[0] if counts else None
