"""Log-probabilities of tokens: of those of a prompt, and of those that were generated.

They are the model's own, before temperature, filters, penalties and constraints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prge.engine import FloatArray

# The log-probability of an impossible token, which JSON can write.
LEAST = -9999.0


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token after the tokens before it.

    Attributes:
        token: the token.
        logprob: its natural logarithm of the probability.
        top: the most likely tokens with their log-probabilities, in descending order.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprob(logits: FloatArray, token: int, count: int) -> TokenLogprob:
    """Return the log-probability of a token.

    Args:
        logits: logits of all tokens, f32 [vocabulary].
        token: the token.
        count: number of most likely tokens to return.
    """
    largest = logits.max()
    total = largest + np.log(np.exp(logits - largest, dtype=np.float64).sum())

    def logprob(identifier: int) -> float:
        return max(float(logits[identifier] - total), LEAST)

    count = min(count, len(logits))
    top = np.argpartition(-logits, count - 1)[:count] if count else np.array([], np.int64)
    top = top[np.lexsort((top, -logits[top]))]
    return TokenLogprob(token, logprob(token), tuple((each, logprob(each)) for each in top.tolist()))
