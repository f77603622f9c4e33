"""What learns is chosen within limits: against all choices where they are few, and by what holds for any."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from server_export.evidence.baselines.allocation import (
    Choice,
    Depth,
    Option,
    Part,
    Question,
    choose,
    evolutionary,
    greedy,
)


def option(level: float, gain: float, *costs: int) -> Option:
    return Option(level, gain, costs)


def free(depths: int, limits: int = 1) -> tuple[Depth, ...]:
    return (Depth(0.0, (0,) * limits),) * depths


def every(question: Question) -> list[Choice]:
    """All choices that fit."""
    found = []
    for depth in range(question.lowest, len(question.depths)):
        ways = [
            [None, *range(len(part.options))] if part.block >= depth else [None] for part in question.parts
        ]
        for way in itertools.product(*ways):
            taken = {number: place for number, place in enumerate(way) if place is not None}
            choice = question.choice(depth, taken)
            if question.fits(choice.costs):
                found.append(choice)
    return found


@st.composite
def questions(draw: st.DrawFn, parts: int, options: int) -> Question:
    blocks, limits = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    costs = st.tuples(*[st.integers(0, 60)] * limits)
    gains = st.floats(-2, 10).map(lambda gain: round(gain, 3))
    levels = st.lists(st.tuples(gains, costs), min_size=1, max_size=options)
    return Question(
        depths=tuple(
            Depth(draw(st.sampled_from([0.0, 0.0, 1.5])), draw(st.tuples(*[st.integers(0, 40)] * limits)))
            for _ in range(blocks)
        ),
        parts=tuple(
            Part(
                f"layer{number}",
                draw(st.integers(0, blocks - 1)),
                tuple(Option(level, gain, cost) for level, (gain, cost) in enumerate(draw(levels), start=1)),
            )
            for number in range(draw(st.integers(0, parts)))
        ),
        limits=draw(st.tuples(*[st.integers(0, 120)] * limits)),
        lowest=draw(st.integers(0, blocks - 1)),
    )


def check(question: Question, choice: Choice) -> None:
    """A choice is one of the question's, and within its limits."""
    parts = {part.name: part for part in question.parts}
    assert question.fits(choice.costs) and question.lowest <= choice.depth < len(question.depths)
    assert all(parts[name].block >= choice.depth for name in choice.levels)
    taken = [
        next(option for option in parts[name].options if option.level == level)
        for name, level in choice.levels.items()
    ]
    own = question.depths[choice.depth]
    assert choice.costs == tuple(map(sum, zip(own.costs, *(each.costs for each in taken), strict=True)))


def test_what_gains_most_for_its_cost_is_taken() -> None:
    parts = (
        Part("dear", 0, (option(1, 5.0, 10),)),
        Part("cheap", 0, (option(1, 4.0, 2),)),
        Part("harmful", 0, (option(1, -1.0, 1),)),
    )
    choice = greedy(Question(free(1), parts, (10,)))
    assert choice is not None and choice.levels == {"cheap": 1} and choice.gain == 4.0
    choice = greedy(Question(free(1), parts, (12,)))
    assert choice is not None and choice.levels == {"dear": 1, "cheap": 1} and choice.costs == (12,)


def test_a_part_is_raised_step_by_step() -> None:
    levels = (option(1, 4.0, 2), option(2, 6.0, 4), option(4, 7.0, 8))
    question = Question(free(1), (Part("one", 0, levels), Part("two", 0, levels)), (10,))
    choice = greedy(question)
    assert choice is not None and choice.levels == {"one": 2, "two": 2} and choice.gain == 12.0


def test_depth_costs_and_lower_parts_must_be_worth_it() -> None:
    depths = (Depth(0.0, (8,)), Depth(0.0, (2,)))

    def levels(gain: float) -> object:
        parts = (Part("top", 1, (option(1, 3.0, 2),)), Part("bottom", 0, (option(1, gain, 1),)))
        choice = greedy(Question(depths, parts, (10,)))
        assert choice is not None
        return choice.depth, choice.levels

    assert levels(2.0) == (1, {"top": 1})
    assert levels(4.0) == (0, {"bottom": 1})


def test_no_depth_below_the_lowest_is_taken() -> None:
    parts = (Part("bottom", 0, (option(1, 9.0, 1),)), Part("top", 1, (option(1, 1.0, 1),)))
    choice = evolutionary(Question(free(2), parts, (10,), lowest=1))
    assert choice is not None and choice.levels == {"top": 1}


def test_several_limits_hold_at_once() -> None:
    parts = (Part("slow", 0, (option(1, 5.0, 9, 1),)), Part("large", 0, (option(1, 5.0, 1, 9),)))
    choice = greedy(Question(free(1, 2), parts, (10, 9)))
    assert choice is not None and len(choice.levels) == 1


def test_nothing_is_chosen_where_nothing_gains_or_fits() -> None:
    losing = (Part("one", 0, (option(1, -1.0, 1),)),)
    gaining = (Part("one", 0, (option(1, 1.0, 2),)),)
    for search in ("greedy", "evolutionary"):
        assert choose(Question(free(1), losing, (10,)), search) is None
        assert choose(Question(free(1), gaining, (1,)), search) is None
        assert choose(Question((Depth(1.0, (5,)),), gaining, (4,)), search) is None


def test_evolution_finds_what_greed_misses() -> None:
    # Greed takes the first, which leaves no room for the two others.
    parts = tuple(
        Part(name, 0, (option(1, gain, cost),))
        for name, gain, cost in (("a", 6.1, 6), ("b", 5.0, 5), ("c", 5.0, 5))
    )
    question = Question(free(1), parts, (10,))
    by_greed, by_evolution = greedy(question), evolutionary(question)
    assert by_greed is not None and by_greed.gain == 6.1
    assert by_evolution is not None and by_evolution.levels == {"b": 1, "c": 1}


@given(questions(parts=12, options=4), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_choice_is_within_the_limits_and_evolution_is_never_worse(question: Question, seed: int) -> None:
    by_greed, by_evolution = greedy(question), evolutionary(question, seed)
    assert (by_greed is None) == (by_evolution is None)
    if by_greed is not None and by_evolution is not None:
        check(question, by_greed)
        check(question, by_evolution)
        assert 0 < by_greed.gain <= by_evolution.gain
        assert evolutionary(question, seed) == by_evolution


@given(questions(parts=4, options=2))
@settings(max_examples=60, deadline=None)
def test_few_choices_are_searched_to_the_best(question: Question) -> None:
    best = max((choice.gain for choice in every(question)), default=0.0)
    choice = evolutionary(question)
    assert (0.0 if choice is None else choice.gain) >= best * (1 - 1e-12)
    if (by_greed := greedy(question)) is not None:
        assert by_greed.gain <= best
