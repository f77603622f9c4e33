"""Marks of the second tier of tests, which `scripts/test.sh --all` runs."""

from __future__ import annotations

from typing import Any

import pytest


def second_tier(*cases: Any) -> list[Any]:
    """Return parametrized cases that run only with all tests."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.whole)
        for case in cases
    ]
