"""Safe opening of files in folders that other users may write to: only regular files, without waiting.

Following a link could overwrite its target, opening a pipe could block, and reading a device may never end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO, cast

from prge.errors import escape_control
from prge.system.terminal import best_effort

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FILE_TYPES = {
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
    """Open a regular file in a binary mode as `open` does; refuse links, folders, pipes, sockets and devices.

    Args:
        path: the file; a writing mode creates it.
        mode: a binary mode of `open`.
        buffering: the argument `buffering` of `open`.
        follow: accept a link to a regular file.
        rights: mode of a created file, before the user's umask is applied.

    Raises:
        OSError: the path isn't a regular file, or `open` fails.
    """

    def opener(name: str, flags: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            # Checked before opening, too: opening some devices has effects.
            _check_regular(path, os.stat(name) if follow else os.lstat(name))
        descriptor = os.open(name, flags | _NONBLOCK | (0 if follow else _NOFOLLOW), rights)
        try:
            _check_regular(path, os.fstat(descriptor))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return cast(BinaryIO, open(path, mode, buffering=buffering, opener=opener))


def read_regular(path: Path, *, follow: bool = False) -> bytes:
    """Return the content of a regular file; raises OSError like `open_regular`."""
    with open_regular(path, "rb", follow=follow) as stream:
        return stream.read()


def warn_if_key_is_shared(path: Path) -> None:
    """Print a warning if a file with a key is readable by others than its owner."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        line = f"warning: others may read the key in {path}, whose mode is {mode:04o}: chmod 600 {path}"
        with best_effort(sys.stderr):
            print(escape_control(line), file=sys.stderr, flush=True)


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        file_type = _FILE_TYPES.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {file_type}, not a file", str(path))
