"""Scores of guesses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from server_export.evidence.leak.rows import Rows
from server_export.evidence.leak.scores import score


def rows_of(*tokens: list[int], labels: Sequence[int] | None = None) -> Rows:
    return Rows(torch.tensor(tokens), torch.tensor(labels or [0] * len(tokens)))


def decode(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_tokens_in_place_and_in_any() -> None:
    found = score(rows_of([1, 3, 2, 9]), rows_of([1, 2, 3, 4]), decode)
    assert (found.tokens, found.bag, found.whole) == (1 / 4, 3 / 4, 0)
    assert (found.rouge1, found.rouge2, found.rouge_l) == (3 / 4, 0, 2 / 4)


def test_a_batch_has_no_order() -> None:
    rows = rows_of([1, 2], [3, 4], labels=[0, 1])
    found = score(rows_of([3, 4], [1, 2], labels=[1, 1]), rows, decode)
    assert (found.tokens, found.whole, found.label) == (1, 1, pytest.approx(0.5))
