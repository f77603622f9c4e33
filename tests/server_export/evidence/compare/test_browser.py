"""The report in a real browser never exceeds the screen of a desktop or a phone."""

from __future__ import annotations

from pathlib import Path

from server_export.evidence.compare.command import write_report
from tests.comparisons import make_result
from tests.pages import check_widths


def test_neither_the_page_nor_a_table_scrolls_sideways(tmp_path: Path) -> None:
    write_report(make_result(tmp_path), tmp_path)
    check_widths((tmp_path / "report.html").read_text(), tmp_path)
