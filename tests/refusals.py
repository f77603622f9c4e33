"""Context managers by which tests expect an error of a class with a code, whatever its message says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar, cast

import pytest

from prge.errors import Refusal

_Error = TypeVar("_Error", bound=Exception)


def raises(
    error: type[_Error], *codes: str, saying: str = ""
) -> AbstractContextManager[pytest.ExceptionInfo[_Error], bool]:
    """Expect an error of this class with the code, or with one of several.

    Args:
        error: the class, of a PrgeError or of what becomes one, such as a RowError.
        codes: one of which it has.
        saying: a value that the message has to show, such as a path or a number.
    """
    # What stands after the block is reached, which the type of a generator's manager doesn't say.
    return cast("AbstractContextManager[pytest.ExceptionInfo[_Error], bool]", _raises(error, codes, saying))


@contextmanager
def _raises(
    error: type[_Error], codes: tuple[str, ...], saying: str
) -> Iterator[pytest.ExceptionInfo[_Error]]:
    with pytest.raises(error) as caught:
        yield caught
    code = getattr(caught.value, "code", "")
    assert code in codes, f"{code}: {caught.value}"
    assert saying in str(caught.value)


def refusal(*codes: str) -> AbstractContextManager[pytest.ExceptionInfo[Refusal], bool]:
    """Expect that what stands inside is refused with the code, or with one of several."""
    return raises(Refusal, *codes)
