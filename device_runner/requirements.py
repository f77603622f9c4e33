"""Results of checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Result of one check: `state` is ok, warn or missing; `remedy` is empty if nothing needs to be done."""

    name: str
    state: str
    found: str
    remedy: str = ""
    value: float | str | None = None
    """The result as a number or name, for programs."""
