"""Examples as sequences with targets to read, and batches of them as the rows of one call.

A target is one (position, token) of a sequence: the bundle returns its log-probability. Targets are summed
with their weights into the score of a candidate:

    score[example, candidate] = sum over the targets of that candidate of weight * logprob

    completion             one sequence, one candidate, weights 1 / completion tokens
    one-token candidates   one sequence, a target per candidate, all at the last position of the prompt
    longer candidates      a sequence per candidate, weights 1 / candidate tokens
    pairs, rated answers   as longer candidates (prge/learning/preferences.py)
    encoder                one sequence without targets: the classification head answers the scores
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prge.contract import Contract
from prge.engine import Array, IntArray

LossNormalisation = Literal["example", "token"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where to read (`position`), what (`token`), its weight, and the candidate that it belongs to."""

    position: int
    token: int
    weight: float
    candidate: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One tokenized sequence with its targets."""

    tokens: tuple[int, ...]
    targets: tuple[Target, ...] = ()


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


def weights_of(examples: Sequence[Example]) -> NDArray[np.float64]:
    """How much each example counts, f64 [examples]."""
    return np.array([example.weight for example in examples], np.float64)


def target_count(examples: Sequence[Example]) -> int:
    """Target tokens of some examples."""
    return sum(len(sequence.targets) for example in examples for sequence in example.sequences)


def weighted_by_tokens(examples: Sequence[Example]) -> list[Example]:
    """Completions with weights by which their mean loss becomes the mean loss of all their target tokens.

    The loss of a completion is a mean over its own tokens; its weight is multiplied by its share of all
    target tokens, times the number of examples.
    """
    mean = target_count(examples) / len(examples)
    return [replace(each, weight=each.weight * target_count([each]) / mean) for each in examples]


def token_count(examples: Sequence[Example]) -> int:
    """Tokens of some examples: a candidate's sequence counts with the prompt that it begins with."""
    return sum(len(sequence.tokens) for example in examples for sequence in example.sequences)


@dataclass(frozen=True)
class Batch:
    """Sequences of some examples as the rows of one copy; rows beyond them are padding.

    tokens i64 [batch_size, sequence_length]; attention_mask the same shape;
    positions, targets i64 [batch_size, positions]; weights f64 and candidate i64 of the same shape;
    owner i64 [batch_size]: index of the example that a row belongs to, -1 for padding;
    members: the examples.
    """

    tokens: IntArray
    attention_mask: IntArray
    positions: IntArray
    targets: IntArray
    weights: NDArray[np.float64]
    candidate: IntArray
    owner: IntArray
    members: tuple[Example, ...]

    @property
    def examples(self) -> int:
        """How many examples the batch holds."""
        return len(self.members)

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of each example in its data file."""
        return tuple(example.row for example in self.members)

    @property
    def candidates(self) -> IntArray:
        """Scores of each example, i64 [examples]."""
        return np.array([example.candidates for example in self.members], np.int64)

    @property
    def labels(self) -> IntArray:
        """See `labels_of`."""
        return labels_of(self.members)

    @property
    def token_count(self) -> int:
        """Tokens of its rows, without padding."""
        return int(self.attention_mask[self.owner >= 0].sum())

    def inputs(self, copies: int, is_encoder: bool) -> dict[str, Array]:
        """Program inputs other than the adapter: the same rows for every copy."""
        arrays = {"tokens": self.tokens}
        if is_encoder:
            arrays["attention_mask"] = self.attention_mask
        else:
            arrays["positions"] = self.positions
            arrays["targets"] = self.targets
        return {name: np.tile(array, (copies, 1)) for name, array in arrays.items()}


def make_batch(
    examples: Sequence[Example], contract: Contract, rows: int | None = None, pad: int = 0
) -> Batch:
    """Lay the sequences of `examples` out as `rows` rows (default: the contract's batch size).

    Raises:
        ValueError: the examples need more rows, positions or tokens than there are; the data module
            checks these against the contract beforehand, with row numbers.
    """
    size = contract.batch_size if rows is None else rows
    most = max(contract.positions, 1)
    tokens = np.full((size, contract.sequence_length), pad, np.int64)
    mask = np.zeros_like(tokens)
    positions, targets, candidate = (np.zeros((size, most), np.int64) for _ in range(3))
    weights = np.zeros((size, most), np.float64)
    owner = np.full(size, -1, np.int64)
    n = 0
    for index, example in enumerate(examples):
        for sequence in example.sequences:
            length = len(sequence.tokens)
            if n >= size or length > contract.sequence_length or len(sequence.targets) > most:
                raise ValueError(f"row {example.row} doesn't fit the bundle")
            tokens[n, :length] = sequence.tokens
            mask[n, :length] = 1
            for k, target in enumerate(sequence.targets):
                positions[n, k] = target.position
                targets[n, k] = target.token
                weights[n, k] = target.weight
                candidate[n, k] = target.candidate
            owner[n] = index
            n += 1
    # An all-masked row would make an encoder's attention and pooling divide by zero.
    mask[n:, 0] = 1
    return Batch(
        tokens,
        mask,
        positions,
        targets,
        weights,
        candidate,
        owner,
        tuple(examples),
    )
