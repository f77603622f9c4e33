"""A stream that says that it is a terminal."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """Text that is shown."""

    def isatty(self) -> bool:
        """That it is one."""
        return True
