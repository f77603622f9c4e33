"""What the first tier leaves to `scripts/test.sh --all`."""

from __future__ import annotations

from typing import Any

import pytest


def second_tier(*cases: Any) -> list[Any]:
    """Cases of a parametrized test that only run with everything."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.whole)
        for case in cases
    ]
