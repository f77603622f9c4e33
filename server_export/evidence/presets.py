"""Settings that come along: `--preset NAME` reads a file of a verb's folder before the flags."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from prge.errors import ConfigError

# The tiny model and its rows.
DEMO = Path(__file__).resolve().parents[1] / "demo_data"


def with_preset(argv: Sequence[str], folder: Path) -> list[str]:
    """The words of a command line with the file of its preset before them.

    Raises:
        ConfigError: there is no such preset; it tells the nearest name.
    """
    words = list(argv)
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--preset" and (equals or index + 1 < len(words)):
            return ["--config", str(_file(value if equals else words[index + 1], folder)), *words]
    return words


def _file(name: str, folder: Path) -> Path:
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(
            "there is no such preset:", [f"{name!r} is unknown{hint}"], remedy=f"presets: {', '.join(names)}"
        )
    return folder / f"{name}.yaml"
