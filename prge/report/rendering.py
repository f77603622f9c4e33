"""The one composer: a report's blocks as Markdown, and as one HTML file that opens from disk.

What a report says is a list of blocks of plain text (document.py) in the order of reading, with the SVG of
charts.py between them. All texts are escaped here, so a stranger's stay texts.

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
    """Markdown; pictures are the files NAME.svg in `folder`, relative to the text."""
    return "\n\n".join(_markdown(block, folder) for block in _shown(blocks)) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """A page with its style and pictures inside; these are the only markup taken."""
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
        # Longer than any in the text, which so can't end it.
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
    """Whether a cell has a word, such as a path, that may need to be divided."""
    return max(map(len, cell.split()), default=0) > 40


def _ranges(cell: str) -> Markup:
    """A cell whose ranges, in brackets, stand back and stay whole."""
    return Markup(_RANGE.sub(r'<span class="range">\g<0></span>', str(escape(cell))))
