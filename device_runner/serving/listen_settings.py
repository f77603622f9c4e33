"""Settings that servers share: the address to listen at, and the API keys."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prge.cli.inputs import InputFile
from prge.errors import ConfigError, format_value
from prge.formats.documents import DocumentError, read_document
from prge.system.regular_files import warn_if_key_is_shared

if TYPE_CHECKING:
    from device_runner.serving.access import Access

KEY = "PRGE_API_KEY"
_HOST = re.compile(r"\*|\[[0-9a-f:.]+\]|[a-z0-9._-]+", re.IGNORECASE)
MAX_KEY_BYTES = 4096
_REMEDY = f"Give --api-key-file FILE, or set {KEY}"


@dataclass(frozen=True, kw_only=True)
class ListenFlags:
    """The address to listen at, and who may send requests."""

    host: str = "127.0.0.1"
    """Address to listen at; other machines can reach 0.0.0.0 or ::, which requires an API key."""
    port: int = 8000
    """Port to listen at; 0: a free one, which is printed."""
    allowed_hosts: list[str] = field(default_factory=list)
    """More host names that clients may use for the server, such as a proxy's; *: any name, which allows web
    pages of domains that resolve to this machine. Always allowed are localhost, --host and, if other machines
    may connect, this machine's name and numeric addresses."""
    api_key_file: InputFile | None = None
    """File with the accepted API keys, one per line. Requests share cached prompts only with requests of the
    same key. Default: the environment variable PRGE_API_KEY; without that, any program on this machine may
    send requests."""
    insecure: bool = False
    """Serve without an API key; anyone who reaches the address may send requests. For trying things out."""

    def access(self, keys: tuple[str, ...], is_reached_by_others: bool) -> Access:
        """Return who may send requests.

        Args:
            keys: the keys of which clients must send one; empty: none is needed.
            is_reached_by_others: whether other machines can reach the address.

        Raises:
            ConfigError: the server would be open to others by mistake.
        """
        from device_runner.serving.access import Access, machine_names

        self._check_keys(keys, is_reached_by_others)
        # Numeric addresses are checked by Access.by_address.
        named_hosts = [
            *self.allowed_hosts,
            *([self.host] if re.search("[a-z]", self.host, re.IGNORECASE) else []),
        ]
        names = {name.lower() for name in named_hosts}
        if is_reached_by_others:
            names |= machine_names()
        return Access(keys, frozenset(names), by_address=is_reached_by_others)

    def _check_keys(self, keys: tuple[str, ...], is_reached_by_others: bool) -> None:
        problems = [
            f"--allowed-hosts has {format_value(name)}, must be a name without scheme and port, or *"
            for name in self.allowed_hosts
            if not _HOST.fullmatch(name)
        ]
        if self.insecure and keys:
            problems.append("give an API key or --insecure, and not both")
        if is_reached_by_others and not keys and not self.insecure:
            problems.append(f"--host {self.host} lets other machines send requests, but there is no API key")
        if problems:
            raise ConfigError(
                "These settings can't be used:",
                problems,
                remedy=f"{_REMEDY}; with --insecure, anyone may send requests.",
                code="settings-unusable",
            )


def refuse_api_key_flag(argv: Sequence[str]) -> None:
    """Refuse an API key on the command line; raises ConfigError."""
    if any(word.partition("=")[0].replace("_", "-") == "--api-key" for word in argv):
        raise ConfigError(
            "A setting can't be used:",
            ["--api-key would show the key to everyone who can list processes"],
            remedy=_REMEDY,
            code="api-key-in-command",
        )


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """Return the accepted API keys, one per line of a file or the environment variable; empty without both.

    Raises:
        ConfigError: the file can't be read, or one of its lines is not a key.
    """
    if path is None and KEY not in os.environ:
        return ()
    where, key, remedy = KEY, os.environ.get(KEY, ""), f"Set it, or unset {KEY} to serve without a key."
    if path is not None:
        command = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        where, remedy = str(path), f"(umask 077; {command} > {path})"
        warn_if_key_is_shared(path)
        try:
            key = read_document(path, MAX_KEY_BYTES).decode("ascii", "replace")
        except (OSError, DocumentError) as error:
            why = getattr(error, "strerror", None) or error
            remedy = f"Give a file, or set {KEY}."
            raise ConfigError(
                "There is no usable API key:",
                [f"{path} can't be read: {why}"],
                remedy=remedy,
                code="file-unreadable",
            ) from None
    keys = tuple(filter(None, map(str.strip, key.splitlines())))
    if not keys or not all(re.fullmatch("[!-~]+", each) for each in keys):
        problem = "has spaces or characters that are not printable ASCII" if keys else "is empty"
        raise ConfigError(
            "There is no usable API key:", [f"{where} {problem}"], remedy=remedy, code="api-key-unusable"
        )
    return keys
