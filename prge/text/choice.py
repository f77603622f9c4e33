"""Which token follows: the most likely one, or one drawn from what filters leave of the distribution.

The filters are those of transformers, in its order (`GenerationMixin._get_logits_processor`, version 5.23):

    repetition penalty -> temperature -> top_k -> top_p -> min_p -> a draw

llama.cpp takes the temperature last; at temperature 1 both leave the same tokens. Of equal logits the lowest
id comes first. A draw takes one number of Philox, keyed by the seed and counted by the token: the same seed
and logits give the same tokens, but for the last bit of a machine's exponential function.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prge.engine import Float64Array, FloatArray, IntArray
from prge.errors import ConfigError, EngineError, shown
from prge.learning.estimators.directions import philox
from prge.verbs.bounds import bound_problems, flag

_WHOLE = ("top_k", "seed")
# Without it a tail of tokens that are rare one by one is drawn from now and then (docs/generation.md).
MIN_P = 0.1


@dataclass(frozen=True)
class ChoiceSettings:
    """How a token is chosen; raises ConfigError for what can't be."""

    temperature: float = 0.0
    """0 takes the most likely token; higher ones draw, and flatten the distribution."""
    top_k: int = 0
    """Draw from so many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likely tokens that have this share of the probability together."""
    min_p: float = MIN_P
    """Draw from tokens with at least this share of the most likely one's probability."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens that prompt and answer hold already, multiply negative ones."""
    seed: int | None = None
    """Of the draws; None: another one each time."""

    def __post_init__(self) -> None:
        problems = []
        for item in fields(self):
            value: Any = getattr(self, item.name)
            kinds = int if item.name in _WHOLE else (int, float)
            missing = value is None and item.name == "seed"
            if not missing and (isinstance(value, bool) or not isinstance(value, kinds)):
                number = "a whole number" if item.name in _WHOLE else "a number"
                problems.append(f"{flag(item.name)} is {shown(value)}, must be {number}")
        problems = problems or bound_problems(self)
        if problems:
            raise ConfigError("no token can be chosen so:", problems, code="settings-unusable")


class Choice:
    """Chooses the tokens of one answer, one after the other."""

    def __init__(self, settings: ChoiceSettings) -> None:
        self._settings = settings
        self._seed = int.from_bytes(os.urandom(8), "little") if settings.seed is None else settings.seed
        self._drawn = 0

    def choose(self, logits: FloatArray, history: Sequence[int]) -> int:
        """The next token's id.

        Args:
            logits: f32 [vocabulary]; not changed.
            history: the tokens before it, prompt included; a repetition penalty alone reads them.

        Raises:
            EngineError: a logit is not a number, or none is finite.
        """
        settings = self._settings
        if settings.repetition_penalty != 1 and history:
            logits = _penalized(logits, history, settings.repetition_penalty)
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):
            raise EngineError(
                f"the model's largest logit is {logits[best]}",
                remedy="the adapter or the bundle is damaged: try another one",
                code="logits-not-finite",
            )
        if settings.temperature == 0 or settings.top_k == 1:
            return best
        tokens, weights = self._candidates(logits, float(logits[best]))
        sums = np.cumsum(weights)
        draw = float(philox(self._seed, self._drawn, 0, 1)[0] >> np.uint64(11)) * 2.0**-53
        self._drawn += 1
        # Rounding must not lead behind the last token that has a weight.
        target = min(draw * sums[-1], np.nextafter(sums[-1], 0))
        return int(tokens[np.searchsorted(sums, target, side="right")])

    def _candidates(self, logits: FloatArray, largest: float) -> tuple[IntArray, Float64Array]:
        """Tokens that the filters leave, and their probabilities up to a factor, the most likely one's 1."""
        settings = self._settings
        tokens = np.arange(len(logits))
        if 0 < settings.top_k < len(logits):
            tokens = _most_likely(logits, settings.top_k)
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((logits[tokens].astype(np.float64) - largest) / settings.temperature)
        least = settings.min_p
        if settings.top_p < 1:
            total = float(np.cumsum(weights)[-1])
            # Together, tokens below this have less than the share that is left out: no need to sort them.
            kept = weights >= (1 - settings.top_p) * total / len(weights)
            tokens, weights = tokens[kept], weights[kept]
            order = np.argsort(-weights, kind="stable")
            tokens, weights = tokens[order], weights[order]
            before = np.cumsum(weights) - weights
            kept = before < settings.top_p * total
            tokens, weights = tokens[kept], weights[kept]
        if least > 0:
            kept = weights >= least
            tokens, weights = tokens[kept], weights[kept]
        return tokens, weights


def _penalized(logits: FloatArray, history: Sequence[int], penalty: float) -> FloatArray:
    logits = logits.copy()
    held: NDArray[np.int64] = np.fromiter(set(history), np.int64)
    values = logits[held]
    logits[held] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def _most_likely(logits: FloatArray, count: int) -> IntArray:
    """Ids of the `count` largest logits, ascending; of equal ones the lowest ids."""
    least = np.partition(logits, -count)[-count]
    above, equal = np.flatnonzero(logits > least), np.flatnonzero(logits == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))
