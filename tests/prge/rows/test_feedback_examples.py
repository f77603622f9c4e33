"""Each row of feedback, however odd, either becomes examples or raises an error that says why not."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prge.rows.feedback_examples import FeedbackExamples, UnlearnableError
from prge.rows.readers.feedback import Answered, row_of_line
from prge.rows.tokenization import chat
from prge.rows.tokenization.tokenizer import Tokenizer
from tests.bundles import make_spec
from tests.prge.rows.tiny_tokenizers import byte_level_backend
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
    """Of all tests that don't end its child process."""
    return make_examples()


def learnt_text(examples: FeedbackExamples, row: Any) -> list[str]:
    """What is learnt of a row, in text."""
    tokenizer = Tokenizer(byte_level_backend())
    found = []
    for example in examples.of(row):
        (sequence,) = example.sequences
        found.append(tokenizer.decode([target.token for target in sequence.targets], special=False))
    return found


@pytest.mark.parametrize("asked", [{"prompt": "The soup"}, {"messages": HELLO}])
@pytest.mark.parametrize(
    ("judged", "learnt"),
    [({"rating": "good"}, " was cold"), ({"correction": " was hot"}, " was hot")],
)
def test_what_should_be_answered_is_learnt(asked: Any, judged: dict[str, str], learnt: str) -> None:
    row = Answered("1", "m", "", asked, " was cold", {}).judged(**judged)
    (text,) = learnt_text(shared_examples(), row)
    assert text.strip() == learnt.strip()


def test_a_bad_answer_is_one_that_is_disliked() -> None:
    row = Answered("1", "m", "", {"prompt": "The soup"}, " was cold", {}).judged("bad")
    (example,) = shared_examples().of(row)
    assert example.liked is False


@pytest.mark.parametrize(
    ("asked", "answer", "problem"),
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
def test_what_cannot_be_learnt_says_why_and_the_next_row_is_learnt(
    monkeypatch: pytest.MonkeyPatch, asked: Any, answer: Any, problem: str, rating: str
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    examples = make_examples() if "loop" in str(asked) else shared_examples()
    with pytest.raises(UnlearnableError) as error:
        examples.of({**asked, "answer": answer, "rating": rating})
    assert problem in error.value.problem and "\x1b" not in error.value.problem
    row = Answered("1", "m", "", {"messages": HELLO}, "b", {}).judged("good")
    assert examples.of(row)


@pytest.mark.parametrize(
    ("answer", "correction", "is_refused"),
    [("yes", None, False), ("raise", None, True), ("raise", "yes", False), ("yes", "raise", True)],
)
def test_of_a_conversation_what_is_learnt_must_be_rendered(
    answer: str, correction: str | None, is_refused: bool
) -> None:
    answered = Answered("a", "m", "", {"messages": HELLO}, answer, {})
    row = answered.judged("good" if correction is None else None, correction)
    if is_refused:
        with raises(UnlearnableError, "messages-refused"):
            shared_examples().of(row)
    else:
        assert shared_examples().of(row)


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
def test_a_template_that_renders_nothing_of_an_answer(template: str, rating: str) -> None:
    with raises(UnlearnableError, "nothing-to-learn"):
        make_examples(template).of({"messages": HELLO, "answer": "b", "rating": rating})


def test_messages_without_a_template_and_a_bundle_without_room() -> None:
    row = Answered("1", "m", "", {"messages": HELLO}, "b", {}).judged("good")
    with raises(UnlearnableError, "chat-template-missing"):
        make_examples(None).of(row)
    # What is long loses its beginning.
    long = Answered("1", "m", "", {"prompt": "word " * 1000}, " end", {}).judged("good")
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
def test_any_line_is_no_feedback_or_examples_or_a_problem(row: dict[str, Any]) -> None:
    found = row_of_line(json.dumps(row).encode())
    if found is None:
        return
    try:
        examples = shared_examples().of(found)
    except UnlearnableError as error:
        assert error.problem
    else:
        assert examples and all(target for each in examples for target in each.sequences[0].targets)
