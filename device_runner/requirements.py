"""Outcomes of checks, and the versions of packages that prge asks for."""

from __future__ import annotations

import importlib.metadata
import re
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


def requirement(name: str) -> str:
    """What prge asks for by that name, such as `torch==2.13.0`; the bare name if that can't be told."""
    try:
        required = importlib.metadata.requires("prge") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    for line in required:
        wanted = line.partition(";")[0].strip()
        if _plain_name(re.split(r"[\[<>=!~ ]", wanted)[0]) == _plain_name(name):
            return wanted
    return name


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
