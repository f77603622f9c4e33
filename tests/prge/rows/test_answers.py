"""Prompts of questions: what a model sees before it writes, and how much room it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prge.contract import Contract
from prge.errors import DataError
from prge.examples import Example
from prge.rows.answers import prompts_of
from prge.rows.example_building import build_examples
from prge.rows.readers import Row
from prge.rows.task import Generate, Task
from prge.rows.tokenizer import Tokenizer

TASK = Task("q", "{q}\nAnswer:", columns={"answers": "a"}, metric="f1_answer", generate=Generate(4))


@pytest.fixture
def examples(tokenizer: Tokenizer, contract: Callable[..., Contract]) -> list[Example]:
    rows = [
        {"q": "Where?", "a": "Rome"},
        {"q": "Where is the cat now, and the dog?", "a": ["the mat", "mat"]},
    ]
    numbered = [Row(number, row) for number, row in enumerate(rows, 1)]
    return build_examples(numbered, tokenizer, contract(sequence_length=64), TASK)[0]


def test_a_prompt_is_the_question_without_its_answer(tokenizer: Tokenizer, examples: list[Example]) -> None:
    prompts, cut = prompts_of(examples, tokenizer, Generate(4), 64, cut=False)
    assert [tokenizer.decode(prompt, special=False) for prompt in prompts] == [
        "Where?\nAnswer:",
        "Where is the cat now, and the dog?\nAnswer:",
    ]
    assert cut == []


def test_a_long_prompt_loses_its_beginning(tokenizer: Tokenizer, examples: list[Example]) -> None:
    whole, _ = prompts_of(examples, tokenizer, Generate(4), 64, cut=False)
    context = len(whole[1]) + 3
    prompts, cut = prompts_of(examples, tokenizer, Generate(4), context, cut=True)
    assert cut == [2] and prompts[0] == whole[0]
    assert len(prompts[1]) + 4 == context
    begin = len(tokenizer.begin)
    assert begin and prompts[1] == (*tokenizer.begin, *whole[1][begin + 1 :])


def test_a_long_prompt_is_refused(tokenizer: Tokenizer, examples: list[Example]) -> None:
    whole, _ = prompts_of(examples, tokenizer, Generate(4), 64, cut=False)
    with pytest.raises(DataError, match="row 2: the question has more than") as caught:
        prompts_of(examples, tokenizer, Generate(4), len(whole[1]) + 3, cut=False)
    assert len(caught.value.problems) == 1
    assert prompts_of(examples, tokenizer, Generate(4), len(whole[1]) + 4, cut=False)[1] == []


def test_answers_that_leave_no_room(tokenizer: Tokenizer, examples: list[Example]) -> None:
    with pytest.raises(DataError, match="leave no room for a question"):
        prompts_of(examples, tokenizer, Generate(63), 64, cut=True)
