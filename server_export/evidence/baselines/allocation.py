"""Which parts of a model learn, and how much of each: the largest sum of gains within a limit of costs.

A backward pass ends at a block, the depth; parts below it can't learn. Of a part's options one is taken, or
none. Depths and options have gains and costs, which add up.

    greedy         for every depth, options by gain for cost as long as they fit, then by gain
    evolutionary   from these on, by crossing and changing choices, as SparseBP searches (arXiv 2206.15472)
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from server_export.evidence.baselines.settings import SearchName

_POPULATION, _GENERATIONS, _CHILDREN = 32, 60, 32
# Parts of a child that are changed on average, and how often its depth is.
_CHANGES, _DEPTH_CHANGES = 2.0, 0.2


@dataclass(frozen=True)
class Option:
    """A way to let a part learn: `level` says how much of it, such as a share of its channels."""

    level: float
    gain: float
    cost: int


@dataclass(frozen=True)
class Part:
    """What can learn in a block, and in which ways."""

    name: str
    block: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Depth:
    """A backward pass that ends at a block, by itself."""

    gain: float
    cost: int


@dataclass(frozen=True)
class Choice:
    """A depth, and by the number of a part that of its option; the other parts don't learn."""

    depth: int
    taken: Mapping[int, int]

    @property
    def key(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The same of equal choices."""
        return self.depth, tuple(sorted(self.taken.items()))


@dataclass(frozen=True)
class Question:
    """What may learn, at what costs, within which limit.

    `depths` are those of all blocks from 0 on, of which `lowest` and those above may be taken.
    """

    depths: tuple[Depth, ...]
    parts: tuple[Part, ...]
    limit: int
    lowest: int = 0

    def levels(self, choice: Choice) -> dict[str, float]:
        """The level of every part that learns."""
        return {
            self.parts[number].name: self.parts[number].options[option].level
            for number, option in sorted(choice.taken.items())
        }

    def gain(self, choice: Choice) -> float:
        """Sum of a choice's gains."""
        gains = (self.parts[number].options[option].gain for number, option in sorted(choice.taken.items()))
        return math.fsum([self.depths[choice.depth].gain, *gains])

    def cost(self, choice: Choice) -> int:
        """Sum of a choice's costs."""
        costs = (self.parts[number].options[option].cost for number, option in choice.taken.items())
        return self.depths[choice.depth].cost + sum(costs)

    @property
    def fitting_depths(self) -> list[int]:
        """Depths that fit by themselves."""
        every = range(self.lowest, len(self.depths))
        return [depth for depth in every if self.depths[depth].cost <= self.limit]

    @cached_property
    def gaining(self) -> list[tuple[int, int]]:
        """Parts and options that gain something: by gain for cost, then all of them again by gain."""
        steps = [
            (number, place, option)
            for number, part in enumerate(self.parts)
            for place, option in enumerate(part.options)
            if option.gain > 0
        ]
        by_density = sorted(steps, key=lambda step: -step[2].gain / max(step[2].cost, 1e-30))
        by_gain = sorted(steps, key=lambda step: -step[2].gain)
        return [(number, place) for number, place, _ in (*by_density, *by_gain)]

    def filled(self, depth: int, taken: Mapping[int, int]) -> Choice:
        """A choice that fits, with what still fits added to it, and no deeper than it has to be."""
        more = dict(taken)
        cost = self.cost(Choice(depth, more))
        for number, place in self.gaining:
            part, option = self.parts[number], self.parts[number].options[place]
            before = part.options[more[number]] if number in more else Option(0.0, 0.0, 0)
            if part.block >= depth and option.gain > before.gain:
                raised = cost - before.cost + option.cost
                if raised <= self.limit:
                    more[number], cost = place, raised
        while self._ends_too_deep(depth, more):
            depth += 1
        return Choice(depth, more)

    def _ends_too_deep(self, depth: int, taken: Mapping[int, int]) -> bool:
        """Whether a backward that ends one block higher does as well."""
        if depth + 1 == len(self.depths) or any(self.parts[number].block == depth for number in taken):
            return False
        is_worse = self.depths[depth + 1].gain < self.depths[depth].gain
        return not is_worse and self.cost(Choice(depth + 1, taken)) <= self.limit


def choose(question: Question, search: SearchName = "greedy", seed: int = 0) -> Choice | None:
    """The choice that a search finds; None where nothing that fits has a gain.

    Evolution begins with the greedy choices, so that it is never worse than these.
    """
    found = [question.filled(depth, {}) for depth in question.fitting_depths]
    if search == "evolutionary" and found and question.gaining:
        found = _evolved(question, found, random.Random(seed))
    # Of equal ones the one that goes less deep.
    best = max(found, key=lambda choice: (question.gain(choice), choice.depth), default=None)
    return best if best is not None and question.gain(best) > 0 else None


def _evolved(question: Question, choices: list[Choice], chance: random.Random) -> list[Choice]:
    """The last of some generations: the best of parents and children live on."""

    def parent() -> Choice:
        return max(chance.choice(choices), chance.choice(choices), key=question.gain)

    for _ in range(_GENERATIONS):
        children = [_child(question, parent(), parent(), chance) for _ in range(_CHILDREN)]
        distinct = {choice.key: choice for choice in (*choices, *children)}
        ranked = sorted(distinct.values(), key=lambda each: (-question.gain(each), -each.depth, each.key))
        choices = ranked[:_POPULATION]
    return choices


def _child(question: Question, one: Choice, other: Choice, chance: random.Random) -> Choice:
    """Each part as one of the two has it, some changed; what doesn't fit left out, what fits added."""
    depth = chance.choice((one.depth, other.depth))
    if chance.random() < _DEPTH_CHANGES:
        depth = chance.choice(question.fitting_depths)
    options: dict[int, set[int]] = {}
    for number, place in question.gaining:
        options.setdefault(number, set()).add(place)
    taken: dict[int, int] = {}
    for number, places in sorted(options.items()):
        found = chance.choice((one, other)).taken.get(number)
        if chance.random() < _CHANGES / len(options):
            found = chance.choice((None, *sorted(places)))
        if found is not None and question.parts[number].block >= depth:
            taken[number] = found
    while question.cost(Choice(depth, taken)) > question.limit:
        del taken[chance.choice(sorted(taken))]
    return question.filled(depth, taken)


def single(question: Question, allowed: Sequence[bool]) -> Choice | None:
    """The one option, or the one allowed depth alone, of the largest gain that fits, even if none gains."""
    fitting = [Choice(depth, {}) for depth in question.fitting_depths if allowed[depth]]
    for number, part in enumerate(question.parts):
        choices = [Choice(part.block, {number: place}) for place in range(len(part.options))]
        fitting += [choice for choice in choices if question.cost(choice) <= question.limit]
    return max(fitting, key=lambda each: _own_gain(question, each), default=None)


def _own_gain(question: Question, choice: Choice) -> float:
    """The gain of an option without its depth's, or of a depth without options."""
    for number, place in choice.taken.items():
        return question.parts[number].options[place].gain
    return question.depths[choice.depth].gain
