"""The page in a real browser: nothing of it lies outside the screen of a desk or a phone."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from server_export.compare.command import write_report
from tests.comparisons import make_result

WIDTHS = (1280, 1000, 768, 390, 360)
# A frame of a width lays its page out as a screen of that width; a window can't be as narrow as a phone.
MEASURE = """
onload = () => { for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument.documentElement;
  const boxes = frame.contentDocument.querySelectorAll(".scroll");
  const wider = [...boxes].filter(box => box.scrollWidth > box.clientWidth).length;
  document.body.append(`[${frame.width}: ${page.scrollWidth} of ${page.clientWidth}, ${wider} boxes]`);
} };
"""


def test_neither_the_page_nor_a_table_scrolls_sideways(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium to lay the page out")
    write_report(make_result(tmp_path), tmp_path)
    page = html.escape((tmp_path / "report.html").read_text())
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{page}"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(f"<body>{frames}<script>{MEASURE}</script></body>")
    done = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path}/frames.html",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.findall(r"\[(\d+): (\d+) of (\d+), (\d+) boxes\]", done.stdout)
    assert {int(width) for width, *_ in found} == set(WIDTHS)
    for width, needed, there, cut in found:
        assert int(needed) <= int(there), f"at {width} pixels"
        assert int(cut) == 0, f"tables at {width} pixels"
