"""Tokens on the way to experts and back: what a router's choice comes to, in float32 and in one order.

    before   [what experts see, shares, index, rest]        behind   [what they say, rest]

An expert takes what it sees of a token with the token's share behind it, and answers its part of the sum:
the product with the share is inside of its program, and so are all derivatives. Tokens are gathered, answers
added up, one expert after the other, so that a sum's bits depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prge.engine import FloatArray, IntArray

# An expert's number, what is its tokens' [..., tokens, numbers] of each array given -> its answers.
ExpertFunction = Callable[..., Sequence[FloatArray]]


@dataclass(frozen=True)
class Routing:
    """Where the parts of a state lie.

    Attributes:
        entering, leaving: widths of the state before experts and behind them.
        given, said: numbers that an expert takes of a token, its share among them, and answers.
        count: experts of the layer.
    """

    entering: int
    leaving: int
    given: int
    said: int
    count: int

    @property
    def seen(self) -> int:
        """Numbers that experts see of a token."""
        return self.given - 1

    @property
    def rest(self) -> int:
        """Numbers that pass by."""
        return self.leaving - self.said

    @property
    def read_width(self) -> int:
        """Numbers of a state that experts and their way back read."""
        return self.entering - self.rest

    @property
    def chosen(self) -> int:
        """Experts of a token."""
        return (self.entering - self.seen - self.rest) // 2

    @property
    def is_consistent(self) -> bool:
        """Whether the widths are those of such a layer."""
        return (
            min(self.seen, self.said, self.chosen) >= 1
            and self.rest >= 0
            and self.entering == self.seen + 2 * self.chosen + self.rest
        )

    def choices(self, states: FloatArray) -> Iterator[tuple[int, IntArray, IntArray]]:
        """The experts that states [tokens, entering] ask for, in order: number, tokens, places of shares.

        Raises:
            RuntimeError: the states ask for an expert that isn't there.
        """
        index = states[:, self.seen + self.chosen : self.seen + 2 * self.chosen]
        asked = np.unique(index)
        if not np.isin(asked, np.arange(self.count)).all():
            raise RuntimeError(f"a router chose expert {asked[-1]}, there are {self.count}")
        for expert in asked.astype(int).tolist():
            # A token has an expert once: it chose the largest of its scores.
            tokens, places = np.nonzero(index == expert)
            yield expert, tokens, self.seen + places

    def gathered(self, states: FloatArray, tokens: IntArray, places: IntArray) -> FloatArray:
        """What an expert takes of states [..., tokens, entering]."""
        return np.concatenate([states[..., tokens, : self.seen], states[..., tokens, places][..., None]], -1)

    def behind(self, states: FloatArray) -> FloatArray:
        """States [..., tokens, leaving] to which no expert has added."""
        result = np.zeros((*states.shape[:-1], self.leaving), np.float32)
        result[..., self.said :] = states[..., self.read_width :]
        return result

    def forward(self, states: FloatArray, run: ExpertFunction, *tangents: FloatArray) -> list[FloatArray]:
        """States behind the experts [tokens, leaving], and tangents [queries, tokens, leaving] of them.

        Args:
            states: f32 [tokens, entering].
            run: a forward pass of an expert.
            tangents: f32 [queries, tokens, entering]; the choice has none.
        """
        found = [self.behind(each) for each in (states, *tangents)]
        for expert, tokens, places in self.choices(states):
            given = [self.gathered(each, tokens, places) for each in (states, *tangents)]
            for whole, said in zip(found, run(expert, *given), strict=True):
                whole[..., tokens, : self.said] += said
        return found

    def backward(self, states: FloatArray, slope: FloatArray, run: ExpertFunction) -> FloatArray:
        """Slope [tokens, entering] of the states before the experts, from that [tokens, leaving] behind.

        Args:
            states: f32 [tokens, entering]; what passes by may be left out.
            slope: of a loss.
            run: the way back of an expert, of states and slope.
        """
        found = np.zeros((len(states), self.entering), np.float32)
        found[:, self.read_width :] = slope[:, self.said :]
        for expert, tokens, places in self.choices(states):
            (own,) = run(expert, self.gathered(states, tokens, places), slope[tokens, : self.said])
            found[tokens, : self.seen] += own[:, :-1]
            found[tokens, places] = own[:, -1]
        return found
