"""Which parts of a model learn, and how much of each: the largest sum of gains within limits of its costs.

A backward pass ends at a block, the depth; parts below it can't learn. Of a part's options one is taken, or
none. Depths and options have gains, which add up, and costs, a whole number for each limit.

    greedy         for every depth, the steps of most gain for their cost (Sinha & Zoltners 1979)
    evolutionary   from these on, by crossing and changing choices, as SparseBP searches (arXiv 2206.15472)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from server_export.evidence.baselines.settings import SearchName

Costs = tuple[int, ...]
# By part, the number of its option that is taken; of the others none.
Taken = dict[int, int]

_POPULATION, _GENERATIONS, _CHILDREN = 32, 60, 32
# Parts of a child that are changed on average, and how often its depth is.
_CHANGES, _DEPTH_CHANGES = 2.0, 0.2


@dataclass(frozen=True)
class Option:
    """A way to let a part learn: `level` says how much of it, such as a rank."""

    level: float
    gain: float
    costs: Costs


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
    costs: Costs


@dataclass(frozen=True)
class Choice:
    """A depth, and the level of every part that learns, with the sums of gains and costs."""

    depth: int
    levels: Mapping[str, float]
    gain: float
    costs: Costs


@dataclass(frozen=True)
class Question:
    """What may learn, at what costs, within which limits; `depths` are those of all blocks from 0 on, of
    which `lowest` and those above may be taken."""

    depths: tuple[Depth, ...]
    parts: tuple[Part, ...]
    limits: Costs
    lowest: int = 0

    def choice(self, depth: int, taken: Mapping[int, int]) -> Choice:
        """What a depth and options come to."""
        options = {number: self.parts[number].options[taken[number]] for number in sorted(taken)}
        return Choice(
            depth,
            {self.parts[number].name: option.level for number, option in options.items()},
            math.fsum([self.depths[depth].gain, *(option.gain for option in options.values())]),
            self.costs(depth, taken),
        )

    def costs(self, depth: int, taken: Mapping[int, int]) -> Costs:
        """Sums of a depth and options."""
        options = (self.parts[number].options[option].costs for number, option in taken.items())
        return tuple(map(sum, zip(self.depths[depth].costs, *options, strict=True)))

    def fits(self, costs: Costs) -> bool:
        """Whether costs are within the limits."""
        return all(cost <= limit for cost, limit in zip(costs, self.limits, strict=True))

    def weight(self, costs: Costs) -> float:
        """Costs as one number: the sum of their shares of the limits."""
        return sum(cost / max(limit, 1) for cost, limit in zip(costs, self.limits, strict=True))

    @cached_property
    def steps(self) -> list[tuple[int, int | None, int]]:
        """Part, option before (None: none) and option after, the most gain for its cost first.

        A part's options that another one or a mixture of two beats are no steps: so the steps of a part come
        in its own order.
        """
        found = []
        for number, part in enumerate(self.parts):
            before: int | None = None
            for option in _worthwhile(part.options, self.weight):
                gain, weight = part.options[option].gain, self.weight(part.options[option].costs)
                if before is not None:
                    gain -= part.options[before].gain
                    weight -= self.weight(part.options[before].costs)
                found.append((-gain / max(weight, 1e-30), number, before, option))
                before = option
        # Of equal steps the first part's comes first; a part's own are in order already.
        found.sort(key=lambda step: step[0])
        return [step[1:] for step in found]


def choose(question: Question, search: SearchName = "greedy", seed: int = 0) -> Choice | None:
    """The choice that a search finds; None where nothing that fits has a gain."""
    return evolutionary(question, seed) if search == "evolutionary" else greedy(question)


def greedy(question: Question) -> Choice | None:
    """The best of each depth's greedy choices; of equal ones the one that goes less deep."""
    return _best(question, _greedy_by_depth(question))


def evolutionary(question: Question, seed: int = 0) -> Choice | None:
    """The best choice of an evolution that begins with the greedy ones; never worse than these."""
    evolution = _Evolution(question, random.Random(seed))
    return _best(question, evolution.run(list(_greedy_by_depth(question))))


