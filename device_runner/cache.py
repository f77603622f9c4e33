"""`prge cache`: show the size of packed weights and exported programs in the cache, or empty it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from device_runner.engines.packed_files import cache_files, folder_bytes, remove_files
from prge.cli.settings import parse_settings
from prge.system.user_cache import PACKED, PROGRAMS, cache_path
from prge.training.costs import format_bytes


@dataclass(frozen=True)
class CacheSettings:
    """Show the cache, which holds packed weights of runs and programs of exports, or empty it.

    The next run or export creates missing files again.
    """

    EXAMPLE: ClassVar = "--clear"

    clear: bool = False
    """Remove its files. A process that uses a file keeps it until it ends."""
    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge cache --help`.

    Raises:
        EngineError: the user has no home and XDG_CACHE_HOME is not set.
        RunError: the storage refuses to remove files.
    """
    settings = parse_settings(CacheSettings, argv, "prge cache")
    folders = [cache_path(name) for name in (PACKED, PROGRAMS)]
    freed = sum(map(remove_files, folders)) if settings.clear else None
    reports = [
        {"folder": str(folder), "files": len(cache_files(folder)), "bytes": folder_bytes(folder)}
        for folder in folders
    ]
    if settings.json:
        print(json.dumps({"folders": reports, "freed_bytes": freed}))
        return 0
    for folder, report in zip(folders, reports, strict=True):
        print(f"{folder}: {report['files']} files, {_format_size(folder_bytes(folder))}")
    if freed is not None:
        print(f"{_format_size(freed)} freed")
    return 0


def _format_size(count: int) -> str:
    return f"{format_bytes(count)} ({count} bytes)" if count >= 1024 else f"{count} bytes"
