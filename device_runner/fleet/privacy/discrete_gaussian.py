"""Whole numbers z with probability in proportion to exp(-z^2 / 2 s^2), drawn exactly, for s = 2^bits.

Noise in floating point leaves traces of the number that it hides (Mironov 2012, "On significance of the
least significant bits for differential privacy"); a sum of whole numbers has none. Canonne, Kamath and
Steinke 2020, arXiv 2004.00010, algorithms 1 to 3: nothing is rounded, all decisions are comparisons of whole
numbers with random words. With s a power of two, so are all denominators.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_CHUNK = 1 << 16


def system_words(count: int) -> Words:
    """Random words from the system's entropy, u64 [count]: nobody has a seed of them."""
    return np.frombuffer(os.urandom(8 * count), np.uint64)


def discrete_gaussian(
    bits: int, count: int, words: Callable[[int], Words] = system_words
) -> NDArray[np.int64]:
    """Noise of scale 2^bits, i64 [count].

    Args:
        bits: 1 to 26; above it a square would not fit a word.
        count: how many numbers.
        words: makes so many random words.
    """
    drawn, missing = [np.empty(0, np.int64)], count
    while missing > 0:
        # About half of the candidates stay.
        drawn.append(_candidates(bits, min(2 * missing + 64, _CHUNK), words)[:missing])
        missing -= len(drawn[-1])
    return np.concatenate(drawn)


def _candidates(bits: int, count: int, words: Callable[[int], Words]) -> NDArray[np.int64]:
    """Some numbers: those of a discrete Laplace distribution of the same scale that a coin keeps."""
    part = words(count) >> np.uint64(64 - bits)
    part = part[_heads(part, bits, words)]
    whole = np.zeros_like(part)
    going = np.arange(len(part))
    while going.size:
        going = going[_heads(np.full(going.size, 1 << bits, np.uint64), bits, words)]
        whole[going] += np.uint64(1)
    size: NDArray[np.int64] = ((whole << np.uint64(bits)) + part).astype(np.int64)
    negative = (words(len(size)) & np.uint64(1)).astype(bool)
    # Zero has no sign: the other one is drawn again.
    size, negative = size[(size > 0) | ~negative], negative[(size > 0) | ~negative]
    distance = np.abs(size - (1 << bits)).astype(np.uint64)
    kept = _heads(distance * distance, 2 * bits + 1, words)
    size[negative] *= -1
    return size[kept]


def _heads(numerator: Words, bits: int, words: Callable[[int], Words]) -> NDArray[np.bool_]:
    """Coins that show heads with probability exp(-numerator / 2^bits) each."""
    whole, part = numerator >> np.uint64(bits), numerator & np.uint64((1 << bits) - 1)
    heads = np.ones(len(numerator), bool)
    while (going := np.flatnonzero(heads & (whole > 0))).size:
        heads[going] = _heads_below_one(np.full(going.size, 1 << bits, np.uint64), bits, words)
        whole[going] -= np.uint64(1)
    going = np.flatnonzero(heads)
    heads[going] = _heads_below_one(part[going], bits, words)
    return heads


def _heads_below_one(numerator: Words, bits: int, words: Callable[[int], Words]) -> NDArray[np.bool_]:
    """The same for numerators up to 2^bits: trial k succeeds with probability numerator / 2^bits / k."""
    heads = np.zeros(len(numerator), bool)
    going, trial = np.arange(len(numerator)), 0
    while going.size:
        trial += 1
        success = words(going.size) >> np.uint64(64 - bits) < numerator[going]
        success[success] = uniform_below(trial, int(success.sum()), words) == 0
        heads[going[~success]] = trial % 2
        going = going[success]
    return heads


def uniform_below(bound: int, count: int, words: Callable[[int], Words]) -> Words:
    """Whole numbers below a bound, all with the same probability, u64 [count]."""
    drawn = words(count).copy()
    # Words of the last, incomplete row of `bound` numbers would make the first ones likelier.
    most = np.uint64(2**64 - 1 - 2**64 % bound)
    while (over := np.flatnonzero(drawn > most)).size:
        drawn[over] = words(over.size)
    rest: Words = drawn % np.uint64(bound)
    return rest
