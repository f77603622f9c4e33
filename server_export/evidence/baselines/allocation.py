"""Choose which parts of a model are trained, and how much of each, within a cost limit.

A backward pass ends at a block, the depth; parts below it can't be trained. At most one option of a part is
chosen. Gains and costs of the depth and of the options add up.

    greedy         for every depth, adds options by gain per cost while they fit, then by gain
    evolutionary   starts with the greedy choices and crosses and mutates them, as SparseBP (arXiv 2206.15472)
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from server_export.evidence.baselines.settings import SearchName

_POPULATION, _GENERATIONS, _CHILDREN = 32, 60, 32
# Mean number of parts that are mutated in a child, and the probability that its depth is.
_CHANGES, _DEPTH_CHANGES = 2.0, 0.2


@dataclass(frozen=True, order=True)
class Option:
    """One way to train a part of a block.

    `level` says how much of the part is trained, such as a share of its channels.
    """

    part: str
    block: int
    level: float
    gain: float
    cost: int


@dataclass(frozen=True)
class Depth:
    """Gain and cost of a backward pass that ends at a block, without any option."""

    gain: float
    cost: int


@dataclass(frozen=True)
class Allocation:
    """A depth and the options above it, at most one for each part."""

    depth: int
    options: frozenset[Option] = frozenset()


@dataclass(frozen=True)
class AllocationProblem:
    """Depths and options to choose from, and the cost limit; `depths` has one entry for each block from 0."""

    depths: tuple[Depth, ...]
    options: tuple[Option, ...]
    limit: int

    def gain(self, choice: Allocation) -> float:
        """Return the sum of an allocation's gains."""
        return math.fsum([self.depths[choice.depth].gain, *(option.gain for option in choice.options)])

    def cost(self, choice: Allocation) -> int:
        """Return the sum of an allocation's costs."""
        return self.depths[choice.depth].cost + sum(option.cost for option in choice.options)

    @property
    def fitting_depths(self) -> list[int]:
        """Depths whose own cost is within the limit."""
        return [number for number, depth in enumerate(self.depths) if depth.cost <= self.limit]

    @cached_property
    def gaining_options(self) -> list[Option]:
        """Options with a positive gain: sorted by gain per cost, then all of them again sorted by gain."""
        options = [option for option in self.options if option.gain > 0]
        by_density = sorted(options, key=lambda option: -option.gain / max(option.cost, 1e-30))
        return by_density + sorted(options, key=lambda option: -option.gain)

    @cached_property
    def options_by_part(self) -> dict[str, list[Option]]:
        """Options with a positive gain, by part."""
        options_by_part: dict[str, list[Option]] = {}
        for option in sorted(set(self.gaining_options)):
            options_by_part.setdefault(option.part, []).append(option)
        return options_by_part

    def fill(self, depth: int, options: Iterable[Option] = ()) -> Allocation:
        """Return an allocation within the limit, with all options that still fit, as shallow as possible."""
        chosen = {option.part: option for option in options}
        cost = self.cost(Allocation(depth, frozenset(chosen.values())))
        for option in self.gaining_options:
            before = chosen.get(option.part, Option(option.part, option.block, 0.0, 0.0, 0))
            raised = cost - before.cost + option.cost
            if option.block >= depth and option.gain > before.gain and raised <= self.limit:
                chosen[option.part], cost = option, raised
        choice = Allocation(depth, frozenset(chosen.values()))
        while self._ends_too_deep(choice):
            choice = Allocation(choice.depth + 1, choice.options)
        return choice

    def _ends_too_deep(self, choice: Allocation) -> bool:
        """Return whether a backward pass that ends one block higher gains as much."""
        depth, above = choice.depth, choice.depth + 1
        if above == len(self.depths) or any(option.block == depth for option in choice.options):
            return False
        is_worse = self.depths[above].gain < self.depths[depth].gain
        return not is_worse and self.cost(Allocation(above, choice.options)) <= self.limit


def choose(problem: AllocationProblem, search: SearchName = "greedy", seed: int = 0) -> Allocation | None:
    """Return the best allocation that a search finds, or None if no allocation within the limit has a gain.

    The evolutionary search starts with the greedy allocations, so its result is never worse.
    """
    choices = [problem.fill(depth) for depth in problem.fitting_depths]
    if search == "evolutionary" and choices and problem.gaining_options:
        choices = _evolve(problem, choices, random.Random(seed))
    # Among allocations with equal gains, the shallowest is cheapest to run.
    best = max(choices, key=lambda choice: (problem.gain(choice), choice.depth), default=None)
    return best if best is not None and problem.gain(best) > 0 else None


def _evolve(problem: AllocationProblem, choices: list[Allocation], rng: random.Random) -> list[Allocation]:
    """Return the last generation; the best of parents and children form the next one."""

    def parent() -> Allocation:
        return max(rng.choice(choices), rng.choice(choices), key=problem.gain)

    for _ in range(_GENERATIONS):
        children = [_breed(problem, parent(), parent(), rng) for _ in range(_CHILDREN)]
        distinct = {*choices, *children}
        ranked = sorted(distinct, key=lambda each: (-problem.gain(each), -each.depth, sorted(each.options)))
        choices = ranked[:_POPULATION]
    return choices


def _breed(
    problem: AllocationProblem, first: Allocation, second: Allocation, rng: random.Random
) -> Allocation:
    """Return a child of two allocations, mutated, reduced to the limit and filled up."""
    depth = rng.choice((first.depth, second.depth))
    if rng.random() < _DEPTH_CHANGES:
        depth = rng.choice(problem.fitting_depths)
    parents = [{option.part: option for option in each.options} for each in (first, second)]
    chosen: list[Option] = []
    for part, options in problem.options_by_part.items():
        option = rng.choice(parents).get(part)
        if rng.random() < _CHANGES / len(problem.options_by_part):
            option = rng.choice((None, *options))
        if option is not None and option.block >= depth:
            chosen.append(option)
    while problem.cost(Allocation(depth, frozenset(chosen))) > problem.limit:
        chosen.remove(rng.choice(chosen))
    return problem.fill(depth, chosen)
