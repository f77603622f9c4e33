"""Scores of guesses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from server_export.evidence.leak.rows import Rows
from server_export.evidence.leak.study import score


def rows_of(*tokens: list[int], labels: Sequence[int] | None = None) -> Rows:
    return Rows(torch.tensor(tokens), torch.tensor(labels or [0] * len(tokens)))


def test_tokens_at_the_right_position_and_whole_rows() -> None:
    result = score(rows_of([1, 3, 2, 9]), rows_of([1, 2, 3, 4]))
    assert result == {"tokens": 1 / 4, "whole": 0, "label": 1}


def test_a_batch_has_no_order() -> None:
    result = score(rows_of([3, 4], [1, 2], labels=[1, 1]), rows_of([1, 2], [3, 4], labels=[0, 1]))
    assert result == {"tokens": 1, "whole": 1, "label": pytest.approx(0.5)}
