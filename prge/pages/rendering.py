"""A report's blocks as Markdown, and as one HTML file that opens from disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from prge.pages.document import Block, Bullets, Code, Heading, Paragraph, Picture, Quote, Table

PAGE = Path(__file__).with_name("page.html")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~])")
_RANGE = re.compile(r"\[[^\]]*\]")


def to_markdown(blocks: Sequence[Block], folder: str) -> str:
    """Markdown; pictures are the files NAME.svg in `folder`, relative to the text."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def to_html(blocks: Sequence[Block], pictures: Mapping[str, str]) -> str:
    """A page with its style and pictures inside; `pictures` are SVG by name, the only markup taken."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "")
    groups = groupby(blocks, lambda block: isinstance(block, Picture))
    body = "\n".join(
        f'<div class="figures">{made}</div>' if are_pictures else made
        for are_pictures, group in groups
        for made in ["\n".join(_html(block, pictures) for block in group)]
    )
    page = PAGE.read_text(encoding="utf-8")
    # One pass: a text that looks like a placeholder stays what it is.
    parts = {"title": escape(title), "body": body}
    return re.sub(r"\{\{ (title|body) \}\}", lambda mark: parts[mark.group(1)], page)


def _markdown(block: Block, folder: str) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_plain(block.text)}"
    if isinstance(block, Paragraph):
        return _plain(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_plain(item)}" for item in block.items)
    if isinstance(block, Code):
        return "\n".join(f"    {line}" for line in block.text.splitlines())
    if isinstance(block, Quote):
        return "\n".join(f"> {_plain(line)}" for line in block.text.splitlines())
    if isinstance(block, Picture):
        return f"![{_plain(block.caption)}]({folder}/{block.name}.svg)"
    rule = ["---"] * block.labels + ["---:"] * (len(block.header) - block.labels)
    lines = [block.header, tuple(rule), *block.rows]
    cells = [line if line is lines[1] else tuple(map(_plain, line)) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _plain(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _html(block: Block, pictures: Mapping[str, str]) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Code):
        return f"<pre><code>{escape(block.text)}</code></pre>"
    if isinstance(block, Quote):
        return f'<blockquote dir="auto">{escape(block.text)}</blockquote>'
    if isinstance(block, Picture):
        caption = escape(block.caption)
        drawing = pictures[block.name].replace("<svg ", '<svg role="img" ', 1)
        return f"<figure>{drawing}<figcaption>{caption}</figcaption></figure>"
    return _html_table(block)


def _is_long(cell: str) -> bool:
    """Whether a cell has a word, such as a path, that may need to be divided."""
    return max(map(len, cell.split()), default=0) > 40


def _html_table(table: Table) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        made = []
        for index, cell in enumerate(cells):
            kind = ' class="number"' if index >= table.labels else ' class="long"' if _is_long(cell) else ""
            name = "th" if tag == "th" or index == 0 else "td"
            scope = "" if name == "td" else ' scope="col"' if tag == "th" else ' scope="row"'
            # On a phone a row is a card: every cell names its column.
            label = f' data-label="{escape(table.header[index])}"' if name == "td" else ""
            text = _RANGE.sub(r'<span class="range">\g<0></span>', escape(cell))
            made.append(f"<{name}{scope}{kind}{label}>{text}</{name}>")
        return f"<tr>{''.join(made)}</tr>"

    head = line(table.header, "th")
    body = "".join(line(row, "td") for row in table.rows)
    # Reachable by keyboard, so that it can be scrolled without a pointer.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.header[0])}">'
        f"<table><thead>{head}</thead><tbody>{body}</tbody></table></div>"
    )
