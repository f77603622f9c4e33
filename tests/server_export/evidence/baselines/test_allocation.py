"""Allocations within a limit: compared with all allocations if they are few, and by general properties."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from server_export.evidence.baselines.allocation import Allocation, AllocationProblem, Depth, Option, choose
from server_export.evidence.baselines.settings import SearchName

SEARCHES: tuple[SearchName, SearchName] = ("greedy", "evolutionary")


def make_problem(limit: int, *options: Option, depths: int = 1) -> AllocationProblem:
    """Return a problem in which backward passes of any depth are free."""
    return AllocationProblem((Depth(0.0, 0),) * depths, options, limit)


def levels(problem: AllocationProblem, search: SearchName = "greedy") -> dict[str, float] | None:
    choice = choose(problem, search)
    return None if choice is None else {option.part: option.level for option in choice.options}


def every(problem: AllocationProblem) -> list[Allocation]:
    """Return all allocations within the limit."""
    result = []
    for depth in range(len(problem.depths)):
        options_by_part: dict[str, list[Option | None]] = {}
        for option in problem.options:
            if option.block >= depth:
                options_by_part.setdefault(option.part, [None]).append(option)
        for combination in itertools.product(*options_by_part.values()):
            choice = Allocation(depth, frozenset(option for option in combination if option is not None))
            if problem.cost(choice) <= problem.limit:
                result.append(choice)
    return result


@st.composite
def problems(draw: st.DrawFn, parts: int, options: int) -> AllocationProblem:
    blocks = draw(st.integers(1, 4))
    gains = st.floats(-2, 10).map(lambda gain: round(gain, 3))
    options_by_part = st.lists(st.tuples(gains, st.integers(0, 60)), min_size=1, max_size=options)
    depths = [Depth(draw(st.sampled_from([0.0, 0.0, 1.5])), draw(st.integers(0, 40))) for _ in range(blocks)]
    options_of_parts = []
    for number in range(draw(st.integers(0, parts))):
        block = draw(st.integers(0, blocks - 1))
        for level, (gain, cost) in enumerate(draw(options_by_part), start=1):
            options_of_parts.append(Option(f"layer{number}", block, level, gain, cost))
    return AllocationProblem(tuple(depths), tuple(options_of_parts), draw(st.integers(0, 120)))


def test_the_largest_gain_for_its_cost_is_chosen() -> None:
    options = Option("dear", 0, 1, 5.0, 10), Option("cheap", 0, 1, 4.0, 2), Option("harmful", 0, 1, -1.0, 1)
    assert levels(make_problem(10, *options)) == {"cheap": 1}
    assert levels(make_problem(12, *options)) == {"dear": 1, "cheap": 1}


def test_a_part_is_raised_step_by_step() -> None:
    options_by_part = (1, 4.0, 2), (2, 6.0, 4), (4, 7.0, 8)
    options = [Option(part, 0, *option) for part in ("one", "two") for option in options_by_part]
    assert levels(make_problem(10, *options)) == {"one": 2, "two": 2}


def test_depth_costs_and_lower_parts_must_be_worth_it() -> None:
    for gain, expected in ((2.0, (1, "top")), (4.0, (0, "bottom"))):
        options = (Option("top", 1, 1, 3.0, 2), Option("bottom", 0, 1, gain, 1))
        choice = choose(AllocationProblem((Depth(0.0, 8), Depth(0.0, 2)), options, 10))
        assert choice is not None
        assert (choice.depth, *(option.part for option in choice.options)) == expected


def test_nothing_is_chosen_where_nothing_gains_or_fits() -> None:
    losing, gaining = Option("one", 0, 1, -1.0, 1), Option("one", 0, 1, 1.0, 2)
    for search in SEARCHES:
        assert levels(make_problem(10, losing), search) is None
        assert levels(make_problem(1, gaining), search) is None
        assert levels(AllocationProblem((Depth(1.0, 5),), (gaining,), 4), search) is None


def test_evolution_finds_allocations_that_greed_misses() -> None:
    # The greedy search chooses the first, which leaves no room for the two others.
    options = [Option(part, 0, 1, gain, int(gain)) for part, gain in (("a", 6.1), ("b", 5.0), ("c", 5.0))]
    problem = make_problem(10, *options)
    assert levels(problem) == {"a": 1}
    assert levels(problem, "evolutionary") == {"b": 1, "c": 1}


@given(problems(parts=12, options=4), st.integers(0, 3))
@settings(max_examples=40)
def test_any_choice_is_within_the_limit_and_evolution_is_never_worse(
    problem: AllocationProblem, seed: int
) -> None:
    by_greed, by_evolution = choose(problem), choose(problem, "evolutionary", seed)
    assert (by_greed is None) == (by_evolution is None)
    if by_greed is not None and by_evolution is not None:
        for choice in (by_greed, by_evolution):
            assert problem.cost(choice) <= problem.limit
            assert all(option.block >= choice.depth for option in choice.options)
            assert len({option.part for option in choice.options}) == len(choice.options)
        assert 0 < problem.gain(by_greed) <= problem.gain(by_evolution)
        assert choose(problem, "evolutionary", seed) == by_evolution


@given(problems(parts=4, options=2))
@settings(max_examples=40)
def test_few_choices_are_searched_exhaustively(problem: AllocationProblem) -> None:
    best = max(map(problem.gain, every(problem)), default=0.0)
    choice = choose(problem, "evolutionary")
    assert (0.0 if choice is None else problem.gain(choice)) >= best * (1 - 1e-12)
