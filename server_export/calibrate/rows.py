"""Calibration rows: those of the user, and a neutral text if they have too few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prge.data.tokenization.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("text.txt")
# Tokens per row of the text.
_LENGTH = 256


def fill_up_rows(
    rows: Sequence[Sequence[int]], tokenizer: Tokenizer, tokens: int, longest: int
) -> list[Sequence[int]]:
    """Return rows with `tokens` tokens in total, or fewer if the rows and the text have fewer.

    Args:
        rows: the tokens of the user's rows.
        tokenizer: the device's tokenizer.
        tokens: the number of tokens in total.
        longest: the maximum number of tokens per row.
    """
    filled, remaining = [*rows], tokens - sum(map(len, rows))
    text_tokens, size = tokenizer.encode(TEXT.read_text("utf-8")), min(_LENGTH, longest)
    for start in range(0, len(text_tokens), size):
        if remaining <= 0:
            break
        filled.append(text_tokens[start : start + min(size, remaining)])
        remaining -= len(filled[-1])
    return filled
