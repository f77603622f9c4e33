"""Pairs and ratings: splitting into prompt and answers, invalid rows, and examples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from prge.data.columns import RowError
from prge.data.example_building import build_examples
from prge.data.forms.form import find_form
from prge.data.forms.preferences import parse_pair, parse_rating, rows_for_kto
from prge.data.forms.task import parse_task
from prge.data.options import BuildOptions
from prge.data.readers.files import Row
from prge.data.row_report import DataReport
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import DataError
from prge.objectives.examples import Example
from prge.objectives.preferences import ObjectiveName
from tests.bundles import make_spec
from tests.prge.data.chat_templates import CHATML
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, pad_id=0, prepend_bos=True)
CHAT = Tokenizer(byte_level_backend(), bos_id=1, eos_id=4, chat_template=CHATML)
spec = partial(make_spec, sequence_length=96, width=8, vocabulary_size=1000)
PAIR = {"prompt": "the film was", "chosen": " good", "rejected": " a bad one"}


def rows(*fields: Mapping[str, Any]) -> list[Row]:
    return [Row(number, each) for number, each in enumerate(fields, 1)]


def make_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


QUESTION = make_message("user", "How was it?")
GOOD, BAD = make_message("assistant", "good"), make_message("assistant", "bad")


def built(
    *fields: Mapping[str, Any],
    objective: ObjectiveName | None = "auto",
    tokenizer: Tokenizer = TOKENIZER,
    length: int = 96,
    **options: Any,
) -> tuple[list[Example], DataReport]:
    chosen = BuildOptions(options.pop("overflow", "auto"), objective=objective, **options)
    return build_examples(rows(*fields), tokenizer, spec(sequence_length=length), options=chosen)


def texts(example: Example, tokenizer: Tokenizer = TOKENIZER) -> list[tuple[str, str]]:
    """Return context and trained text of each candidate."""
    result = []
    for index, sequence in enumerate(example.sequences):
        assert {target.candidate for target in sequence.targets} == {index}
        first = sequence.targets[0].position + 1
        assert [target.token for target in sequence.targets] == list(sequence.tokens[first:])
        assert sum(target.weight for target in sequence.targets) == pytest.approx(1)
        result.append((tokenizer.decode(sequence.tokens[:first]), tokenizer.decode(sequence.tokens[first:])))
    return result


def test_a_pair_is_an_example_of_two_candidates() -> None:
    [example], report = built(PAIR)
    assert (example.candidates, example.label, report.objective) == (2, 0, "dpo")
    assert [[part.replace("<|bos|>", "").replace("<|eos|>", "") for part in each] for each in texts(example)]
    chosen, rejected = texts(example)
    assert chosen[0] == rejected[0]
    assert chosen[0].endswith("the film was")
    assert " good" in chosen[1]
    assert " a bad one" in rejected[1]


@pytest.mark.parametrize(
    ("fields", "prompt", "chosen", "rejected"),
    [
        ({"chosen": "It was good.", "rejected": "It was great."}, "It was", " good.", " great."),
        ({"chosen": "A: yes\nB", "rejected": "A: yes\nC"}, "A: yes\n", "B", "C"),
        ({"chosen": "goodness", "rejected": "good"}, "good", "ness", None),
        ({"prompt": "It was", "chosen": "It was good", "rejected": "It was bad"}, "It was", " good", " bad"),
        ({"prompt": "The", "chosen": "The end", "rejected": "No"}, "The", "The end", "No"),
        ({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}, [QUESTION], [GOOD], [BAD]),
        ({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}, [QUESTION], [GOOD], [BAD]),
        (
            {"prompt": [QUESTION], "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
            [QUESTION],
            [GOOD],
            [BAD],
        ),
        (
            {"prompt": "How was it?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
            [QUESTION],
            [GOOD],
            [BAD],
        ),
        ({"prompt": "How was it?", "chosen": [GOOD], "rejected": [BAD]}, [QUESTION], [GOOD], [BAD]),
    ],
)
def test_prompt_and_answers_are_split(
    fields: Mapping[str, Any], prompt: Any, chosen: Any, rejected: Any
) -> None:
    if rejected is None:
        with raises(RowError, "answer-empty", containing="rejected"):
            parse_pair(fields)
        return
    assert parse_pair(fields) == {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"rejected": " good"}, "answers-equal"),
        ({"chosen": "  "}, "answer-empty"),
        ({"rejected": ""}, "answer-empty"),
        ({"chosen": []}, "texts-and-messages"),
        ({"chosen": None}, "column-not-messages"),
        ({"prompt": 3}, "texts-and-messages"),
        ({"prompt": None, "chosen": "Yes"}, "prompt-missing"),
        (
            {"chosen": "the film was good"},
            "prompt-of-one-answer",
        ),
        (
            {
                "chosen": [QUESTION, GOOD],
                "rejected": [make_message("user", "What?"), BAD],
                "prompt": "How was it?",
            },
            "prompt-missing",
        ),
        (
            {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD], "prompt": "When?"},
            "prompt-of-no-answer",
        ),
    ],
)
def test_unusable_pairs_are_refused(changed: Mapping[str, Any], code: str) -> None:
    objective: ObjectiveName
    for objective in ("dpo", "kto"):
        with raises(DataError, code, containing="row 2"):
            built(PAIR, {**PAIR, **changed}, objective=objective, tokenizer=CHAT)


RATED = [
    {"prompt": "the film was", "completion": " good", "label": True},
    {"prompt": "the cat was", "completion": " bad", "label": False},
    {"prompt": "the", "completion": " cat", "label": True},
]


def test_a_rating_is_compared_with_the_previous_answer() -> None:
    examples, report = built(*RATED)
    assert report.objective == "kto"
    assert [(each.liked, each.label, each.candidates) for each in examples] == [
        (True, None, 2),
        (False, None, 2),
        (True, None, 2),
    ]
    answers = [[text for _, text in texts(example)] for example in examples]
    assert [own.startswith(other) for (own, _), other in zip(answers, (" good", " bad", " cat"), strict=True)]
    assert [answers[row][1] for row in range(3)] == [answers[row - 1][0] for row in range(3)]
    assert all(len({prompt for prompt, _ in texts(example)}) == 1 for example in examples)


@pytest.mark.parametrize("label", [True, 1, "1", "true", "TRUE"])
def test_labels_of_tables_are_read(label: object) -> None:
    assert parse_rating({**RATED[0], "label": label})["label"] is True


@pytest.mark.parametrize("label", ["good", 2, None, 0.5, ""])
def test_a_label_that_is_no_truth_value_is_refused(label: object) -> None:
    with raises(DataError, "label-unknown", containing="--objective completion"):
        built(RATED[0], {**RATED[1], "label": label})
    examples, report = built(RATED[0], {**RATED[1], "label": label}, objective="completion")
    assert (len(examples), report.objective, examples[0].candidates) == (2, "completion", 1)


@pytest.mark.parametrize(
    ("label", "message"),
    [(True, "without examples of what to avoid"), (False, "without examples of what to write")],
)
def test_equal_labels_are_reported(label: bool, message: str) -> None:
    _, report = built(*({**each, "label": label} for each in RATED))
    assert message in report.summary()
    assert message in "".join(report.events())
    assert message not in built(*RATED)[1].summary()


def test_pairs_become_a_liked_and_a_disliked_answer() -> None:
    other = {"prompt": "a cat was", "chosen": " here", "rejected": " there"}
    examples, _ = built(PAIR, other, objective="kto")
    assert [(each.row, each.liked) for each in examples] == [(1, True), (2, True), (1, False), (2, False)]
    # Except at the two ends, no answer is compared with the other answer to the same prompt.
    assert " here" in texts(examples[2])[1][1]


def test_rows_without_an_answer_are_skipped_as_comparison() -> None:
    result = rows_for_kto(rows(RATED[0], {**RATED[1], "completion": ""}, RATED[2]), are_pairs=False)
    assert [row.fields["other"] for row in result] == [" cat", " good", " good"]


def test_chosen_answers_can_be_completions() -> None:
    [example], report = built(PAIR, objective="completion")
    assert (example.candidates, example.label, report.objective) == (1, None, "completion")
    assert " good" in texts(example)[0][1]


def test_messages_after_the_prompt_are_trained_on() -> None:
    before = [make_message("user", "Hi"), make_message("assistant", "hello"), QUESTION]
    [example], _ = built({"chosen": [*before, GOOD], "rejected": [*before, BAD]}, tokenizer=CHAT, length=192)
    chosen, rejected = texts(example, CHAT)
    assert chosen[0] == rejected[0]
    assert "hello" in chosen[0]
    assert "good" in chosen[1]
    assert "bad" in rejected[1]
    rated = {"prompt": before, "completion": [GOOD], "label": True}
    [example], _ = built(rated, tokenizer=CHAT, length=192)
    assert "good" in texts(example, CHAT)[0][1]


def test_messages_need_a_chat_template() -> None:
    fields = {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}
    assert find_form(rows(fields), "the data").chat == "needs"
    with raises(DataError, "chat-template-missing"):
        built(fields)


def test_a_prompt_that_is_too_long_is_cut_alike_for_both_answers() -> None:
    long = {"prompt": "cat " * 60 + "was", "chosen": " good", "rejected": " bad" * 6}
    [example], report = built(long, length=48)
    chosen, rejected = texts(example)
    assert chosen[0] == rejected[0]
    assert example.cut
    assert "prompts cut at the beginning" in report.summary()
    assert max(len(sequence.tokens) for sequence in example.sequences) <= 48
    with raises(DataError, "row-too-long", containing="48"):
        built(long, length=48, overflow="error")
    with raises(DataError, "overflow-does-not-fit", containing="pairs"):
        built(long, length=48, overflow="split")


def test_an_answer_that_is_too_long_loses_its_end() -> None:
    long = {"prompt": "cat " * 60 + "was", "chosen": " good", "rejected": " bad" * 60}
    [example], report = built(long, length=48)
    chosen, rejected = texts(example)
    assert chosen[0] == rejected[0]
    assert len(example.sequences[1].tokens) == 48
    assert report.dropped
    assert "ends cut off" in report.summary()


def test_a_weight_counts_and_must_be_a_number() -> None:
    fields = {"prompt": "the film was", "completion": " good"}
    examples, _ = built({**fields, "weight": 2}, {**fields, "weight": "0.5"}, fields)
    assert [each.weight for each in examples] == [2, 0.5, 1]
    assert built({**PAIR, "weight": 3.0})[0][0].weight == 3
    for wrong in ("heavy", 0, -1, True and [1], float("inf"), 1e7):
        with raises(DataError, "weight-unusable", containing="row 1"):
            built({**fields, "weight": wrong})


def test_a_task_accepts_only_the_objectives_of_candidates() -> None:
    fields_of_task = {"name": "mood", "template": "{text} was", "label_words": {0: " bad", 1: " good"}}
    task = parse_task(fields_of_task, "mood")
    fields = rows({"text": "the film", "label": 1}, {"text": "the cat", "label": 0})

    def built_of(objective: ObjectiveName) -> list[Example]:
        return build_examples(fields, TOKENIZER, spec(), task, BuildOptions(objective=objective))[0]

    assert [each.candidates for each in built_of("auto")] == [2, 2]
    assert [each.candidates for each in built_of("completion")] == [1, 1]
    with raises(DataError, "objective-does-not-fit", containing="mood"):
        built_of("dpo")


def test_rows_without_a_column_are_reported() -> None:
    objective: ObjectiveName
    for objective in ("dpo", "kto"):
        with raises(DataError, "row-of-other-form", containing="row 2"):
            built(PAIR, {"chosen": "a"}, objective=objective)
    with raises(DataError, "row-of-other-form", containing="row 2"):
        built(RATED[0], {"completion": "a", "label": True})


def test_ratings_are_completions_for_verbs_that_know_no_preferences() -> None:
    examples, report = built(*RATED, objective=None)
    assert (len(examples), report.objective, examples[0].liked) == (3, "completion", None)


def test_rows_and_objective_must_fit() -> None:
    with raises(DataError, "objective-does-not-fit", containing="dpo"):
        built(*RATED, objective="dpo")
    with raises(DataError, "objective-does-not-fit", containing="kto"):
        built({"text": "a cat"}, objective="kto")
    with raises(DataError, "rows-of-preferences", containing="pairs"):
        built(PAIR, objective=None)
