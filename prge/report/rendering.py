"""Renders the blocks of a report as Markdown, or as one HTML file that opens without a network.

A report is a list of blocks of plain text (document.py) in reading order, with SVG charts of charts.py among
them. All texts are escaped here, so untrusted text can't become markup.

    to_html([Heading("Run a", 1), Picture(line_chart(...), "Loss."), Table(("fact", "value"), rows)])
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from prge.report.document import Block, Bullets, Code, Heading, Paragraph, Picture, Quote

PAGE = Path(__file__).with_name("page.html")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~])")
_RANGE = re.compile(r"\[[^\]]*\]")


def to_markdown(blocks: Sequence[Block], folder: str = "") -> str:
    """Render blocks as Markdown; pictures refer to the files NAME.svg in `folder`."""
    return "\n\n".join(_markdown(block, folder) for block in _shown(blocks)) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """Render blocks as an HTML page with embedded style and pictures; only pictures may contain markup."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"ranges": _ranges, "is_long": _is_long, "drawing": _drawing}
    page: str = environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        title=next((block.text for block in blocks if isinstance(block, Heading)), ""),
        blocks=[(type(block).__name__, block) for block in _shown(blocks)],
    )
    return page


def _shown(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if not isinstance(block, Picture) or block.drawing]


def _markdown(block: Block, folder: str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_plain(block.text)}"
    if isinstance(block, Paragraph):
        return _plain(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_plain(item)}" for item in block.items)
    if isinstance(block, Code):
        # Longer than any run of backticks in the text, so that the text can't end the block.
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
        return f"{fence}\n{block.text}\n{fence}"
    if isinstance(block, Quote):
        return "\n".join(f"> {_plain(line)}" for line in block.text.splitlines())
    if isinstance(block, Picture):
        return f"![{_plain(block.caption)}]({folder}/{block.name}.svg)"
    rule = ["---"] * block.labels + ["---:"] * (len(block.header) - block.labels)
    lines = [map(_plain, block.header), rule, *(map(_plain, row) for row in block.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _drawing(drawing: str) -> Markup:
    return Markup(drawing.replace("<svg ", '<svg role="img" ', 1))


def _is_long(cell: str) -> bool:
    """Return whether a cell has a word, such as a path, that may have to be broken."""
    return max(map(len, cell.split()), default=0) > 40


def _ranges(cell: str) -> Markup:
    """Mark the ranges in brackets of a cell, which are shown muted and unbroken."""
    return Markup(_RANGE.sub(r'<span class="range">\g<0></span>', str(escape(cell))))
