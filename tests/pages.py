"""Parse HTML pages, and check their layout in a real browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

VOID = {"meta", "link", "br", "hr", "img", "input"}
WIDTHS, NARROW = (1280, 1000, 768, 390, 360), 768
# A frame of a width lays its page out as a screen of that width; a window can't be as narrow as a phone.
MEASURE = """
onload = () => { for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument.documentElement;
  const boxes = frame.contentDocument.querySelectorAll(".scroll");
  const wider = [...boxes].filter(box => box.scrollWidth > box.clientWidth).length;
  const cards = [...boxes].filter(box => getComputedStyle(box.firstChild).display != "table").length;
  document.body.append(`[${frame.width}: ${page.scrollWidth} of ${page.clientWidth}, ${wider} and ${cards}]`);
} };
"""


class Page(HTMLParser):
    """Texts of tables and headings, ids and links; checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.names: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.links.append(value or "")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("h1", "h2"):
            self.headings.append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        holder = next((tag for tag in reversed(self.open) if tag != "span"), "")
        if holder in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif holder in ("h1", "h2"):
            self.headings[-1] += data


def check_widths(page: str, folder: Path, widths: Sequence[int] = WIDTHS) -> None:
    """Check in chromium that a page never scrolls sideways, and that tables become cards only if narrow.

    Skips without chromium.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium to lay the page out")
    source = html.escape(page)
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{source}"></iframe>' for width in widths)
    (folder / "frames.html").write_text(f"<body>{frames}<script>{MEASURE}</script></body>")
    done = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000",
            f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{folder}/frames.html",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    result = re.findall(r"\[(\d+): (\d+) of (\d+), (\d+) and (\d+)\]", done.stdout)
    assert {int(width) for width, *_ in result} == set(widths)
    for width, needed, there, cut, cards in result:
        assert bool(int(cards)) == (int(width) <= NARROW), f"tables at {width} pixels"
        assert int(needed) <= int(there), f"at {width} pixels"
        assert int(cut) == 0, f"tables at {width} pixels"
