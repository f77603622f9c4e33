"""Greedy answers from a passage, by a scorer that knows what it wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from prge.contract import Contract
from prge.learning.examples import Example
from prge.rows.example_building import build_examples
from prge.rows.readers import Row
from prge.rows.spans import Question, answer_by_span, greedy_span, spans_of, stop_tokens
from prge.rows.task import load_task
from prge.rows.text_metrics import token_f1
from prge.rows.tokenizer import Tokenizer

PASSAGE = "the cat (a good cat) was on the mat; the dog was bad."


def squad(tokenizer: Tokenizer, contract: Contract, answer: str = "a good cat") -> Example:
    row = {"title": "a", "context": PASSAGE, "question": "Yes?", "answers": {"text": [answer]}}
    [example], _ = build_examples([Row(1, row)], tokenizer, contract, load_task("squad"))
    return example


class Wanting:
    """A model that wants to write one text and then stop; remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer, text: str, prompt: int) -> None:
        self.wanted = [*tokenizer.encode_continuation(" " + text), *stop_tokens(tokenizer)[:1]]
        self.prompt = prompt
        self.asked: list[Question] = []

    def __call__(self, questions: Sequence[Question]) -> list[float]:
        self.asked += questions
        return [
            0.0 if self.wanted[len(tokens) - self.prompt] == target else -5.0 - target / 1000
            for tokens, _, target in questions
        ]


@pytest.mark.parametrize("text", ["a good cat", "mat", "the dog was bad"])
def test_answer_is_found(tokenizer: Tokenizer, contract: Callable[..., Contract], text: str) -> None:
    long = contract(sequence_length=128)
    example = squad(tokenizer, long)
    prompt = example.sequences[0].slots[0].position + 1
    model = Wanting(tokenizer, text, prompt)
    found = answer_by_span(example, tokenizer, model, 128)
    assert found == text
    assert token_f1(found, [text]) == 1
    # the gold answer that the example was built with is not part of any question's tokens
    assert all(tuple(tokens[:prompt]) == example.sequences[0].tokens[:prompt] for tokens, _, _ in model.asked)
    assert all(position == len(tokens) - 1 for tokens, position, _ in model.asked)


def test_answer_is_always_a_span(tokenizer: Tokenizer, contract: Callable[..., Contract]) -> None:
    example = squad(tokenizer, contract(sequence_length=128))

    def hashed(questions: Sequence[Question]) -> list[float]:
        return [float(target * 7919 % 101) for _, _, target in questions]

    found = answer_by_span(example, tokenizer, hashed, 128)
    assert found and found in PASSAGE


def test_stop_is_not_asked_first_and_spans_end(tokenizer: Tokenizer) -> None:
    asked: list[list[int]] = []

    def score(questions: Sequence[Question]) -> list[float]:
        asked.append([target for _, _, target in questions])
        return [float(target) for _, _, target in questions]

    assert greedy_span((1,), [(5, 6), (5, 4), (3,)], (2,), score, 8) == [5, 6]
    assert asked == [[3, 5], [4, 6, 2]]
    assert greedy_span((1,), [(5, 6, 7)], (2,), score, 2) == [5, 6]
    assert greedy_span((1,), [], (2,), score, 8) == []


def test_stop_tokens(tokenizer: Tokenizer, bare_tokenizer: Tokenizer) -> None:
    line_break = bare_tokenizer.encode("\n")[0]
    assert stop_tokens(tokenizer) == (2, line_break)
    assert stop_tokens(bare_tokenizer) == (line_break,)


def test_spans_begin_at_words_and_signs(tokenizer: Tokenizer) -> None:
    spans = spans_of("a cat (dog)", tokenizer, 2)
    assert {tokenizer.decode(span) for span in spans} >= {" a cat", " dog)"}


def test_long_prompt_leaves_room_for_the_answer(
    tokenizer: Tokenizer, contract: Callable[..., Contract]
) -> None:
    example = squad(tokenizer, contract(sequence_length=128))
    lengths: list[int] = []

    def score(questions: Sequence[Question]) -> list[float]:
        lengths.extend(len(tokens) for tokens, _, _ in questions)
        assert all(tokens[0] == 1 for tokens, _, _ in questions)
        return [-float(target) for _, _, target in questions]

    answer_by_span(example, tokenizer, score, 24, max_tokens=6)
    assert max(lengths) <= 24


def test_example_without_a_passage() -> None:
    with pytest.raises(ValueError, match="row 3 names no passage"):
        answer_by_span(Example(3, (), 1, None), None, None, 8)  # type: ignore[arg-type]
