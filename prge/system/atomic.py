"""Atomic writes: files and folders are written under a temporary name, flushed to storage, then renamed."""

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
from prge.system.regular_files import open_regular

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to storage, so that a rename in it survives a loss of power."""
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
    """Yield an empty temporary folder, which becomes `folder` when the block ends without an error.

    At any instant, and after any crash, `folder` has either all of its old or all of its new content. If the
    block raises, the temporary folder is removed. A killed process leaves a hidden sibling
    `.<name>.<process>-<random>.partial`, which the next call for the same folder removes.

    Raises:
        RunError: `folder` exists and `overwrite` is false; or the storage is full, read-only or refuses the
            write.
    """
    folder = Path(folder)
    if not overwrite and (folder.exists() or folder.is_symlink()):
        raise RunError(
            f"{folder} exists already.",
            remedy="Give another folder, or allow overwriting it.",
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
                # Some libraries write files that only their owner may read.
                (Path(directory) / name).chmod(file_mode)
                with (Path(directory) / name).open("rb") as stream:
                    os.fsync(stream.fileno())
            flush_folder(Path(directory))
        _rename_or_exchange(partial, folder, overwrite)
        flush_folder(folder.parent)
    except OSError as error:
        if error.errno is None:  # libraries raise OSError without an errno for reasons of their own
            raise
        raise storage_error(folder, error) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def write_file(path: Path, content: bytes, rights: int | None = None) -> None:
    """Write a file atomically, replacing an existing one.

    Args:
        path: the file.
        content: its new content.
        rights: its mode; by default, the mode that the user's umask gives to a new file.

    Raises:
        RunError: the storage is full, read-only or refuses the write.
    """
    # All processes use one temporary name, so that a killed process's leftover is overwritten.
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
    """Write a file that the user named, atomically; an existing file keeps its mode.

    Unlike `write_file`, this follows links, creates the parent folder, and writes into pipes and devices.

    Raises:
        RunError: the storage is full, read-only or refuses the write.
    """
    try:
        status = os.stat(path) if os.path.exists(path) else None
        if status is not None and not stat.S_ISREG(status.st_mode):
            with open(path, "wb") as stream:
                stream.write(content)
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(path, error) from None
    write_file(target, content, None if status is None else stat.S_IMODE(status.st_mode))


def check_file(path: Path) -> None:
    """Check that a file, existing or not, can be written at a path; changes nothing.

    The file isn't opened, because opening creates a file and waits for the reader of a pipe.

    Raises:
        RunError: the path is a folder, or can't be written.
    """
    try:
        status = os.stat(path) if os.path.exists(path) else None
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if status is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if status is None or stat.S_ISREG(status.st_mode):
            _check_can_create(Path(os.path.realpath(path)).parent)
    except OSError as error:
        raise storage_error(path, error) from None


def check_writable_folder(folder: Path, required_bytes: int = 0) -> None:
    """Check that files can be created in a folder, which may not exist yet; leaves nothing behind.

    Args:
        folder: the folder.
        required_bytes: free storage that is required.

    Raises:
        RunError: the storage is read-only, refuses new files, or has less free space.
    """
    try:
        free = _check_can_create(Path(os.path.realpath(folder)))
    except OSError as error:
        raise storage_error(folder, error) from None
    if required_bytes > free:
        raise RunError(
            f"{folder} has too little room: about {required_bytes / 1e6:,.0f} MB are needed, "
            f"{free / 1e6:,.0f} MB are free.",
            remedy="Free some storage, or write to another place.",
            code="storage-full",
        )


def _check_can_create(folder: Path) -> int:
    """Return the free bytes of a folder or its nearest existing parent; raise OSError if not writable."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    # A temporary file without a name is invisible to other processes.
    with tempfile.TemporaryFile(dir=existing):
        return shutil.disk_usage(existing).free


def storage_error(path: Path, error: OSError) -> RunError:
    """Return the RunError for a write that the operating system refused."""
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        code, remedy = "storage-full", "Free some storage, or write to another place."
    elif error.errno in _REFUSED:
        code, remedy = "write-refused", "Check its permissions, or write to another place."
    else:
        code, remedy = "write-failed", "Check the path and the storage."
    return RunError(f"{path} can't be written: {reason}", remedy=remedy, code=code)


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders that killed processes left while they wrote this folder."""
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*-*.partial"):
        process = leftover.name[len(folder.name) + 2 :].split("-")[0]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            shutil.rmtree(leftover, ignore_errors=True)
        except (ValueError, OSError):
            continue


def _usual_modes() -> tuple[int, int]:
    """Return the modes of a new file and of a new folder under the user's umask."""
    mask = os.umask(0o077)  # the only way to read it is to set it
    os.umask(mask)
    return 0o666 & ~mask, 0o777 & ~mask


def _rename_or_exchange(partial: Path, folder: Path, overwrite: bool) -> None:
    """Rename `partial` to `folder`; exchange it with an existing folder in one system call if possible."""
    if not folder.exists():
        os.rename(partial, folder)
        return
    if not overwrite:  # another process created it since `new_folder` checked
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    if _exchange(partial, folder):
        return
    # Without an exchange, a crash between the two renames leaves the old content under this hidden name.
    replaced = folder.parent / f".{folder.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    os.rename(folder, replaced)
    os.rename(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths with Linux's renameat2; return False if the C library or the file system lacks it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    old, new = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, old, _AT_FDCWD, new, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    # A sandbox may filter the system call with EPERM.
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code))
