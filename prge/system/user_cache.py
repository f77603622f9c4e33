"""Folders of the user's cache, whose content can always be recreated.

    ~/.cache/prge/native     the engine's interface, compiled
    ~/.cache/prge/packed     packed weights
    ~/.cache/prge/programs   programs of earlier exports, without weights
    ~/.cache/prge/android    packages for a phone
    ~/.cache/prge/bench      bundles that phones are measured with

XDG_CACHE_HOME moves them. Only their owner may write to them, because code from there is executed.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from prge.errors import EngineError
from prge.system.atomic import storage_error

NATIVE, PACKED, PROGRAMS = "native", "packed", "programs"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_cache(name: str) -> Path:
    """Return a folder of the cache for reading and writing, and create it if possible.

    Raises:
        EngineError: XDG_CACHE_HOME is not set and the user has no home, or the folder is another user's.
    """
    folder = cache_path(name)
    private_folder(folder.parent, empties=False)
    return private_folder(folder)


def cache_path(name: str) -> Path:
    """Return the path of a folder of the cache without creating it; raises EngineError as `user_cache`."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise EngineError(
            f"There is no folder for the cache: {error}",
            remedy="Set XDG_CACHE_HOME to a folder, or PRGE_NATIVE_LIBRARY to an engine built elsewhere.",
            code="cache-without-folder",
        ) from None
    return Path(base) / "prge" / name


def private_folder(folder: Path, *, empties: bool = True) -> Path:
    """Create a folder that only this user may access, or remove other users' access from an existing one.

    The content of a folder that others could write to isn't trustworthy: it is removed.

    Args:
        folder: A folder whose content can be recreated.
        empties: remove untrusted content; false if the caller checks the subfolders one by one.

    Raises:
        EngineError: the folder is another user's, or others can still write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:  # the next access to the folder reports the problem
        return folder
    if not hasattr(os, "geteuid"):
        return folder
    if status.st_uid == os.geteuid():
        if empties and status.st_mode & _OTHERS_WRITE:
            _empty(folder)
        elif status.st_mode & 0o077:
            with suppress(OSError):
                folder.chmod(0o700)
        status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & _OTHERS_WRITE:
        raise EngineError(
            f"Other users can write to {folder}, and code from there is executed "
            f"(its owner is user {status.st_uid}, its mode {stat.S_IMODE(status.st_mode):o}).",
            remedy="Remove it, or let XDG_CACHE_HOME name a folder of your own.",
            code="cache-not-private",
        )
    return folder


def _empty(folder: Path) -> None:
    """Replace a folder that others could write to by a new, private one."""
    untrusted = folder.with_name(f".{folder.name}.untrusted-{os.getpid()}")
    try:
        with suppress(FileNotFoundError):  # another process has just moved it
            folder.rename(untrusted)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from None
    shutil.rmtree(untrusted, ignore_errors=True)  # other users' subfolders may remain there
