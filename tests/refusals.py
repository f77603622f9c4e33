"""Expect errors by class and code instead of by their words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar, cast

import pytest

from prge.errors import Refusal

_Error = TypeVar("_Error", bound=Exception)


def raises(
    error: type[_Error], *codes: str, containing: str = ""
) -> AbstractContextManager[pytest.ExceptionInfo[_Error], bool]:
    """Expect an error of a class with the code, or with one of several.

    Args:
        error: class of a PrgeError or of an exception that becomes one, such as RowError.
        codes: allowed codes.
        containing: value that the message must contain, such as a path or a number.
    """
    # A generator's manager has a type that hides that code after the block is reached.
    return cast(
        "AbstractContextManager[pytest.ExceptionInfo[_Error], bool]", _raises(error, codes, containing)
    )


@contextmanager
def _raises(
    error: type[_Error], codes: tuple[str, ...], containing: str
) -> Iterator[pytest.ExceptionInfo[_Error]]:
    with pytest.raises(error) as caught:
        yield caught
    code = getattr(caught.value, "code", "")
    assert code in codes, f"{code}: {caught.value}"
    assert containing in str(caught.value)


def refusal(*codes: str) -> AbstractContextManager[pytest.ExceptionInfo[Refusal], bool]:
    """Expect a Refusal with the code, or with one of several."""
    return raises(Refusal, *codes)
