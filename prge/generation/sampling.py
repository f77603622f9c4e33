"""Sampling of the next token, with temperature, top-k, top-p, min-p and repetition penalty.

The filters are those of transformers, in its order (`GenerationMixin._get_logits_processor`, version 5.23):

    constraint -> repetition penalty -> temperature -> top_k -> top_p -> min_p -> sample

llama.cpp applies the temperature last; at temperature 1 both leave the same tokens. Among equal logits, the
lowest token id comes first. Each sample uses one Philox number with the seed as key and the number of the
sample as counter: equal seeds and logits give equal tokens, up to the last bit of the machine's exponential
function.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prge.cli.bounds import bound_problems, flag
from prge.engine import BoolArray, Float64Array, FloatArray, IntArray
from prge.errors import ConfigError, EngineError, format_value
from prge.training.estimators.directions import philox

_INTEGERS = ("top_k", "seed")
# Without it, tokens of the distribution's long tail are sampled now and then (docs/how-to/generate.md).
MIN_P = 0.1


@dataclass(frozen=True)
class SamplingSettings:
    """Parameters of sampling.

    Raises:
        ConfigError: a parameter has the wrong type or is out of bounds.
    """

    temperature: float = 0.0
    """0: greedy, the most likely token; higher values sample from a flatter distribution."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to this value."""
    min_p: float = MIN_P
    """Sample from tokens whose probability is at least this fraction of the most likely token's."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens in the prompt and the completion by this value; multiply negative
    ones."""
    seed: int | None = None
    """Seed of sampling; None: a random one for each completion."""

    def __post_init__(self) -> None:
        problems = []
        for item in fields(self):
            value: Any = getattr(self, item.name)
            types = int if item.name in _INTEGERS else (int, float)
            missing = value is None and item.name == "seed"
            if not missing and (isinstance(value, bool) or not isinstance(value, types)):
                number = "a whole number" if item.name in _INTEGERS else "a number"
                problems.append(f"{flag(item.name)} is {format_value(value)}, must be {number}")
        problems = problems or bound_problems(self)
        if problems:
            raise ConfigError("Invalid sampling parameters:", problems, code="settings-unusable")


class TokenSampler:
    """Samples the tokens of one completion, one after the other."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings
        self._seed = int.from_bytes(os.urandom(8), "little") if settings.seed is None else settings.seed
        self._samples = 0

    def sample(self, logits: FloatArray, history: Sequence[int], allowed: BoolArray | None = None) -> int:
        """Return the id of the next token.

        Args:
            logits: logits of all tokens, f32 [vocabulary]; they aren't changed.
            history: the tokens so far, including the prompt; used only by the repetition penalty.
            allowed: whether each token may be sampled, bool [at most vocabulary]; tokens after the end of
                the array may not be. None: all tokens may be.

        Raises:
            EngineError: the largest logit is NaN or infinite.
        """
        settings = self._settings
        if allowed is not None:
            logits = _masked(logits, allowed)
        if settings.repetition_penalty != 1 and history:
            logits = _penalized(logits, history, settings.repetition_penalty)
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):
            raise EngineError(
                f"The model's largest logit is {logits[best]}.",
                remedy="The adapter or the bundle is damaged: try another one.",
                code="logits-not-finite",
            )
        if settings.temperature == 0 or settings.top_k == 1:
            return best
        tokens, weights = self._candidates(logits, float(logits[best]))
        sums = np.cumsum(weights)
        uniform = float(philox(self._seed, self._samples, 0, 1)[0] >> np.uint64(11)) * 2.0**-53
        self._samples += 1
        # Rounding must not lead past the last token that has a weight.
        target = min(uniform * sums[-1], np.nextafter(sums[-1], 0))
        return int(tokens[np.searchsorted(sums, target, side="right")])

    def _candidates(self, logits: FloatArray, largest: float) -> tuple[IntArray, Float64Array]:
        """Return the tokens that pass the filters, and their weights relative to the most likely token."""
        settings = self._settings
        tokens = np.arange(len(logits))
        if 0 < settings.top_k < len(logits):
            tokens = _most_likely(logits, settings.top_k)
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((logits[tokens].astype(np.float64) - largest) / settings.temperature)
        min_p = settings.min_p
        if settings.top_p < 1:
            total = float(np.cumsum(weights)[-1])
            # All tokens below this weight together have less than 1 - top_p: they needn't be sorted.
            passed = weights >= (1 - settings.top_p) * total / len(weights)
            tokens, weights = tokens[passed], weights[passed]
            order = np.argsort(-weights, kind="stable")
            tokens, weights = tokens[order], weights[order]
            before = np.cumsum(weights) - weights
            passed = before < settings.top_p * total
            tokens, weights = tokens[passed], weights[passed]
        if min_p > 0:
            passed = weights >= min_p
            tokens, weights = tokens[passed], weights[passed]
        return tokens, weights


def _masked(logits: FloatArray, allowed: BoolArray) -> FloatArray:
    """Return a copy of the logits in which tokens that aren't allowed have -inf."""
    masked = np.full_like(logits, -np.inf)
    tokens = np.flatnonzero(allowed[: len(logits)])
    masked[tokens] = logits[tokens]
    return masked


def _penalized(logits: FloatArray, history: Sequence[int], penalty: float) -> FloatArray:
    """Return a copy of the logits with the repetition penalty applied to the tokens of the history."""
    logits = logits.copy()
    tokens: NDArray[np.int64] = np.fromiter(set(history), np.int64)
    values = logits[tokens]
    logits[tokens] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def _most_likely(logits: FloatArray, count: int) -> IntArray:
    """Return the ids of the `count` largest logits in ascending order; among equal logits, the lowest ids."""
    smallest = np.partition(logits, -count)[-count]
    above, equal = np.flatnonzero(logits > smallest), np.flatnonzero(logits == smallest)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))
