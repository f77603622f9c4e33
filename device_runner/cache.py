"""`prge cache`: what packed weights take on the storage, and how to have it back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from device_runner.engines.packed_files import files_in, packed_bytes, packed_folder, remove_packed
from prge.costs import bytes_text
from prge.settings import parse_settings

DESCRIPTION = (
    "Show the cache of packed weights, or empty it. What is missing is packed again by the next run."
)


@dataclass(frozen=True)
class CacheSettings:
    """What to do with the cache."""

    clear: bool = False
    """Remove its files. A process that uses one keeps it until it ends."""
    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge cache --help`.

    Raises:
        EngineError: the user has no home and no XDG_CACHE_HOME.
        RunError: the storage refuses to remove files.
    """
    settings = parse_settings(CacheSettings, argv, "prge cache", description=DESCRIPTION)
    folder = packed_folder()
    freed = remove_packed(folder) if settings.clear else None
    report = {"folder": str(folder), "files": len(files_in(folder)), "bytes": packed_bytes(folder)}
    if settings.json:
        print(json.dumps({**report, "freed_bytes": freed}))
        return 0
    print(f"{folder}: {report['files']} files, {_text(packed_bytes(folder))}")
    if freed is not None:
        print(f"{_text(freed)} freed")
    return 0


def _text(count: int) -> str:
    return f"{bytes_text(count)} ({count} bytes)" if count >= 1024 else f"{count} bytes"
