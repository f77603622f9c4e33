"""Results of checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Result of one check, in words for people and as a value for programs.

    Attributes:
        name: the name of the check.
        state: ok, warn or missing.
        detail: the result in words.
        remedy: what to do; empty if nothing needs to be done.
        value: the result as a number or name.
    """

    name: str
    state: str
    detail: str
    remedy: str = ""
    value: float | str | None = None
