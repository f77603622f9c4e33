"""Signed settings in folders, such as a run's config.yaml, and which paths in settings are trusted.

A folder can come from somebody else, and its settings can name files on this machine: rows to train on, or
files to write. A path in settings is used only if it is inside of the folder after resolving links, if the
user repeats it on the command line, or if the settings are the user's own. To recognize its own settings
wherever a folder is moved, prge signs them with a key that isn't stored in any folder. All other paths are
refused.

The key is ~/.config/prge/key, or prge/key in the folder that XDG_CONFIG_HOME names. It is created when it is
first needed, and only its owner can read it. If it can't be stored, settings are recognized only by the
process that wrote them.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from prge.errors import RunError
from prge.system.atomic import write_file
from prge.system.regular_files import read_regular, warn_if_key_is_shared

_BEGIN = b"# signed by prge: "
_SIGNATURE = re.compile(rb"(?:(?<=\n)|\A)" + re.escape(_BEGIN) + rb"([0-9a-f]{64})\n\Z")
_KEY = re.compile(rb"[0-9a-f]{64}\n?")
# Path of the user's key in the folder for configurations.
KEY = Path("prge", "key")


def new_key() -> bytes:
    """Return a new random key, as its file holds it without the line break."""
    return secrets.token_hex(32).encode()


def parse_key(content: bytes) -> bytes | None:
    """Return the key in the content of a file; None if it is invalid."""
    return content.strip() if _KEY.fullmatch(content) else None


_process_key = new_key()


def key_path() -> Path:
    """Return the path of the user's key; raises RuntimeError if there is no home directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / KEY


def write_settings(path: Path, text: str) -> None:
    """Write settings with the user's signature; raises RunError, see `write_file`."""
    write_file(path, sign(text, path.name))


def sign(text: str, name: str, key: bytes | None = None) -> bytes:
    """Return settings in YAML with a signature in a comment as the last line.

    Args:
        text: the settings.
        name: name of their file, for which alone the signature is valid.
        key: key of the reader; default: the user's key.
    """
    content = text.encode()
    return content + _BEGIN + _signature(content, name, key or _own_key(make=True)) + b"\n"


def is_signed_file(path: Path) -> bool:
    """Return whether a settings file has a valid signature of the user."""
    try:
        return has_own_signature(read_regular(path), path.name)
    except OSError:
        return False


def has_own_signature(content: bytes, name: str) -> bool:
    """Return whether the content of a settings file has a valid signature of the user.

    Args:
        content: content of the file.
        name: name of the file.
    """
    match = _SIGNATURE.search(content)
    if match is None:
        return False
    return hmac.compare_digest(match[1], _signature(content[: match.start()], name, _own_key(make=False)))


def is_outside(folder: Path, value: str, is_written: bool = False) -> bool:
    """Return whether a value of the settings in a folder is a path outside of that folder.

    A value without a slash that isn't the name of an existing file is taken for a name of something else,
    such as a task.

    Args:
        folder: folder of the settings.
        value: a path, or a text that may be one.
        is_written: whether a file or folder would be created there.
    """
    with suppress(OSError, ValueError, RuntimeError):  # circular links, NUL characters
        if Path(os.path.realpath(value)).is_relative_to(os.path.realpath(folder)):
            return False
        return is_written or os.sep in value or value in (".", "..") or os.path.lexists(value)
    return True


def check_links(folder: Path) -> None:
    """Raise RunError if a folder, which may be somebody else's, holds a link to a path outside of it.

    Links from a snapshot in the Hugging Face cache to other files of its repository are allowed.

    Raises:
        RunError: the folder has a link to the outside.
    """
    real_folder = Path(os.path.realpath(folder))
    is_snapshot = real_folder.parent.name == "snapshots"
    within = real_folder.parent.parent if is_snapshot else real_folder
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            if os.path.islink(path) and is_outside(within, path, is_written=True):
                raise RunError(
                    f"{path} is a link to {os.readlink(path)}, outside of {folder}.",
                    remedy="Put what it leads to in its place, or remove it.",
                    code="link-outside",
                )


def _signature(content: bytes, name: str, key: bytes) -> bytes:
    return hmac.new(key, name.encode() + b"\0" + content, "sha256").hexdigest().encode()


def _own_key(make: bool) -> bytes:
    """Return the user's key, creating it if `make` is set; the process's key if there is none."""
    with suppress(OSError, RuntimeError, RunError):
        path = key_path()
        with suppress(FileNotFoundError):
            return _read_key(path)
        if make:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = path.with_name(f".key.{os.getpid()}-{secrets.token_hex(4)}.partial")
            write_file(partial, new_key() + b"\n", 0o600)
            try:
                os.link(partial, path)  # if two processes start at once, both use the first one's key
            except FileExistsError:
                pass
            except OSError:  # a file system, or an Android, without hard links
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            return _read_key(path)
    return _process_key


def _read_key(path: Path) -> bytes:
    """Read a key; return the process's key if the file is invalid."""
    warn_if_key_is_shared(path)
    return parse_key(read_regular(path)) or _process_key
