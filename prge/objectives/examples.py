"""Examples: sequences of tokens with targets to read, and how their log-probabilities make scores.

A target is one (position, token) of a sequence: an engine returns its log-probability. Targets are summed
with their weights into the score of a candidate:

    score[example, candidate] = sum over the targets of that candidate of weight * logprob

    completion             one sequence, one candidate, weights 1 / completion tokens
    one-token candidates   one sequence, a target per candidate, all at the last position of the prompt
    longer candidates      a sequence per candidate, weights 1 / candidate tokens
    pairs, rated answers   as longer candidates (prge/objectives/preferences.py)
    encoder                one sequence without targets: the classification head answers the scores
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prge.engine import IntArray, TokenSequence

LossNormalisation = Literal["example", "token"]


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a data file, tokenized.

    `row` is its number in the file, counted from 1. `candidates` is the number of scores; `label` is the
    index of the right one, or None for a completion (one candidate, whose score is to rise).
    `answers` are the gold texts and `choices` the candidate texts of a task whose metric compares texts.
    `cut`: a part of the row was left out because it didn't fit the bundle.
    `weight` multiplies its loss. `liked` rates its first candidate, where the row does so.
    `reference` are the scores by the adapter that a run begins with, once they are computed.
    """

    row: int
    sequences: tuple[TokenSequence, ...]
    candidates: int
    label: int | None
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    cut: bool = False
    weight: float = 1.0
    liked: bool | None = None
    reference: tuple[float, ...] = ()

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before a completion's first target."""
        (sequence,) = self.sequences
        return sequence.tokens[: sequence.targets[0].position + 1]


def tokens_sha256(examples: Sequence[Example]) -> str:
    """What tells examples apart by their tokens, targets and weights."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.candidates, example.label, example.weight, example.liked)).encode())
        for sequence in example.sequences:
            targets = [(each.position, each.token, each.candidate) for each in sequence.targets]
            digest.update(np.array([len(sequence.tokens), len(targets), *sequence.tokens], "<i4").tobytes())
            digest.update(np.array(targets, "<i4").tobytes())
            digest.update(np.array([each.weight for each in sequence.targets], "<f8").tobytes())
    return digest.hexdigest()


def labels_of(examples: Sequence[Example]) -> IntArray:
    """The right candidate of each example, i64 [examples]; -1 for a completion."""
    return np.array([-1 if example.label is None else example.label for example in examples], np.int64)


def sequences_of(examples: Sequence[Example]) -> tuple[TokenSequence, ...]:
    """The sequences of all examples, in order."""
    return tuple(sequence for example in examples for sequence in example.sequences)


def weights_of(examples: Sequence[Example]) -> NDArray[np.float64]:
    """How much each example counts, f64 [examples]."""
    return np.array([example.weight for example in examples], np.float64)


def target_count(examples: Sequence[Example]) -> int:
    """Target tokens of some examples."""
    return sum(len(sequence.targets) for sequence in sequences_of(examples))


def weighted_by_tokens(examples: Sequence[Example]) -> list[Example]:
    """Completions with weights by which their mean loss becomes the mean loss of all their target tokens.

    The loss of a completion is a mean over its own tokens; its weight is multiplied by its share of all
    target tokens, times the number of examples.
    """
    mean = target_count(examples) / len(examples)
    return [replace(each, weight=each.weight * target_count([each]) / mean) for each in examples]


def token_count(examples: Sequence[Example]) -> int:
    """Tokens of some examples: a candidate's sequence counts with the prompt that it begins with."""
    return sum(len(sequence.tokens) for sequence in sequences_of(examples))


def microbatches(examples: Sequence[Example], tokens: int) -> Iterator[Sequence[Example]]:
    """Examples in their order, of at most so many tokens together, or one alone."""
    start, count = 0, 0
    for index, example in enumerate(examples):
        more = token_count([example])
        if index > start and count + more > tokens:
            yield examples[start:index]
            start, count = index, 0
        count += more
    if len(examples) > start:
        yield examples[start:]
