"""Settings that a folder holds, such as config.yaml of a run: which of the paths in them are followed.

A folder may be somebody else's, and its settings may name files of this machine: rows that would be trained
on, files that would be written. A path in them is followed if it lies inside the folder, after links are
resolved; if the user names it again on the command line; or if the settings are the user's own: prge signs
what it writes with a key that no folder holds, so that its settings are known wherever the folder goes, and
changed ones aren't. All other paths are refused.

The key is ~/.config/prge/key, or prge/key in the folder that XDG_CONFIG_HOME names. It is made when first
needed, and only its owner reads it. Without a place for it only the process that wrote settings knows them.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from prge.errors import RunError
from prge.host.atomic import write_file
from prge.host.regular_files import read_regular, warn_of_shared_key

_BEGIN = b"# signed by prge: "
_SIGNATURE = re.compile(rb"(?:(?<=\n)|\A)" + re.escape(_BEGIN) + rb"([0-9a-f]{64})\n\Z")
_KEY = re.compile(rb"[0-9a-f]{64}\n?")
# Of the user's key, in the folder of configurations.
KEY = Path("prge", "key")


def new_key() -> bytes:
    """A random key, as its file holds it but for the line break."""
    return secrets.token_hex(32).encode()


def parse_key(content: bytes) -> bytes | None:
    """The key of a file's content; None where it is none."""
    return content.strip() if _KEY.fullmatch(content) else None


_process_key = new_key()


def key_path() -> Path:
    """Where the user's key is or would be; raises RuntimeError where there is no home."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / KEY


def write_settings(path: Path, text: str) -> None:
    """Write settings into a folder as the user's own; raises RunError as `write_file`."""
    write_file(path, sign(text, path.name))


def sign(text: str, name: str, key: bytes | None = None) -> bytes:
    """Settings in YAML with a signature as the last line, a comment.

    Args:
        text: the settings.
        name: of their file; elsewhere the signature says nothing.
        key: of whoever will read them; default: the user's.
    """
    content = text.encode()
    return content + _BEGIN + _signature(content, name, key or _own_key(make=True)) + b"\n"


def holds_own(path: Path) -> bool:
    """Whether this user's prge wrote a settings file, and nobody has changed it since."""
    try:
        return is_own(read_regular(path), path.name)
    except OSError:
        return False


def is_own(content: bytes, name: str) -> bool:
    """Whether this user's prge wrote the bytes of a settings file, and nobody has changed them since.

    Args:
        content: of their file.
        name: of their file.
    """
    match = _SIGNATURE.search(content)
    if match is None:
        return False
    return hmac.compare_digest(match[1], _signature(content[: match.start()], name, _own_key(make=False)))


def leads_out(folder: Path, value: str, is_written: bool = False) -> bool:
    """Whether a value of a folder's settings names a place outside of that folder.

    A word without a slash that no file here is called is the name of something else, such as a task.

    Args:
        folder: that holds the settings.
        value: a path, or a text that may be one.
        is_written: whether a file or folder would be made there.
    """
    with suppress(OSError, ValueError, RuntimeError):  # links in a circle, NUL
        if Path(os.path.realpath(value)).is_relative_to(os.path.realpath(folder)):
            return False
        return is_written or os.sep in value or value in (".", "..") or os.path.lexists(value)
    return True


def check_links(folder: Path) -> None:
    """Refuse a folder, perhaps somebody else's, that holds a link to a place outside of it.

    A snapshot in a cache of Hugging Face's hub may have links to the other files of its repository.

    Raises:
        RunError: it has such a link.
    """
    place = Path(os.path.realpath(folder))
    within = place.parent.parent if place.parent.name == "snapshots" else place
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            if os.path.islink(path) and leads_out(within, path, is_written=True):
                raise RunError(
                    f"{path} is a link to {os.readlink(path)}, outside of {folder}",
                    remedy="put what it leads to in its place, or remove it",
                    code="link-outside",
                )


def _signature(content: bytes, name: str, key: bytes) -> bytes:
    return hmac.new(key, name.encode() + b"\0" + content, "sha256").hexdigest().encode()


def _own_key(make: bool) -> bytes:
    """The user's key; that of this process where there is none, and it is not to be or can't be made."""
    with suppress(OSError, RuntimeError, RunError):
        path = key_path()
        with suppress(FileNotFoundError):
            return _read_key(path)
        if make:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = path.with_name(f".key.{os.getpid()}-{secrets.token_hex(4)}.partial")
            write_file(partial, new_key() + b"\n", 0o600)
            try:
                os.link(partial, path)  # two processes that begin at once have one key
            except FileExistsError:
                pass
            except OSError:  # a file system, or an Android, without hard links
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
            return _read_key(path)
    return _process_key


def _read_key(path: Path) -> bytes:
    """A key; that of this process where the file holds none."""
    warn_of_shared_key(path)
    return parse_key(read_regular(path)) or _process_key
