"""Colours and markers of every figure, and the library that draws them."""

from __future__ import annotations

from typing import Any

from prge.errors import PrgeError
from prge.host.packages import install_extra

# Distinguishable with any kind of colour vision: M. Okabe, K. Ito, "Color Universal Design", 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def drawing_library() -> Any:
    """The module matplotlib, with its `figure`; raises PrgeError where it isn't installed."""
    try:
        import matplotlib
        import matplotlib.figure
    except ModuleNotFoundError:
        raise PrgeError(
            "drawing needs matplotlib, which is not installed", remedy=install_extra("plot")
        ) from None
    return matplotlib
