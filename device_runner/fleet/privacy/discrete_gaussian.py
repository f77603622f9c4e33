"""Exact sampling from the discrete Gaussian, P(z) proportional to exp(-z^2 / 2 s^2), for s = 2^bits.

Floating-point noise leaves traces of the value that it hides (Mironov 2012, "On significance of the least
significant bits for differential privacy"); a sum of integers has none. Canonne, Kamath and Steinke 2020,
arXiv 2004.00010, algorithms 1 to 3: nothing is rounded, all decisions compare integers with random words.
With s a power of two, all denominators are powers of two as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_CHUNK = 1 << 16


def system_words(count: int) -> Words:
    """Return random words from the operating system's entropy source, u64 [count]; they have no seed."""
    return np.frombuffer(os.urandom(8 * count), np.uint64)


def discrete_gaussian(
    bits: int, count: int, words: Callable[[int], Words] = system_words
) -> NDArray[np.int64]:
    """Sample noise of scale 2^bits, i64 [count].

    Args:
        bits: binary logarithm of the scale, 1 to 26; above that, a square would not fit a word.
        count: number of samples.
        words: returns that many random words.
    """
    samples, missing = [np.empty(0, np.int64)], count
    while missing > 0:
        # About half of the candidates are accepted.
        samples.append(_candidates(bits, min(2 * missing + 64, _CHUNK), words)[:missing])
        missing -= len(samples[-1])
    return np.concatenate(samples)


def _candidates(bits: int, count: int, words: Callable[[int], Words]) -> NDArray[np.int64]:
    """Sample a discrete Laplace distribution of the same scale; keep what the rejection test accepts."""
    part = words(count) >> np.uint64(64 - bits)
    part = part[_heads(part, bits, words)]
    whole = np.zeros_like(part)
    pending = np.arange(len(part))
    while pending.size:
        pending = pending[_heads(np.full(pending.size, 1 << bits, np.uint64), bits, words)]
        whole[pending] += np.uint64(1)
    size: NDArray[np.int64] = ((whole << np.uint64(bits)) + part).astype(np.int64)
    negative = (words(len(size)) & np.uint64(1)).astype(bool)
    # Negative zero is rejected, so that zero is not counted twice.
    size, negative = size[(size > 0) | ~negative], negative[(size > 0) | ~negative]
    distance = np.abs(size - (1 << bits)).astype(np.uint64)
    kept = _heads(distance * distance, 2 * bits + 1, words)
    size[negative] *= -1
    return size[kept]


def _heads(numerator: Words, bits: int, words: Callable[[int], Words]) -> NDArray[np.bool_]:
    """Flip coins that show heads with probability exp(-numerator / 2^bits) each."""
    whole, part = numerator >> np.uint64(bits), numerator & np.uint64((1 << bits) - 1)
    heads = np.ones(len(numerator), bool)
    while (pending := np.flatnonzero(heads & (whole > 0))).size:
        heads[pending] = _heads_below_one(np.full(pending.size, 1 << bits, np.uint64), bits, words)
        whole[pending] -= np.uint64(1)
    pending = np.flatnonzero(heads)
    heads[pending] = _heads_below_one(part[pending], bits, words)
    return heads


def _heads_below_one(numerator: Words, bits: int, words: Callable[[int], Words]) -> NDArray[np.bool_]:
    """Flip coins as `_heads` does, for numerators up to 2^bits.

    Trial k succeeds with probability numerator / 2^bits / k.
    """
    heads = np.zeros(len(numerator), bool)
    pending, trial = np.arange(len(numerator)), 0
    while pending.size:
        trial += 1
        success = words(pending.size) >> np.uint64(64 - bits) < numerator[pending]
        success[success] = uniform_below(trial, int(success.sum()), words) == 0
        heads[pending[~success]] = trial % 2
        pending = pending[success]
    return heads


def uniform_below(bound: int, count: int, words: Callable[[int], Words]) -> Words:
    """Sample integers uniformly below a bound, u64 [count]."""
    values = words(count).copy()
    # Words above the largest multiple of `bound` would make small results likelier.
    most = np.uint64(2**64 - 1 - 2**64 % bound)
    while (rejected := np.flatnonzero(values > most)).size:
        values[rejected] = words(rejected.size)
    remainder: Words = values % np.uint64(bound)
    return remainder
