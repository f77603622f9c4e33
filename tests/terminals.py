"""A text stream that pretends to be a terminal."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """A text stream that pretends to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True
