"""Which parts of a model learn, and how much of each: the largest sum of gains within a limit of costs.

A backward pass ends at a block, the depth; parts below it can't learn. Of a part's options one is taken, or
none. Depths and options have gains and costs, which add up.

    greedy         for every depth, options by gain for cost as long as they fit, then by gain
    evolutionary   from these on, by crossing and changing choices, as SparseBP searches (arXiv 2206.15472)
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from server_export.evidence.baselines.settings import SearchName

_POPULATION, _GENERATIONS, _CHILDREN = 32, 60, 32
# Parts of a child that are changed on average, and how often its depth is.
_CHANGES, _DEPTH_CHANGES = 2.0, 0.2


@dataclass(frozen=True, order=True)
class Option:
    """A way to let a part of a block learn: `level` says how much of it, such as a share of its channels."""

    part: str
    block: int
    level: float
    gain: float
    cost: int


@dataclass(frozen=True)
class Depth:
    """A backward pass that ends at a block, by itself."""

    gain: float
    cost: int


@dataclass(frozen=True)
class Allocation:
    """A depth, and what learns above it: one option of a part at most."""

    depth: int
    options: frozenset[Option] = frozenset()


@dataclass(frozen=True)
class Question:
    """What may learn, at what costs, within which limit; `depths` are those of all blocks from 0 on."""

    depths: tuple[Depth, ...]
    options: tuple[Option, ...]
    limit: int

    def gain(self, choice: Allocation) -> float:
        """Sum of a choice's gains."""
        return math.fsum([self.depths[choice.depth].gain, *(option.gain for option in choice.options)])

    def cost(self, choice: Allocation) -> int:
        """Sum of a choice's costs."""
        return self.depths[choice.depth].cost + sum(option.cost for option in choice.options)

    @property
    def fitting_depths(self) -> list[int]:
        """Depths that fit by themselves."""
        return [number for number, depth in enumerate(self.depths) if depth.cost <= self.limit]

    @cached_property
    def gaining(self) -> list[Option]:
        """Options that gain something: by gain for cost, then all of them again by gain."""
        options = [option for option in self.options if option.gain > 0]
        by_density = sorted(options, key=lambda option: -option.gain / max(option.cost, 1e-30))
        return by_density + sorted(options, key=lambda option: -option.gain)

    @cached_property
    def ways(self) -> dict[str, list[Option]]:
        """Options that gain something, by their part."""
        ways: dict[str, list[Option]] = {}
        for option in sorted(set(self.gaining)):
            ways.setdefault(option.part, []).append(option)
        return ways

    def filled(self, depth: int, options: Iterable[Option] = ()) -> Allocation:
        """A choice that fits, with what still fits added to it, and no deeper than it has to be."""
        taken = {option.part: option for option in options}
        cost = self.cost(Allocation(depth, frozenset(taken.values())))
        for option in self.gaining:
            before = taken.get(option.part, Option(option.part, option.block, 0.0, 0.0, 0))
            raised = cost - before.cost + option.cost
            if option.block >= depth and option.gain > before.gain and raised <= self.limit:
                taken[option.part], cost = option, raised
        choice = Allocation(depth, frozenset(taken.values()))
        while self._ends_too_deep(choice):
            choice = Allocation(choice.depth + 1, choice.options)
        return choice

    def _ends_too_deep(self, choice: Allocation) -> bool:
        """Whether a backward that ends one block higher does as well."""
        depth, above = choice.depth, choice.depth + 1
        if above == len(self.depths) or any(option.block == depth for option in choice.options):
            return False
        is_worse = self.depths[above].gain < self.depths[depth].gain
        return not is_worse and self.cost(Allocation(above, choice.options)) <= self.limit


def choose(question: Question, search: SearchName = "greedy", seed: int = 0) -> Allocation | None:
    """The choice that a search finds; None where nothing that fits has a gain.

    Evolution begins with the greedy choices, so that it is never worse than these.
    """
    choices = [question.filled(depth) for depth in question.fitting_depths]
    if search == "evolutionary" and choices and question.gaining:
        choices = _evolved(question, choices, random.Random(seed))
    # Of equal ones the one that goes less deep.
    best = max(choices, key=lambda choice: (question.gain(choice), choice.depth), default=None)
    return best if best is not None and question.gain(best) > 0 else None


def _evolved(question: Question, choices: list[Allocation], chance: random.Random) -> list[Allocation]:
    """The last of some generations: the best of parents and children live on."""

    def parent() -> Allocation:
        return max(chance.choice(choices), chance.choice(choices), key=question.gain)

    for _ in range(_GENERATIONS):
        children = [_child(question, parent(), parent(), chance) for _ in range(_CHILDREN)]
        distinct = {*choices, *children}
        ranked = sorted(distinct, key=lambda one: (-question.gain(one), -one.depth, sorted(one.options)))
        choices = ranked[:_POPULATION]
    return choices


def _child(question: Question, one: Allocation, other: Allocation, chance: random.Random) -> Allocation:
    """Each part as one of the two has it, some changed; what doesn't fit left out, what fits added."""
    depth = chance.choice((one.depth, other.depth))
    if chance.random() < _DEPTH_CHANGES:
        depth = chance.choice(question.fitting_depths)
    parents = [{option.part: option for option in each.options} for each in (one, other)]
    taken: list[Option] = []
    for part, ways in question.ways.items():
        option = chance.choice(parents).get(part)
        if chance.random() < _CHANGES / len(question.ways):
            option = chance.choice((None, *ways))
        if option is not None and option.block >= depth:
            taken.append(option)
    while question.cost(Allocation(depth, frozenset(taken))) > question.limit:
        taken.remove(chance.choice(taken))
    return question.filled(depth, taken)