@dataclass
class _Plan:
    depth: int
    taken: Taken
    gain: float = field(default=0.0, compare=False)

    @property
    def key(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        return self.depth, tuple(sorted(self.taken.items()))


def _best(question: Question, plans: Iterable[_Plan]) -> Choice | None:
    best = max(plans, key=lambda plan: (plan.gain, plan.depth), default=None)
    return question.choice(best.depth, best.taken) if best is not None and best.gain > 0 else None


def _greedy_by_depth(question: Question) -> Iterator[_Plan]:
    """Of every depth that fits by itself."""
    for depth in range(question.lowest, len(question.depths)):
        if question.fits(question.depths[depth].costs):
            yield _filled(question, depth, {})


def _worthwhile(options: Sequence[Option], weight: Callable[[Costs], float]) -> list[int]:
    """Numbers of the options on the upper hull of gains over costs, from none on, the cheapest first."""
    hull: list[tuple[float, float, int]] = []
    points = sorted((weight(option.costs), -option.gain, number) for number, option in enumerate(options))
    for cost, loss, number in points:
        gain = -loss
        if not gain > (hull[-1][1] if hull else 0.0):
            continue
        while hull:
            before, lower = hull[-1][:2], hull[-2][:2] if len(hull) > 1 else (0.0, 0.0)
            if (before[1] - lower[1]) * (cost - before[0]) > (gain - before[1]) * (before[0] - lower[0]):
                break
            hull.pop()
        hull.append((cost, gain, number))
    return [number for _, _, number in hull]


def _filled(question: Question, depth: int, taken: Taken) -> _Plan:
    """A choice that fits with what still fits added to it, by gain for cost, then by gain alone."""
    taken, costs = dict(taken), question.costs(depth, taken)
    for number, before, after in question.steps:
        part = question.parts[number]
        if part.block < depth or taken.get(number) != before:
            continue
        raised = _raised(costs, part, before, after)
        if question.fits(raised):
            taken[number], costs = after, raised
    for number in dict.fromkeys(step[0] for step in question.steps):
        part, now = question.parts[number], taken.get(number)
        if part.block < depth:
            continue
        own = 0.0 if now is None else part.options[now].gain
        better = sorted(
            (-option.gain, place) for place, option in enumerate(part.options) if option.gain > own
        )
        for _, place in better:
            raised = _raised(costs, part, now, place)
            if question.fits(raised):
                taken[number], costs = place, raised
                break
    while _ends_too_deep(question, depth, taken):
        depth += 1
    return _Plan(depth, taken, question.choice(depth, taken).gain)


def _ends_too_deep(question: Question, depth: int, taken: Taken) -> bool:
    """Whether a backward that ends one block higher does as well."""
    if depth + 1 == len(question.depths) or any(question.parts[number].block == depth for number in taken):
        return False
    is_worse = question.depths[depth + 1].gain < question.depths[depth].gain
    return not is_worse and question.fits(question.costs(depth + 1, taken))


def _raised(costs: Costs, part: Part, before: int | None, after: int) -> Costs:
    """Costs when a part takes another option."""
    more = part.options[after].costs
    less = (0,) * len(costs) if before is None else part.options[before].costs
    return tuple(cost + up - down for cost, up, down in zip(costs, more, less, strict=True))


class _Evolution:
    """Generations of choices that fit; the best of parents and children live on."""

    def __init__(self, question: Question, chance: random.Random) -> None:
        self._question = question
        self._chance = chance
        gaining = ((number, part) for number, part in enumerate(question.parts))
        self._options = {
            number: found
            for number, part in gaining
            if (found := [place for place, option in enumerate(part.options) if option.gain > 0])
        }
        self._depths = [
            depth
            for depth in range(question.lowest, len(question.depths))
            if question.fits(question.depths[depth].costs)
        ]

    def run(self, plans: list[_Plan]) -> list[_Plan]:
        """The last generation, of plans of the first."""
        if not plans or not self._options:
            return plans
        for _ in range(_GENERATIONS):
            children = [self._child(self._parent(plans), self._parent(plans)) for _ in range(_CHILDREN)]
            distinct = {plan.key: plan for plan in (*plans, *children)}
            plans = sorted(distinct.values(), key=lambda plan: (-plan.gain, -plan.depth, plan.key))
            plans = plans[:_POPULATION]
        return plans

    def _parent(self, plans: Sequence[_Plan]) -> _Plan:
        """The better of two by chance."""
        return max(self._chance.choice(plans), self._chance.choice(plans), key=lambda plan: plan.gain)

    def _child(self, one: _Plan, other: _Plan) -> _Plan:
        """Each part as one of the two has it, some changed; what doesn't fit left out, what fits added."""
        chance, question = self._chance, self._question
        depth = chance.choice((one.depth, other.depth))
        if chance.random() < _DEPTH_CHANGES:
            depth = chance.choice(self._depths)
        taken: Taken = {}
        for number, options in self._options.items():
            found = chance.choice((one, other)).taken.get(number)
            if chance.random() < _CHANGES / len(self._options):
                found = chance.choice((None, *options))
            if found is not None and question.parts[number].block >= depth:
                taken[number] = found
        costs = question.costs(depth, taken)
        while not question.fits(costs):
            number = chance.choice(sorted(taken))
            less = question.parts[number].options[taken.pop(number)].costs
            costs = tuple(cost - down for cost, down in zip(costs, less, strict=True))
        return _filled(question, depth, taken)
