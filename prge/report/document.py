"""A report as blocks, before it becomes Markdown or HTML. All texts are plain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A section begins."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """What somebody would type, or what a program said."""

    text: str


@dataclass(frozen=True)
class Table:
    """Cells by row; the first `labels` columns hold words, the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1


@dataclass(frozen=True)
class Quote:
    """What a model or a person wrote, line by line as it is."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A drawing of charts.py; an empty one is left out. In Markdown it is the file `name`.svg."""

    drawing: str
    caption: str
    name: str = ""


Block = Heading | Paragraph | Bullets | Code | Quote | Table | Picture
