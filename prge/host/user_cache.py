"""Folders of the user's cache: what is lost there is made again.

    ~/.cache/prge/native     the engine's interface, compiled
    ~/.cache/prge/packed     packed weights
    ~/.cache/prge/programs   programs of earlier exports, without weights
    ~/.cache/prge/android    packages for a phone
    ~/.cache/prge/bench      bundles that phones are measured with

XDG_CACHE_HOME moves them. They are their owner's alone: who writes to one chooses code that runs.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from prge.errors import EngineError
from prge.host.atomic import storage_error

NATIVE, PACKED, PROGRAMS = "native", "packed", "programs"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_cache(name: str) -> Path:
    """A folder of the cache to read and write, made unless it is there or can't be.

    Raises:
        EngineError: XDG_CACHE_HOME is not set and the user has no home, or the folder is another user's.
    """
    folder = cache_path(name)
    private_folder(folder.parent, empties=False)
    return private_folder(folder)


def cache_path(name: str) -> Path:
    """Where a folder of the cache is or would be, to look at; raises EngineError as `user_cache`."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise EngineError(
            f"there is no place for the cache: {error}",
            remedy="let XDG_CACHE_HOME name a folder, or PRGE_NATIVE_LIBRARY an engine built elsewhere",
            code="cache-without-folder",
        ) from None
    return Path(base) / "prge" / name


def private_folder(folder: Path, *, empties: bool = True) -> Path:
    """Make a folder that only this user may use, or close one that is there to others.

    Whatever lies in one that others could write to may be theirs: it is removed, to be made again.

    Args:
        folder: a folder whose content can be made again.
        empties: False where all that it holds is looked at by itself.

    Raises:
        EngineError: it is another user's, or stays open to others.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError:  # who reads or writes there tells what is wrong
        return folder
    if not hasattr(os, "geteuid"):
        return folder
    if facts.st_uid == os.geteuid():
        if empties and facts.st_mode & _OTHERS_WRITE:
            _empty(folder)
        elif facts.st_mode & 0o077:
            with suppress(OSError):
                folder.chmod(0o700)
        facts = folder.stat()
    if facts.st_uid not in (os.geteuid(), 0) or facts.st_mode & _OTHERS_WRITE:
        raise EngineError(
            f"other users may write to {folder}, and what lies there is run "
            f"(its owner is user {facts.st_uid}, its mode {stat.S_IMODE(facts.st_mode):o})",
            remedy="remove it, or let XDG_CACHE_HOME name a folder of your own",
            code="cache-not-private",
        )
    return folder


def _empty(folder: Path) -> None:
    """Put a new folder in the place of one that others could write to; it is never both closed and theirs."""
    aside = folder.with_name(f".{folder.name}.untrusted-{os.getpid()}")
    try:
        with suppress(FileNotFoundError):  # another process has just done this
            folder.rename(aside)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from None
    shutil.rmtree(aside, ignore_errors=True)  # folders of others in it may stay, out of the way
