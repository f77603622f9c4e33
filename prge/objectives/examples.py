"""Examples: tokenized rows with the targets whose log-probabilities make up their scores.

A target is a (position, token) of a sequence, for which the engine returns a log-probability. The score of a
candidate is the weighted sum of its targets:

    score[example, candidate] = sum over the targets of that candidate of weight * logprob

    completion             one sequence, one candidate, weights 1 / number of completion tokens
    one-token candidates   one sequence, one target per candidate, all at the last position of the prompt
    longer candidates      one sequence with a branch per candidate, or one sequence per candidate if the
                           model takes no branches; weights 1 / number of candidate tokens
    pairs, rated answers   like longer candidates (prge/objectives/preferences.py)
    encoder                one sequence without targets: the classification head computes the scores
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
    """A tokenized row of a data file.

    Attributes:
        row: number of the row in its file, counted from 1.
        sequences: the token sequences that the engine computes.
        candidates: number of candidates, each of which has a score.
        label: index of the right candidate; None for a completion, whose only score is to be raised.
        answers: the gold texts, for tasks whose metric compares texts.
        choices: the candidates' texts, for tasks whose metric compares texts.
        cut: whether a part of the row was left out because the row was too long for the bundle.
        weight: factor of the example's loss.
        liked: rating of the first candidate; None if the row has no rating.
        reference: scores by the adapter that the run starts from; empty until they are computed.
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
        """The tokens before the first target of a completion."""
        (sequence,) = self.sequences
        return sequence.tokens[: sequence.targets[0].position + 1]


def without_branches(example: Example) -> Example:
    """Return an example with a sequence of consecutive tokens for each candidate."""
    return replace(example, sequences=tuple(part for each in example.sequences for part in each.split()))


def tokens_sha256(examples: Sequence[Example]) -> str:
    """Return a hash of the examples' tokens, targets and weights, in hexadecimal."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.candidates, example.label, example.weight, example.liked)).encode())
        for sequence in example.sequences:
            targets = [(target.position, target.token, target.candidate) for target in sequence.targets]
            digest.update(np.array([len(sequence.tokens), len(targets), *sequence.tokens], "<i4").tobytes())
            digest.update(np.array(sequence.branches, "<i4").tobytes())
            digest.update(np.array(targets, "<i4").tobytes())
            digest.update(np.array([target.weight for target in sequence.targets], "<f8").tobytes())
    return digest.hexdigest()


def labels_of(examples: Sequence[Example]) -> IntArray:
    """Return the index of each example's right candidate, i64 [examples]; -1 for a completion."""
    return np.array([-1 if example.label is None else example.label for example in examples], np.int64)


def sequences_of(examples: Sequence[Example]) -> tuple[TokenSequence, ...]:
    """Return the sequences of all examples, in order."""
    return tuple(sequence for example in examples for sequence in example.sequences)


def weights_of(examples: Sequence[Example]) -> NDArray[np.float64]:
    """Return the weight of each example's loss, f64 [examples]."""
    return np.array([example.weight for example in examples], np.float64)


def target_count(examples: Sequence[Example]) -> int:
    """Return the number of target tokens."""
    return sum(len(sequence.targets) for sequence in sequences_of(examples))


def weighted_by_tokens(examples: Sequence[Example]) -> list[Example]:
    """Return completions whose weights turn their mean loss into the mean loss over all target tokens.

    The loss of a completion is a mean over its own tokens. Its weight is multiplied by its share of all
    target tokens, times the number of examples.
    """
    mean = target_count(examples) / len(examples)
    return [replace(example, weight=example.weight * target_count([example]) / mean) for example in examples]


def token_count(examples: Sequence[Example]) -> int:
    """Return the number of tokens of all sequences; a prompt counts once for each sequence."""
    return sum(len(sequence.tokens) for sequence in sequences_of(examples))


def microbatches(examples: Sequence[Example], tokens: int) -> Iterator[Sequence[Example]]:
    """Yield slices of the examples, in order, of at most `tokens` tokens but at least one example."""
    start, count = 0, 0
    for index, example in enumerate(examples):
        example_tokens = token_count([example])
        if index > start and count + example_tokens > tokens:
            yield examples[start:index]
            start, count = index, 0
        count += example_tokens
    if len(examples) > start:
        yield examples[start:]
