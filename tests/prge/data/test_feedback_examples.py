"""Every row of feedback, however odd, either becomes examples or raises an error with the reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prge.data.example_building import build_examples
from prge.data.feedback_examples import FeedbackExamples, UnlearnableError
from prge.data.forms.feedback_rows import rows_from_feedback
from prge.data.options import BuildOptions, Overflow
from prge.data.readers.feedback import AnswerRecord, parse_feedback_line
from prge.data.readers.files import Row
from prge.data.tokenization import chat
from prge.data.tokenization.tokenizer import Tokenizer
from prge.objectives.examples import Example, without_branches
from prge.objectives.preferences import with_other_answers
from tests.bundles import make_spec
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m.content == 'loop' %}{% for a in range(90000) %}{% for b in range(90000) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def make_examples(template: str | None = TEMPLATE, length: int = 32) -> FeedbackExamples:
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True, chat_template=template)
    return FeedbackExamples(tokenizer, make_spec(vocabulary_size=420, sequence_length=length))


@cache
def shared_examples() -> FeedbackExamples:
    """Return the examples of the tests that don't end their child process."""
    return make_examples()


def learnt_text(examples: FeedbackExamples, row: Any) -> list[str]:
    """Return the trained text of a row."""
    tokenizer = Tokenizer(byte_level_backend())
    result = []
    for example in examples.build(row):
        (sequence,) = example.sequences
        result.append(tokenizer.decode([target.token for target in sequence.targets], special=False))
    return result


@pytest.mark.parametrize("prompt_fields", [{"prompt": "The soup"}, {"messages": HELLO}])
@pytest.mark.parametrize(
    ("judged", "trained_text"),
    [({"rating": "good"}, " was cold"), ({"correction": " was hot"}, " was hot")],
)
def test_wanted_answers_are_trained_on(prompt_fields: Any, judged: dict[str, str], trained_text: str) -> None:
    row = AnswerRecord("1", "m", "", prompt_fields, " was cold", {}).to_feedback(**judged)
    (text,) = learnt_text(shared_examples(), row)
    assert text.strip() == trained_text.strip()


def test_a_bad_answer_is_disliked() -> None:
    row = AnswerRecord("1", "m", "", {"prompt": "The soup"}, " was cold", {}).to_feedback("bad")
    (example,) = shared_examples().build(row)
    assert example.liked is False


def rating_examples(overflow: Overflow = "auto") -> FeedbackExamples:
    """Return examples for an objective of ratings."""
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True, chat_template=TEMPLATE)
    options = BuildOptions(overflow, objective="kto")
    return FeedbackExamples(tokenizer, make_spec(vocabulary_size=420, sequence_length=32), options)


def test_with_an_objective_of_ratings_every_answer_is_rated() -> None:
    examples, record = rating_examples(), AnswerRecord("1", "m", "", {"prompt": "The soup"}, " was cold", {})
    for judged, expected in (
        ({"rating": "good"}, [(" was cold", True)]),
        ({"rating": "bad"}, [(" was cold", False)]),
        ({"correction": " was hot"}, [(" was hot", True), (" was cold", False)]),
    ):
        row = record.to_feedback(**judged)
        liked = [each.liked for each in examples.build(row, 5)]
        assert [*zip(learnt_text(examples, row), liked, strict=True)] == expected
        assert {each.row for each in examples.build(row, 5)} == {5}


@pytest.mark.parametrize("answer", ["raise", ""])
def test_a_correction_is_liked_even_if_the_answer_that_it_replaces_is_unusable(answer: str) -> None:
    prompt_fields: dict[str, Any] = {"messages": HELLO} if answer else {"prompt": "The soup"}
    row = AnswerRecord("1", "m", "", prompt_fields, answer, {}).to_feedback(correction=" was hot")
    (example,) = rating_examples().build(row)
    assert example.liked


def test_long_rated_answers_are_truncated_and_not_split() -> None:
    row = AnswerRecord("1", "m", "", {"prompt": "The soup"}, " was cold" * 100, {}).to_feedback("bad")
    (example,) = rating_examples("split").build(row)
    assert example.liked is False and example.cut


def test_answers_are_compared_with_others_as_in_a_run_on_ratings() -> None:
    """KTO compares an answer with the answer of the row before, which is cut here if it has no room."""
    answers = [("The soup", " was cold"), ("It is", " hot"), ("The dog is a", " cat")]
    records = [AnswerRecord("1", "m", "", {"prompt": prompt}, text, {}) for prompt, text in answers]
    feedback = [record.to_feedback("good") for record in records]
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, prepend_bos=True)
    model = make_spec(vocabulary_size=420, sequence_length=32)
    rows, _ = rows_from_feedback([Row(number, row) for number, row in enumerate(feedback, 1)], "kto")
    expected, _ = build_examples(rows, tokenizer, model, None, BuildOptions(objective="kto"))

    def outputs(examples: Sequence[Example]) -> list[list[tuple[tuple[int, ...], int, float]]]:
        """Return the tokens before each target, the target and its weight, by candidate."""
        return [
            [(sequence.tokens[: each.position + 1], each.token, each.weight) for each in sequence.targets]
            for example in examples
            for sequence in without_branches(example).sequences
        ]

    single = [each for number, row in enumerate(feedback, 1) for each in rating_examples().build(row, number)]
    compared = with_other_answers(single, 32)
    assert outputs(compared) == outputs(expected) and [each.candidates for each in compared] == [2, 2, 2]
    own, other = outputs(with_other_answers(single[:1], 32))
    assert own == other
    shortest = max(len(each.prompt) for each in single) + 1
    cut = [each.sequences[1] for each in with_other_answers(single, shortest)]
    assert max(len(each.tokens) for each in cut) == shortest and all(each.targets for each in cut)


