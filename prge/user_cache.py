"""Folders of the user's cache: what is lost there is made again.

    ~/.cache/prge/native     the engine's interface, compiled
    ~/.cache/prge/packed     packed weights
    ~/.cache/prge/programs   programs of earlier exports, without weights
    ~/.cache/prge/android    packages for a phone

XDG_CACHE_HOME moves them.
"""

from __future__ import annotations

import os
from pathlib import Path

from prge.errors import EngineError

NATIVE, PACKED, PROGRAMS = "native", "packed", "programs"


def user_cache(name: str) -> Path:
    """A folder of the cache, which may not be there yet.

    Raises:
        EngineError: XDG_CACHE_HOME is not set and the user has no home.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise EngineError(
            f"there is no place for the cache: {error}",
            remedy="let XDG_CACHE_HOME name a folder, or PRGE_NATIVE_LIBRARY an engine built elsewhere",
        ) from None
    return Path(base) / "prge" / name
