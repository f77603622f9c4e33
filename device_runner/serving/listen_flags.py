"""Settings that servers share: where to listen, and the key without which nobody may ask."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prge.errors import ConfigError
from prge.files.documents import DocumentError, read_document
from prge.host.regular_files import warn_of_shared_key

KEY = "PRGE_API_KEY"
MOST_KEY_BYTES = 4096
_REMEDY = f"give --api-key-file FILE, or set {KEY}"


@dataclass(frozen=True, kw_only=True)
class ListenFlags:
    """Where to listen, and who may ask."""

    host: str = "127.0.0.1"
    """Address to listen at; others than this machine reach 0.0.0.0 or ::, which needs an API key."""
    port: int = 8000
    """Port to listen at; 0: a free one. It is printed."""
    api_key_file: Path | None = None
    """File with what clients must send as their API key. Default: the environment's PRGE_API_KEY; without
    that, any program of this machine may ask."""
    insecure: bool = False
    """Instead of an API key: anyone who reaches the address may ask. To try things out."""

    def check_key(self, key: str | None, is_reached_by_others: bool) -> None:
        """Refuse to be open to others by mistake; raises ConfigError."""
        problems = []
        if self.insecure and key is not None:
            problems.append("give an API key or --insecure, and not both")
        if is_reached_by_others and key is None and not self.insecure:
            problems.append(f"--host {self.host} lets other machines ask, and there is no API key")
        if problems:
            raise ConfigError(
                "these settings can't be used:", problems, remedy=f"{_REMEDY}; with --insecure anyone may ask"
            )


def refuse_key(argv: Sequence[str]) -> None:
    """Refuse a key among the words of a command; raises ConfigError."""
    if any(word.partition("=")[0].replace("_", "-") == "--api-key" for word in argv):
        raise ConfigError(
            "a setting can't be used:",
            ["--api-key shows the key to everybody who can list processes"],
            remedy=_REMEDY,
        )


def read_key(path: Path | None) -> str | None:
    """The key that clients must send: a file's, else the environment's, else none.

    Raises:
        ConfigError: the file can't be read, or what is there is no key.
    """
    if path is None and KEY not in os.environ:
        return None
    where, key, remedy = KEY, os.environ.get(KEY, ""), f"set it, or unset {KEY} to serve without a key"
    if path is not None:
        made = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        where, remedy = str(path), f"(umask 077; {made} > {path})"
        warn_of_shared_key(path)
        try:
            key = read_document(path, MOST_KEY_BYTES).decode("ascii", "replace")
        except (OSError, DocumentError) as error:
            why = getattr(error, "strerror", None) or error
            remedy = f"give a file, or set {KEY}"
            raise ConfigError(
                "there is no API key:", [f"{path} can't be read: {why}"], remedy=remedy
            ) from None
    key = key.strip()
    if not re.fullmatch("[!-~]+", key):
        problem = "has characters that aren't printable ASCII, or spaces" if key else "is empty"
        raise ConfigError("there is no API key:", [f"{where} {problem}"], remedy=remedy)
    return key
