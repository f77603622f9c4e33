"""Rendering of blocks: untrusted texts keep their lines and never become markup."""

from __future__ import annotations

import pytest

from prge.report.document import Heading, Paragraph, Quote, Table
from prge.report.rendering import to_html, to_markdown
from tests.pages import Page


def test_quotes_keep_their_lines() -> None:
    quote = Quote("one <b>\n  two *")
    assert '<blockquote dir="auto">one &lt;b&gt;\n  two *</blockquote>' in to_html([quote])
    assert to_markdown([quote], "figures") == "> one \\<b\\>\n> two \\*\n"


@pytest.mark.parametrize("placeholder", ["{{ body }}", "{{ title }}", "</title><script>"])
def test_texts_are_not_expanded_as_placeholders(placeholder: str) -> None:
    page = Page(to_html([Heading(placeholder, 1), Paragraph(placeholder)]))
    assert page.headings == [placeholder]
    assert "script" not in page.names


def test_only_words_that_are_too_long_for_a_cell_are_divided() -> None:
    page = to_html([Table(("name", "path"), (("a", "short words " * 9), ("b", "/long" * 20)), labels=2)])
    assert page.count('class="long"') == 1
