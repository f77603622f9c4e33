"""Folders and files that are whole or absent: written beside their place, flushed to storage, renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prge.errors import RunError
from prge.host.regular_files import open_regular

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to storage, so that a rename in it outlives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that can't flush a folder
            raise
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to fill; it becomes `folder` when the block ends, and vanishes if it fails.

    Whoever looks at `folder`, at any instant and after any crash, sees all of the old or all of the new
    content. A killed process leaves a hidden sibling `.<name>.<process>-<random>.partial`; the next call for
    the same folder removes it.

    Raises:
        RunError: `folder` exists and `overwrite` is false; the storage is full, read-only or refuses.
    """
    folder = Path(folder)
    if not overwrite and (folder.exists() or folder.is_symlink()):
        raise RunError(
            f"{folder} exists already",
            remedy="give another folder, or allow overwriting it",
            code="folder-exists",
        )
    partial: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        prefix = f".{folder.name}.{os.getpid()}-"
        partial = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=folder.parent))
        file_mode, folder_mode = _usual_modes()
        partial.chmod(folder_mode)
        yield partial
        for directory, _, names in os.walk(partial):
            Path(directory).chmod(folder_mode)
            for name in names:
                # Some libraries write files that only their owner reads.
                (Path(directory) / name).chmod(file_mode)
                with (Path(directory) / name).open("rb") as stream:
                    os.fsync(stream.fileno())
            flush_folder(Path(directory))
        _put_in_place(partial, folder, overwrite)
        flush_folder(folder.parent)
    except OSError as error:
        if (
            error.errno is None
        ):  # not the operating system's: libraries raise OSError for reasons of their own
            raise
        raise storage_error(folder, error) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def write_file(path: Path, content: bytes, rights: int | None = None) -> None:
    """Write a file whole or not at all, over an older one if there is one.

    Args:
        path: of the file.
        content: of the file.
        rights: who may read and write it; by default as the user's umask has it.

    Raises:
        RunError: the storage is full, read-only or refuses.
    """
    # One name for all processes: what a killed one left is overwritten by the next.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open_regular(partial, "wb", rights=0o666 if rights is None else 0o600) as stream:
            if rights is not None:
                os.fchmod(stream.fileno(), rights)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
        flush_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise storage_error(path, error) from None


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user named, whole or not at all, over an older one, whose mode it keeps.

    Other than `write_file` it goes through links, makes the file's folder, and writes into pipes and devices.

    Raises:
        RunError: the storage is full, read-only or refuses.
    """
    try:
        there = os.stat(path) if os.path.exists(path) else None
        if there is not None and not stat.S_ISREG(there.st_mode):
            with open(path, "wb") as stream:
                stream.write(content)
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(path, error) from None
    write_file(target, content, None if there is None else stat.S_IMODE(there.st_mode))


def check_file(path: Path) -> None:
    """See whether a file can be written in a place, where one may be already. Nothing changes there.

    It isn't opened: that would make it, or wait for whoever reads a pipe.

    Raises:
        RunError: it is a folder, or can't be written.
    """
    try:
        there = os.stat(path) if os.path.exists(path) else None
        if there is not None and stat.S_ISDIR(there.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if there is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if there is None or stat.S_ISREG(there.st_mode):
            _check_room_for_names(Path(os.path.realpath(path)).parent)
    except OSError as error:
        raise storage_error(path, error) from None


def check_place(folder: Path, needed: int = 0) -> None:
    """See in an instant whether files can be made in a folder, which may not be there yet. Nothing stays.

    Args:
        folder: of the files.
        needed: bytes that they will take.

    Raises:
        RunError: the storage is read-only, refuses, or has less room.
    """
    try:
        free = _check_room_for_names(Path(os.path.realpath(folder)))
    except OSError as error:
        raise storage_error(folder, error) from None
    if needed > free:
        raise RunError(
            f"{folder} has too little room: about {needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB "
            "are free",
            remedy="free some storage, or write to another place",
            code="storage-full",
        )


def _check_room_for_names(folder: Path) -> int:
    """Raise OSError unless files can be made in a folder or in the nearest one that is there; free bytes."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    # A file without a name, which no other process sees.
    with tempfile.TemporaryFile(dir=there):
        return shutil.disk_usage(there).free


def storage_error(path: Path, error: OSError) -> RunError:
    """The RunError for a write that the operating system refused."""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        code, remedy = "storage-full", "free some storage, or write to another place"
    elif error.errno in _REFUSED:
        code, remedy = "write-refused", "check the rights on it, or write to another place"
    else:
        code, remedy = "write-failed", "check the path and the storage"
    return RunError(f"{path} can't be written: {reason}", remedy=remedy, code=code)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left while they wrote this folder."""
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*-*.partial"):
        process = leftover.name[len(folder.name) + 2 :].split("-")[0]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            shutil.rmtree(leftover, ignore_errors=True)
        except (ValueError, OSError):
            continue


def _usual_modes() -> tuple[int, int]:
    """What a new file and a new folder may be used for, as the user's umask has it."""
    mask = os.umask(0o077)  # the only way to read it is to set it
    os.umask(mask)
    return 0o666 & ~mask, 0o777 & ~mask


def _put_in_place(partial: Path, folder: Path, overwrite: bool) -> None:
    """Rename `partial` to `folder`; an existing folder is exchanged in one system call where there is one."""
    if not folder.exists():
        os.rename(partial, folder)
        return
    if not overwrite:  # made by someone else since the first look
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    if _exchange(partial, folder):
        return
    # Without an exchange a crash between the two renames leaves the old content under its hidden name.
    aside = folder.parent / f".{folder.name}.replaced"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    os.rename(partial, folder)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names with Linux's renameat2; False where the C library or the file system lacks it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    old, new = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, old, _AT_FDCWD, new, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):  # also: filtered by a sandbox
        return False
    raise OSError(code, os.strerror(code))
