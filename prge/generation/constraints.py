"""The TokenConstraint protocol: which tokens a completion may have, such as those of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from prge.engine import BoolArray


class TokenConstraint(Protocol):
    """Restricts the tokens of one completion, one after the other."""

    def allowed(self, ends: Collection[int]) -> BoolArray:
        """Return which tokens may be next, bool [tokens of the tokenizer].

        Args:
            ends: tokens that end the completion; allowed where the completion may end.

        Raises:
            PrgeError: no token is allowed, or a limit on the computation is reached.
        """
        ...

    def accept(self, token: int) -> None:
        """Append a token that is allowed and does not end the completion."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the completion is complete, and no token may follow."""
        ...


BeginConstraint = Callable[[], TokenConstraint]
"""Returns the constraint of a new completion."""
