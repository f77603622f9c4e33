"""The blocks of a report, which `rendering.py` turns into Markdown or HTML. All texts are plain text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """The heading of a section."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A bulleted list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """A command, or the output of a program."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table; the first `labels` columns hold text, the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1


@dataclass(frozen=True)
class Quote:
    """Text that a model or a person wrote, with its line breaks kept."""

    text: str


@dataclass(frozen=True)
class Picture:
    """An SVG of charts.py, left out if it is empty. In Markdown it is the file `name`.svg."""

    drawing: str
    caption: str
    name: str = ""


Block = Heading | Paragraph | Bullets | Code | Quote | Table | Picture
