"""How much of a row a guess has: tokens in place, tokens in any place, and ROUGE of the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations

import torch

from prge.rows.text_metrics import rouge_l, rouge_n
from server_export.evidence.leak.rows import Rows


@dataclass(frozen=True)
class Score:
    """Means over a report's rows, each from 0 to 1.

    `tokens` that stand in their place, `bag` in any place; `whole` rows; `rouge1`, `rouge2`, `rouge_l` of the
    texts; `label`s of a task, 1 of texts.
    """

    tokens: float
    bag: float
    whole: float
    rouge1: float
    rouge2: float
    rouge_l: float
    label: float


def score(guess: Rows, rows: Rows, decode: Callable[[Sequence[int]], str]) -> Score:
    """The score of a guess of a report's rows, in the order in which most tokens stand in their place."""
    pairs = max(
        (list(zip(order, range(len(rows)), strict=True)) for order in permutations(range(len(guess)))),
        key=lambda pairs: sum(int((guess.tokens[g] == rows.tokens[r]).sum()) for g, r in pairs),
    )
    each = [_score_row(guess[torch.tensor([g])], rows[torch.tensor([r])], decode) for g, r in pairs]
    return mean_score(each)


def mean_score(scores: Sequence[Score]) -> Score:
    """Mean of each measure."""
    columns = zip(*(asdict(score).values() for score in scores), strict=True)
    return Score(*(sum(column) / len(scores) for column in columns))


def _score_row(guess: Rows, row: Rows, decode: Callable[[Sequence[int]], str]) -> Score:
    guessed, right = guess.tokens[0].tolist(), row.tokens[0].tolist()
    place = sum(a == b for a, b in zip(guessed, right, strict=True)) / len(right)
    bag = sum((Counter(guessed) & Counter(right)).values()) / len(right)
    text, answers = decode(guessed), [decode(right)]
    rouge = rouge_n(text, answers, 1), rouge_n(text, answers, 2), rouge_l(text, answers)
    return Score(place, bag, float(guessed == right), *rouge, float(torch.equal(guess.labels, row.labels)))
