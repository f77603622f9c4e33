"""Opening files in folders that others may write to: regular files alone, at once.

A link in a run folder would have its target overwritten, a pipe would be waited for, a device never ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO, cast

from prge.errors import visible
from prge.system.terminal import best_effort

_NEVER_WAIT = getattr(os, "O_NONBLOCK", 0)
_NEVER_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(
    path: Path, mode: str, *, buffering: int = -1, follow: bool = False, rights: int = 0o666
) -> BinaryIO:
    """Open a file as `open` does in a binary mode, but neither a link nor what is no file of bytes.

    Args:
        path: the file; a writing mode makes it.
        mode: of `open`.
        buffering: of `open`.
        follow: whether a link to a regular file will do.
        rights: of a file that is made, less what the user's umask takes.

    Raises:
        OSError: it is a link, a folder, a pipe, a socket or a device; or what `open` raises.
    """

    def opener(name: str, flags: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            # Looking comes first: some devices act when they are opened.
            _refuse_others(path, os.stat(name) if follow else os.lstat(name))
        descriptor = os.open(name, flags | _NEVER_WAIT | (0 if follow else _NEVER_FOLLOW), rights)
        try:
            _refuse_others(path, os.fstat(descriptor))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return cast(BinaryIO, open(path, mode, buffering=buffering, opener=opener))


def read_regular(path: Path, *, follow: bool = False) -> bytes:
    """The content of a file, opened by `open_regular`."""
    with open_regular(path, "rb", follow=follow) as stream:
        return stream.read()


def warn_if_key_is_shared(path: Path) -> None:
    """Print a line where others than its owner may read a file that holds a key."""
    with contextlib.suppress(OSError), best_effort(sys.stderr):
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            line = f"warning: others may read the key in {path}, whose mode is {mode:04o}: chmod 600 {path}"
            print(visible(line), file=sys.stderr, flush=True)


def _refuse_others(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        kind = _KINDS.get(stat.S_IFMT(facts.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
