"""Settings that servers share: where to listen, and the key without which nobody may ask."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prge.errors import ConfigError, shown
from prge.files.documents import DocumentError, read_document
from prge.host.regular_files import warn_of_shared_key
from prge.verbs.inputs import InputFile

if TYPE_CHECKING:
    from device_runner.serving.access import Access

KEY = "PRGE_API_KEY"
_HOST = re.compile(r"\*|\[[0-9a-f:.]+\]|[a-z0-9._-]+", re.IGNORECASE)
MOST_KEY_BYTES = 4096
_REMEDY = f"give --api-key-file FILE, or set {KEY}"


@dataclass(frozen=True, kw_only=True)
class ListenFlags:
    """Where to listen, and who may ask."""

    host: str = "127.0.0.1"
    """Address to listen at; others than this machine reach 0.0.0.0 or ::, which needs an API key."""
    port: int = 8000
    """Port to listen at; 0: a free one. It is printed."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Further names that clients may call the server by, such as a proxy's; *: any, and so pages of the web
    whose names lead here. Known are localhost, --host and, where others may ask, the machine's own name and
    addresses as numbers."""
    api_key_file: InputFile | None = None
    """File with the API keys that clients may send, one a line. Requests share cached prompts only with those
    of the same key. Default: the environment's PRGE_API_KEY; without that, any program of this machine may
    ask."""
    insecure: bool = False
    """Instead of an API key: anyone who reaches the address may ask. To try things out."""

    def access(self, keys: tuple[str, ...], is_reached_by_others: bool) -> Access:
        """Who may ask.

        Args:
            keys: of which clients must send one; empty: none is needed.
            is_reached_by_others: whether other machines reach the address.

        Raises:
            ConfigError: the server would be open to others by mistake.
        """
        from device_runner.serving.access import Access, names_of_machine

        self._check_keys(keys, is_reached_by_others)
        # Addresses are no names: those of this machine alone are known, others where others may ask.
        given = [*self.allowed_hosts, *([self.host] if re.search("[a-z]", self.host, re.IGNORECASE) else [])]
        names = {name.lower() for name in given}
        if is_reached_by_others:
            names |= names_of_machine()
        return Access(keys, frozenset(names), by_address=is_reached_by_others)

    def _check_keys(self, keys: tuple[str, ...], is_reached_by_others: bool) -> None:
        problems = [
            f"--allowed-hosts has {shown(name)}, must be a name without scheme and port, or *"
            for name in self.allowed_hosts
            if not _HOST.fullmatch(name)
        ]
        if self.insecure and keys:
            problems.append("give an API key or --insecure, and not both")
        if is_reached_by_others and not keys and not self.insecure:
            problems.append(f"--host {self.host} lets other machines ask, and there is no API key")
        if problems:
            raise ConfigError(
                "these settings can't be used:",
                problems,
                remedy=f"{_REMEDY}; with --insecure anyone may ask",
                code="settings-unusable",
            )


def refuse_key(argv: Sequence[str]) -> None:
    """Refuse a key among the words of a command; raises ConfigError."""
    if any(word.partition("=")[0].replace("_", "-") == "--api-key" for word in argv):
        raise ConfigError(
            "a setting can't be used:",
            ["--api-key shows the key to everybody who can list processes"],
            remedy=_REMEDY,
            code="api-key-in-command",
        )


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of which clients must send one, one a line: a file's, else the environment's, else none.

    Raises:
        ConfigError: the file can't be read, or a line of it is no key.
    """
    if path is None and KEY not in os.environ:
        return ()
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
                "there is no API key:",
                [f"{path} can't be read: {why}"],
                remedy=remedy,
                code="file-unreadable",
            ) from None
    keys = tuple(filter(None, map(str.strip, key.splitlines())))
    if not keys or not all(re.fullmatch("[!-~]+", each) for each in keys):
        problem = "has characters that aren't printable ASCII, or spaces" if keys else "is empty"
        raise ConfigError(
            "there is no API key:", [f"{where} {problem}"], remedy=remedy, code="api-key-unusable"
        )
    return keys
