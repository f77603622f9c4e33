"""Metrics: accuracy, macro F1, exact match, token F1 and ROUGE-L of texts, perplexity."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
WORD = re.compile(r"\w+")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(predictions: Sequence[Hashable], labels: Sequence[Hashable]) -> float:
    """Return the share of predictions that equal their label."""
    _check(predictions, labels)
    return sum(prediction == label for prediction, label in zip(predictions, labels, strict=True)) / len(
        labels
    )


def macro_f1(predictions: Sequence[Hashable], labels: Sequence[Hashable]) -> float:
    """Return the mean F1 of the classes that occur among predictions or labels."""
    _check(predictions, labels)
    right = Counter(
        label for prediction, label in zip(predictions, labels, strict=True) if prediction == label
    )
    predicted, present = Counter(predictions), Counter(labels)
    classes = predicted.keys() | present.keys()
    # F1 = 2 TP / (2 TP + FP + FN), and the denominator is the number predicted plus the number present.
    return math.fsum(2 * right[name] / (predicted[name] + present[name]) for name in classes) / len(classes)


def normalized_answer(text: str) -> str:
    """Normalize a text to lower case without punctuation and English articles (SQuAD, arXiv 1606.05250)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the normalized prediction is one of the answers (SQuAD, arXiv 1606.05250), else 0."""
    return float(normalized_answer(prediction) in map(normalized_answer, answers))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the highest F1 of shared words with any answer (SQuAD, arXiv 1606.05250), or 0."""
    return max((_token_f1(prediction, answer) for answer in answers), default=0.0)


def _token_f1(prediction: str, answer: str) -> float:
    predicted, gold = normalized_answer(prediction).split(), normalized_answer(answer).split()
    if not predicted or not gold:
        return float(predicted == gold)
    shared = sum((Counter(predicted) & Counter(gold)).values())
    return 2 * shared / (len(predicted) + len(gold))


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """Return the highest ROUGE-L with any answer, or 0 (Lin 2004, ROUGE, section 3).

    ROUGE-L is the F1 of the longest common subsequence of lower-cased words.
    """
    return max((_rouge_l(prediction, answer) for answer in answers), default=0.0)


def _rouge_l(prediction: str, answer: str) -> float:
    predicted, gold = WORD.findall(prediction.lower()), WORD.findall(answer.lower())
    if not predicted or not gold:
        return float(predicted == gold)
    return 2 * longest_common_subsequence(predicted, gold) / (len(predicted) + len(gold))


def longest_common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence.

    A row of the usual table is stored as one integer, whose zero bits mark where the length grows (Hyyro
    2004, Bit-parallel LCS-length computation revisited). Takes len(first) additions of len(second) bits.
    """
    positions: dict[Hashable, int] = {}
    for index, element in enumerate(second):
        positions[element] = positions.get(element, 0) | 1 << index
    row = all_ones = (1 << len(second)) - 1
    for element in first:
        matches = row & positions.get(element, 0)
        row = ((row + matches) | (row - matches)) & all_ones
    return len(second) - bin(row).count("1")


def perplexity(losses: Sequence[float], counts: Sequence[int]) -> float:
    """Return exp of the mean loss per token, from each text's mean loss and number of tokens."""
    _check(losses, counts)
    mean = math.fsum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    # math.exp raises on overflow, which an untrained model may cause.
    return math.exp(mean) if mean < 709 else math.inf


def _check(predictions: Sequence[object], labels: Sequence[object]) -> None:
    if len(predictions) != len(labels) or not labels:
        raise ValueError(
            f"{len(predictions)} predictions and {len(labels)} labels: need the same number, at least 1"
        )
