"""What learns is chosen within a limit: against all choices where they are few, and by what holds for any."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from server_export.evidence.baselines.allocation import Allocation, Depth, Option, Question, choose
from server_export.evidence.baselines.settings import SearchName

SEARCHES: tuple[SearchName, SearchName] = ("greedy", "evolutionary")


def question(limit: int, *options: Option, depths: int = 1) -> Question:
    """Backward passes of any depth are free."""
    return Question((Depth(0.0, 0),) * depths, options, limit)


def levels(asked: Question, search: SearchName = "greedy") -> dict[str, float] | None:
    choice = choose(asked, search)
    return None if choice is None else {option.part: option.level for option in choice.options}


def every(asked: Question) -> list[Allocation]:
    """All choices that fit."""
    found = []
    for depth in range(len(asked.depths)):
        ways: dict[str, list[Option | None]] = {}
        for option in asked.options:
            if option.block >= depth:
                ways.setdefault(option.part, [None]).append(option)
        for way in itertools.product(*ways.values()):
            choice = Allocation(depth, frozenset(option for option in way if option is not None))
            if asked.cost(choice) <= asked.limit:
                found.append(choice)
    return found


@st.composite
def questions(draw: st.DrawFn, parts: int, options: int) -> Question:
    blocks = draw(st.integers(1, 4))
    gains = st.floats(-2, 10).map(lambda gain: round(gain, 3))
    ways = st.lists(st.tuples(gains, st.integers(0, 60)), min_size=1, max_size=options)
    depths = [Depth(draw(st.sampled_from([0.0, 0.0, 1.5])), draw(st.integers(0, 40))) for _ in range(blocks)]
    made = []
    for number in range(draw(st.integers(0, parts))):
        block = draw(st.integers(0, blocks - 1))
        for level, (gain, cost) in enumerate(draw(ways), start=1):
            made.append(Option(f"layer{number}", block, level, gain, cost))
    return Question(tuple(depths), tuple(made), draw(st.integers(0, 120)))


def test_what_gains_most_for_its_cost_is_taken() -> None:
    options = Option("dear", 0, 1, 5.0, 10), Option("cheap", 0, 1, 4.0, 2), Option("harmful", 0, 1, -1.0, 1)
    assert levels(question(10, *options)) == {"cheap": 1}
    assert levels(question(12, *options)) == {"dear": 1, "cheap": 1}


def test_a_part_is_raised_step_by_step() -> None:
    ways = (1, 4.0, 2), (2, 6.0, 4), (4, 7.0, 8)
    options = [Option(part, 0, *way) for part in ("one", "two") for way in ways]
    assert levels(question(10, *options)) == {"one": 2, "two": 2}


def test_depth_costs_and_lower_parts_must_be_worth_it() -> None:
    for gain, expected in ((2.0, (1, "top")), (4.0, (0, "bottom"))):
        options = (Option("top", 1, 1, 3.0, 2), Option("bottom", 0, 1, gain, 1))
        choice = choose(Question((Depth(0.0, 8), Depth(0.0, 2)), options, 10))
        assert choice is not None
        assert (choice.depth, *(option.part for option in choice.options)) == expected


def test_nothing_is_chosen_where_nothing_gains_or_fits() -> None:
    losing, gaining = Option("one", 0, 1, -1.0, 1), Option("one", 0, 1, 1.0, 2)
    for search in SEARCHES:
        assert levels(question(10, losing), search) is None
        assert levels(question(1, gaining), search) is None
        assert levels(Question((Depth(1.0, 5),), (gaining,), 4), search) is None


def test_evolution_finds_what_greed_misses() -> None:
    # Greed takes the first, which leaves no room for the two others.
    options = [Option(part, 0, 1, gain, int(gain)) for part, gain in (("a", 6.1), ("b", 5.0), ("c", 5.0))]
    asked = question(10, *options)
    assert levels(asked) == {"a": 1}
    assert levels(asked, "evolutionary") == {"b": 1, "c": 1}


@given(questions(parts=12, options=4), st.integers(0, 3))
@settings(max_examples=40)
def test_any_choice_is_within_the_limit_and_evolution_is_never_worse(asked: Question, seed: int) -> None:
    by_greed, by_evolution = choose(asked), choose(asked, "evolutionary", seed)
    assert (by_greed is None) == (by_evolution is None)
    if by_greed is not None and by_evolution is not None:
        for choice in (by_greed, by_evolution):
            assert asked.cost(choice) <= asked.limit
            assert all(option.block >= choice.depth for option in choice.options)
            assert len({option.part for option in choice.options}) == len(choice.options)
        assert 0 < asked.gain(by_greed) <= asked.gain(by_evolution)
        assert choose(asked, "evolutionary", seed) == by_evolution


@given(questions(parts=4, options=2))
@settings(max_examples=40)
def test_few_choices_are_searched_to_the_best(asked: Question) -> None:
    best = max(map(asked.gain, every(asked)), default=0.0)
    choice = choose(asked, "evolutionary")
    assert (0.0 if choice is None else asked.gain(choice)) >= best * (1 - 1e-12)