@pytest.mark.parametrize(
    ("prompt_fields", "answer", "problem"),
    [
        ({"prompt": "a"}, "", "its completion is empty"),
        ({"messages": [{"role": "user", "content": "raise"}]}, "b", "refuses the messages: no"),
        ({"messages": [{"role": "user", "content": "loop"}]}, "b", "seconds of CPU time"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "b", "must not name messages"),
        ({"messages": HELLO, "chat_template_kwargs": 5}, "b", "must be a mapping"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "b", "each with role and content"),
        ({"messages": [{"role": None, "content": "a"}]}, "b", "each with role and content"),
        ({"messages": []}, "b", "its prompt is None"),
        ({"prompt": "a", "control_tokens": "some"}, "b", "must be one of"),
        ({"prompt": "a"}, 1e300, "must be a text"),
    ],
)
@pytest.mark.parametrize("rating", ["good", "bad"])
def test_an_unusable_row_does_not_affect_the_next(
    monkeypatch: pytest.MonkeyPatch, prompt_fields: Any, answer: Any, problem: str, rating: str
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    examples = make_examples() if "loop" in str(prompt_fields) else shared_examples()
    with pytest.raises(UnlearnableError) as error:
        examples.build({**prompt_fields, "answer": answer, "rating": rating})
    assert problem in error.value.problem and "\x1b" not in error.value.problem
    row = AnswerRecord("1", "m", "", {"messages": HELLO}, "b", {}).to_feedback("good")
    assert examples.build(row)


@pytest.mark.parametrize(
    ("answer", "correction", "is_refused"),
    [("yes", None, False), ("raise", None, True), ("raise", "yes", False), ("yes", "raise", True)],
)
def test_the_trained_message_must_be_rendered(answer: str, correction: str | None, is_refused: bool) -> None:
    record = AnswerRecord("a", "m", "", {"messages": HELLO}, answer, {})
    row = record.to_feedback("good" if correction is None else None, correction)
    if is_refused:
        with raises(UnlearnableError, "messages-refused"):
            shared_examples().build(row)
    else:
        assert shared_examples().build(row)


@pytest.mark.parametrize("rating", ["good", "bad"])
@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ '' }}",
        "a",
        "{% generation %}{% endgeneration %}",
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_omits_an_answer_is_refused(template: str, rating: str) -> None:
    with raises(UnlearnableError, "nothing-to-learn"):
        make_examples(template).build({"messages": HELLO, "answer": "b", "rating": rating})


def test_messages_without_a_template_and_a_bundle_without_room() -> None:
    row = AnswerRecord("1", "m", "", {"messages": HELLO}, "b", {}).to_feedback("good")
    with raises(UnlearnableError, "chat-template-missing"):
        make_examples(None).build(row)
    # Long prompts are cut at the beginning.
    long = AnswerRecord("1", "m", "", {"prompt": "word " * 1000}, " end", {}).to_feedback("good")
    assert learnt_text(shared_examples(), long) == [" end"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=5,
)
TEXTS = st.text() | st.sampled_from(["", " ", "\0", "\x1b[2J", "<s></s>", "raise", "\ud800", "a" * 500])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool", "", "x"])}
                          | {"content": TEXTS | VALUES}), max_size=4)  # fmt: skip


@settings(max_examples=200)
@given(
    row=st.fixed_dictionaries(
        {"answer": TEXTS | VALUES},
        optional={
            "prompt": TEXTS | VALUES,
            "messages": MESSAGES | VALUES,
            "rating": st.sampled_from(["good", "bad"]) | VALUES,
            "correction": TEXTS | VALUES,
            "chat_template_kwargs": st.dictionaries(TEXTS, VALUES, max_size=3) | VALUES,
            "control_tokens": st.sampled_from(["text", "all", "prompt"]) | VALUES,
            "weight": VALUES,
            "id": VALUES,
        },
    )
)
def test_any_line_is_ignored_or_gives_examples_or_a_problem(row: dict[str, Any]) -> None:
    result = parse_feedback_line(json.dumps(row).encode())
    if result is None:
        return
    try:
        examples = shared_examples().build(result)
    except UnlearnableError as error:
        assert error.problem
    else:
        assert examples and all(target for each in examples for target in each.sequences[0].targets)
