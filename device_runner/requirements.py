"""Outcomes of checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Outcome of one check: `state` is ok, warn or missing; `remedy` is empty if there is nothing to do."""

    name: str
    state: str
    found: str
    remedy: str = ""
    value: float | str | None = None
    """What was found as one figure or name, where programs ask for it."""
