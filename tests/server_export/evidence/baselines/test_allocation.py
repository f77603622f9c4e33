"""What learns is chosen within a limit: against all choices where they are few, and by what holds for any."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from server_export.evidence.baselines.allocation import Choice, Depth, Option, Part, Question, choose
from server_export.evidence.baselines.settings import SearchName

SEARCHES: tuple[SearchName, SearchName] = ("greedy", "evolutionary")


def question(limit: int, *parts: Part, depths: int = 1, lowest: int = 0) -> Question:
    """Backward passes of any depth are free."""
    return Question((Depth(0.0, 0),) * depths, parts, limit, lowest)


def levels(asked: Question, search: SearchName = "greedy") -> dict[str, float] | None:
    choice = choose(asked, search)
    return None if choice is None else asked.levels(choice)


def every(asked: Question) -> list[Choice]:
    """All choices that fit."""
    found = []
    for depth in range(asked.lowest, len(asked.depths)):
        ways = [[None, *range(len(part.options))] if part.block >= depth else [None] for part in asked.parts]
        for way in itertools.product(*ways):
            choice = Choice(depth, {number: place for number, place in enumerate(way) if place is not None})
            if asked.cost(choice) <= asked.limit:
                found.append(choice)
    return found


@st.composite
def questions(draw: st.DrawFn, parts: int, options: int) -> Question:
    blocks = draw(st.integers(1, 4))
    gains = st.floats(-2, 10).map(lambda gain: round(gain, 3))
    ways = st.lists(st.tuples(gains, st.integers(0, 60)), min_size=1, max_size=options)
    return Question(
        depths=tuple(
            Depth(draw(st.sampled_from([0.0, 0.0, 1.5])), draw(st.integers(0, 40))) for _ in range(blocks)
        ),
        parts=tuple(
            Part(
                f"layer{number}",
                draw(st.integers(0, blocks - 1)),
                tuple(Option(level, gain, cost) for level, (gain, cost) in enumerate(draw(ways), start=1)),
            )
            for number in range(draw(st.integers(0, parts)))
        ),
        limit=draw(st.integers(0, 120)),
        lowest=draw(st.integers(0, blocks - 1)),
    )


def test_what_gains_most_for_its_cost_is_taken() -> None:
    parts = (
        Part("dear", 0, (Option(1, 5.0, 10),)),
        Part("cheap", 0, (Option(1, 4.0, 2),)),
        Part("harmful", 0, (Option(1, -1.0, 1),)),
    )
    assert levels(question(10, *parts)) == {"cheap": 1}
    assert levels(question(12, *parts)) == {"dear": 1, "cheap": 1}


def test_a_part_is_raised_step_by_step() -> None:
    ways = (Option(1, 4.0, 2), Option(2, 6.0, 4), Option(4, 7.0, 8))
    assert levels(question(10, Part("one", 0, ways), Part("two", 0, ways))) == {"one": 2, "two": 2}


def test_depth_costs_and_lower_parts_must_be_worth_it() -> None:
    for gain, expected in ((2.0, (1, {"top": 1})), (4.0, (0, {"bottom": 1}))):
        parts = (Part("top", 1, (Option(1, 3.0, 2),)), Part("bottom", 0, (Option(1, gain, 1),)))
        asked = Question((Depth(0.0, 8), Depth(0.0, 2)), parts, 10)
        choice = choose(asked)
        assert choice is not None and (choice.depth, asked.levels(choice)) == expected


def test_no_depth_below_the_lowest_is_taken() -> None:
    parts = (Part("bottom", 0, (Option(1, 9.0, 1),)), Part("top", 1, (Option(1, 1.0, 1),)))
    assert levels(question(10, *parts, depths=2, lowest=1), "evolutionary") == {"top": 1}


def test_nothing_is_chosen_where_nothing_gains_or_fits() -> None:
    losing, gaining = Part("one", 0, (Option(1, -1.0, 1),)), Part("one", 0, (Option(1, 1.0, 2),))
    for search in SEARCHES:
        assert levels(question(10, losing), search) is None
        assert levels(question(1, gaining), search) is None
        assert levels(Question((Depth(1.0, 5),), (gaining,), 4), search) is None


def test_evolution_finds_what_greed_misses() -> None:
    # Greed takes the first, which leaves no room for the two others.
    parts = (Part(name, 0, (Option(1, gain, int(gain)),)) for name, gain in (("a", 6.1), ("b", 5), ("c", 5)))
    asked = question(10, *parts)
    assert levels(asked) == {"a": 1}
    assert levels(asked, "evolutionary") == {"b": 1, "c": 1}


@given(questions(parts=12, options=4), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_any_choice_is_within_the_limit_and_evolution_is_never_worse(asked: Question, seed: int) -> None:
    by_greed, by_evolution = choose(asked), choose(asked, "evolutionary", seed)
    assert (by_greed is None) == (by_evolution is None)
    if by_greed is not None and by_evolution is not None:
        for choice in (by_greed, by_evolution):
            assert asked.cost(choice) <= asked.limit and choice.depth >= asked.lowest
            assert all(asked.parts[number].block >= choice.depth for number in choice.taken)
        assert 0 < asked.gain(by_greed) <= asked.gain(by_evolution)
        assert choose(asked, "evolutionary", seed) == by_evolution


@given(questions(parts=4, options=2))
@settings(max_examples=40, deadline=None)
def test_few_choices_are_searched_to_the_best(asked: Question) -> None:
    best = max(map(asked.gain, every(asked)), default=0.0)
    choice = choose(asked, "evolutionary")
    assert (0.0 if choice is None else asked.gain(choice)) >= best * (1 - 1e-12)
