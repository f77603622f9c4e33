"""Rows that rounding is calibrated on: those of the user, and a text of ours where they are few."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prge.data.tokenization.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("text.txt")
# Tokens of a row of the text.
_LENGTH = 256


def fill_up_rows(
    rows: Sequence[Sequence[int]], tokenizer: Tokenizer, tokens: int, longest: int
) -> list[Sequence[int]]:
    """Rows with so many tokens in all, as far as they and the text go.

    Args:
        rows: tokens of the user's rows.
        tokenizer: the device's.
        tokens: wanted in all.
        longest: tokens that a row may have.
    """
    found, left = [*rows], tokens - sum(map(len, rows))
    of_text, size = tokenizer.encode(TEXT.read_text("utf-8")), min(_LENGTH, longest)
    for start in range(0, len(of_text), size):
        if left <= 0:
            break
        found.append(of_text[start : start + min(size, left)])
        left -= len(found[-1])
    return found
