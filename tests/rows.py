"""Hand-made examples."""

from __future__ import annotations

import numpy as np

from prge.engine import Target, TokenSequence
from prge.objectives.examples import Example


def completion(row: int, tokens: list[int], prompt: int) -> Example:
    """Return a completion: every token from index `prompt` on is a target."""
    targets = range(prompt, len(tokens))
    read = tuple(Target(i - 1, tokens[i], 1 / len(targets), 0) for i in targets)
    return Example(row, (TokenSequence(tuple(tokens), read),), 1, None)


def choice(row: int, tokens: list[int], candidates: list[int], label: int) -> Example:
    """Return an example with one-token candidates at the last position."""
    targets = tuple(Target(len(tokens) - 1, word, 1.0, c) for c, word in enumerate(candidates))
    return Example(row, (TokenSequence(tuple(tokens), targets),), len(candidates), label)


def long_choice(row: int, tokens: list[int], candidates: list[list[int]], label: int) -> Example:
    """Return an example with candidates of several tokens, a sequence each."""
    sequences = []
    for c, candidate in enumerate(candidates):
        whole = [*tokens, *candidate]
        targets = tuple(
            Target(len(tokens) - 1 + k, token, 1 / len(candidate), c) for k, token in enumerate(candidate)
        )
        sequences.append(TokenSequence(tuple(whole), targets))
    return Example(row, tuple(sequences), len(candidates), label)


def classification(row: int, tokens: list[int], classes: int, label: int) -> Example:
    """Return an example for an encoder with a classification head."""
    return Example(row, (TokenSequence(tuple(tokens)),), classes, label)


def random_completions(count: int, vocabulary: int = 11, seed: int = 0) -> list[Example]:
    """Return completions of random tokens: 6 tokens, the last 3 are targets."""
    random = np.random.default_rng(seed)
    return [completion(row + 1, random.integers(0, vocabulary, 6).tolist(), prompt=3) for row in range(count)]


def bigram_completions(count: int, vocabulary: int = 11, seed: int = 0) -> list[Example]:
    """Return learnable completions: each token is the previous one plus one."""
    random = np.random.default_rng(seed)
    starts = random.integers(0, vocabulary, count)
    return [
        completion(row + 1, [(start + i) % vocabulary for i in range(5)], prompt=1)
        for row, start in enumerate(starts.tolist())
    ]


# Examples on which all estimators must agree.
EXAMPLES_BY_FORM: dict[str, list[Example]] = {
    "completions": random_completions(12),
    "completions of different lengths": [
        completion(row, [row, row + 1, 2, 3, 4][: 3 + row % 3], 1) for row in range(1, 7)
    ],
    "candidates": [
        choice(row, [row % 7, row % 5], [1, 3, 8][: 2 + row % 2], row % 2) for row in range(1, 10)
    ],
    # Two rows for each example, and three rows left over in a batch of seven.
    "longer candidates": [long_choice(row, [row % 7], [[1], [2, 3, 4]], row % 2) for row in range(1, 10)],
}
