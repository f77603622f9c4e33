"""Refusals as tests expect them: by their code, and not by their words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prge.errors import Refusal


@contextmanager
def refusal(*codes: str) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    """Expect that what stands inside is refused with the code, or with one of several."""
    with pytest.raises(Refusal) as caught:
        yield caught
    assert caught.value.code in codes, f"{caught.value.code}: {caught.value}"
