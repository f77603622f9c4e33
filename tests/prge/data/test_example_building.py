"""Examples of all forms of rows: targets, truncation, errors, and the report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from prge.data.example_building import build_examples, with_branches
from prge.data.forms.task import Task, load_task, parse_task
from prge.data.options import BuildOptions
from prge.data.readers.files import Row
from prge.data.row_report import format_sample
from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import Target, TokenSequence
from prge.errors import DataError
from prge.model_spec import ModelSpec
from prge.objectives.examples import Example
from tests.bundles import make_spec
from tests.prge.data.chat_templates import CHATML, TURNS
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

FILM = {"sentence": "the film was a cat ", "label": 1}
TRUNCATE, SPLIT = BuildOptions("truncate"), BuildOptions("split")
LONG_WORDS = parse_task(
    {"name": "long", "template": "{text} It was", "label_words": {0: "bad good", 1: "great"}}, "long"
)
TOKENIZER = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, pad_id=0, prepend_bos=True)
spec = partial(make_spec, sequence_length=48, width=8, vocabulary_size=1000)


def chat_tokenizer(template: str) -> Tokenizer:
    return Tokenizer(byte_level_backend(), bos_id=1, eos_id=4, chat_template=template)


def rows(*fields: Mapping[str, Any]) -> list[Row]:
    return [Row(number, each) for number, each in enumerate(fields, 1)]


def trained_text(example: Example, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([target.token for each in example.sequences for target in each.targets])


def problems_of(*arguments: Any, **keywords: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        build_examples(*arguments, **keywords)
    return caught.value.problems


# Forms of rows


def test_every_token_of_a_text_after_the_begin_token_is_a_target() -> None:
    [example], report = build_examples(rows({"text": "the film was bad"}), TOKENIZER, spec())
    assert format_sample(example, TOKENIZER) == "row 1\n  <s>[the][ film][ was][ bad][</s>]"
    assert (example.candidates, example.label) == (1, None)
    assert [target.weight for target in example.sequences[0].targets] == [1 / 5] * 5
    assert report.summary() == (
        "the data (text): 1 rows, 1 examples, 1 sequences\n"
        "  columns: text\n"
        "  tokens in a sequence: 6 to 6, mean 6.0; the bundle takes 48\n"
        "  target tokens: 5 of 6 tokens, at most 5 in a sequence"
    )


def test_text_without_bos_learns_all_but_its_first_token(bare_tokenizer: Tokenizer) -> None:
    [example], _ = build_examples(rows({"text": "the film was bad"}), bare_tokenizer, spec())
    assert format_sample(example, bare_tokenizer) == "row 1\n  the[ film][ was][ bad]"


def test_prompt_and_completion() -> None:
    data = rows({"prompt": "the film was", "completion": " bad"})
    [example], _ = build_examples(data, TOKENIZER, spec())
    assert format_sample(example, TOKENIZER) == "row 1\n  <s>the film was[ bad][</s>]"
    [example], _ = build_examples(data, TOKENIZER, spec(), options=BuildOptions(append_eos=False))
    assert format_sample(example, TOKENIZER) == "row 1\n  <s>the film was[ bad]"


def test_a_model_without_an_eos_token_appends_none(bare_tokenizer: Tokenizer) -> None:
    data = rows({"prompt": "the film was", "completion": " bad"})
    [example], _ = build_examples(data, bare_tokenizer, spec())
    assert format_sample(example, bare_tokenizer) == "row 1\n  the film was[ bad]"


def test_completion_that_a_token_would_join_to_its_prompt() -> None:
    data = rows({"prompt": "It was ", "completion": "great"}, {"prompt": "It was", "completion": " great"})
    examples, report = build_examples(data, TOKENIZER, spec())
    assert trained_text(examples[0], TOKENIZER) == "great</s>"
    assert (
        "  completions tokenized separately, as a token would span the end of the prompt: 1 row (1)"
        in report.summary()
    )


@given(known=st.integers(0, 5), unknown=st.integers(0, 5), unknown_in_prompt=st.integers(0, 3))
@settings(max_examples=30)
def test_target_tokens_that_the_tokenizer_cant_spell_are_counted(
    known: int, unknown: int, unknown_in_prompt: int
) -> None:
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    row = {"prompt": "a ? " * unknown_in_prompt + "a", "completion": " a" * (1 + known) + " é" * unknown}
    _, report = build_examples(rows(row), Tokenizer(backend), spec())
    assert report.unknown == report.counts()["unknown_target_tokens"] == unknown
    share = f"{unknown / (1 + known + unknown):.1%}"
    message = f"unknown: {unknown} of {1 + known + unknown} target tokens ({share})"
    assert (message in report.summary()) == bool(unknown)


def test_messages() -> None:
    tokenizer = chat_tokenizer(CHATML)
    messages = [
        {"role": "user", "content": "a cat"},
        {"role": "assistant", "content": "No"},
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": "Yes"},
    ]
    [example], _ = build_examples(rows({"messages": messages}), tokenizer, spec(sequence_length=128))
    assert format_sample(example, tokenizer).replace("\n", "|") == (
        "row 1|  <|im_start|>user|a cat<|im_end|>|<|im_start|>assistant|[No][<|im_end|>][|]"
        "<|im_start|>user|a dog<|im_end|>|<|im_start|>assistant|[Yes][<|im_end|>][|]"
    )


def turns(*texts: str) -> list[dict[str, str]]:
    """Return a chat of alternating questions and answers."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def test_a_chat_that_is_too_long_is_split_between_turns() -> None:
    """Every answer is trained on once, after as many of the newest turns as fit."""
    tokenizer = chat_tokenizer(CHATML)
    message = {"role": "system", "content": "Be kind"}
    chat = [message, *turns("q1", "a1", "q2", "a2", "q3", "a3")]
    whole, _ = build_examples(rows({"messages": chat[:5]}), tokenizer, spec(sequence_length=256))
    room = len(whole[0].sequences[0].tokens)
    small = spec(sequence_length=room)
    examples, report = build_examples(
        rows({"messages": chat}), tokenizer, small, options=BuildOptions("auto")
    )
    texts = [tokenizer.decode(example.sequences[0].tokens) for example in examples]
    assert [trained_text(each, tokenizer).split("<")[0] for each in examples] == ["a1", "a2"]
    assert all("Be kind" in text for text in texts) and "q1" in texts[0] and "q1" not in texts[1]
    assert trained_text(examples[1], tokenizer).count("a3") == 1 and "q2" in texts[1]
    assert report.dropped == 0
    assert "split between turns into several examples: 1 row (1)" in report.summary()
    cut, report = build_examples(rows({"messages": chat}), tokenizer, small, options=TRUNCATE)
    assert [each.sequences for each in cut] == [examples[1].sequences] and cut[0].cut
    assert report.dropped == len(examples[0].sequences[0].targets)
    assert (
        "chats without their older turns, not trained on: 1 row (1); --overflow split keeps them"
        in report.summary()
    )
    assert problems_of(rows({"messages": chat}), tokenizer, small)


def test_an_answer_of_weight_0_is_context() -> None:
    tokenizer = chat_tokenizer(CHATML)
    chat = turns("q1", "a1", "q2", "a2")
    chat[1]["weight"] = 0  # type: ignore[assignment]
    (example,), report = build_examples(rows({"messages": chat}), tokenizer, spec(sequence_length=128))
    assert trained_text(example, tokenizer).startswith("a2") and "a1" in tokenizer.decode(
        example.sequences[0].tokens
    )
    # Parts of a split chat without targets are left out.
    room = len(example.sequences[0].tokens) - 1
    small = spec(sequence_length=room)
    options = BuildOptions("split")
    (part,), report = build_examples(rows({"messages": chat}), tokenizer, small, options=options)
    assert trained_text(part, tokenizer).startswith("a2") and report.dropped == 0
    chat[3]["weight"] = 0  # type: ignore[assignment]
    (problem,) = problems_of(rows({"messages": chat}), tokenizer, spec(sequence_length=128))
    assert "every answer has the weight 0, or train false: there is nothing to learn from" in problem


@settings(max_examples=60)
@given(
    words=st.lists(st.integers(1, 12).map(lambda size: "ab " * size), min_size=2, max_size=9),
    room=st.integers(24, 90),
    opened=st.booleans(),
)
def test_splitting_a_chat_loses_no_target_and_repeats_none(words: list[str], room: int, opened: bool) -> None:
    tokenizer = chat_tokenizer(CHATML)
    chat = [*([{"role": "system", "content": "c"}] if opened else []), *turns(*words)]
    [whole], _ = build_examples(rows({"messages": chat}), tokenizer, spec(sequence_length=10_000))
    parts, report = build_examples(
        rows({"messages": chat}), tokenizer, spec(sequence_length=room), options=BuildOptions("auto")
    )
    expected, result = (
        [target.token for each in examples for target in each.sequences[0].targets]
        for examples in ([whole], parts)
    )
    assert result == expected and report.dropped == 0
    assert all(len(each.sequences[0].tokens) <= room for each in parts)


def test_rows_that_cant_be_used_may_be_left_out() -> None:
    data = rows({"prompt": "a", "completion": ""}, {"prompt": "a", "completion": " b"}, {"prompt": 3})
    skip = BuildOptions(skip_unusable=True)
    [example], report = build_examples(data, TOKENIZER, spec(), options=skip)
    assert example.row == 2 and report.rows == 1
    assert report.unusable[1] == "its completion is empty: there is nothing to learn from"
    assert sorted(report.unusable) == [1, 3]
    with raises(DataError, "answer-empty", containing="completion"):
        build_examples(data[:1], TOKENIZER, spec(), options=skip)


def test_messages_that_a_template_refuses_are_reported() -> None:
    reply = {"role": "assistant", "content": "No"}
    data = rows(
        {"messages": [reply, reply]}, {"messages": [{"role": "user", "content": "Hi"}]}, {"messages": 3}
    )
    problems = problems_of(data, chat_tokenizer(TURNS), spec())
    assert problems == [
        "row 1: the chat template refuses the messages: roles must alternate",
        "row 2: no message has the role 'assistant': there is nothing to learn from",
        "row 3: messages must be a list of at least one message",
    ]


def test_messages_that_a_template_does_not_write_are_refused() -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    for template, tokens in ((" ", 1), ("{{ '' }}", 0)):
        problems = problems_of(rows({"messages": chat}), chat_tokenizer(template), spec())
        assert problems == [f"row 1: it has {tokens} tokens and none to train on"]


def test_messages_without_a_template_are_refused() -> None:
    assert problems_of(rows({"messages": []}), TOKENIZER, spec()) == [
        "its rows are messages, but the model has no chat template"
    ]


def test_instructions_of_a_chat_model_are_messages() -> None:
    data = rows({"instruction": "a cat", "input": "", "output": "No"})
    [example], report = build_examples(data, chat_tokenizer(CHATML), spec(sequence_length=128))
    assert format_sample(example, chat_tokenizer(CHATML)).replace("\n", "|") == (
        "row 1|  <|im_start|>user|a cat<|im_end|>|<|im_start|>assistant|[No][<|im_end|>][|]"
    )
    assert report.summary().startswith("the data (Alpaca, as messages): 1 rows")


def test_instructions_of_other_models_have_headings() -> None:
    data = rows({"instruction": "the film", "output": "bad", "id": 7})
    [example], report = build_examples(data, TOKENIZER, spec(sequence_length=128))
    assert trained_text(example, TOKENIZER) == "bad</s>"
    assert TOKENIZER.decode(example.prompt, special=False).endswith("### Response:\n")
    assert "(Alpaca): 1 rows" in report.summary()
    assert "  columns: instruction, output; not read: id\n" in report.summary()


# Candidates


def test_one_token_candidates_share_a_sequence() -> None:
    [example], report = build_examples(rows(FILM), TOKENIZER, spec(), load_task("sst2"))
    assert format_sample(example, TOKENIZER) == (
        "row 1\n  <s>the film was a cat It was\n    -> [Ġterrible]\n    -> [Ġgreat] <- label"
    )
    [sequence] = example.sequences
    assert {target.position for target in sequence.targets} == {len(sequence.tokens) - 1}
    assert [(target.weight, target.candidate) for target in sequence.targets] == [(1, 0), (1, 1)]
    assert (example.candidates, example.label) == (2, 1)
    assert (example.choices, example.answers) == (("terrible", "great"), ("great",))
    assert "classes: 1 1" in report.summary()


def test_all_one_token_candidates_are_read_from_one_sequence() -> None:
    task = parse_task(
        {"name": "three", "template": "{t}", "label_words": {0: "Yes", 1: "No", 2: "Maybe"}}, "three"
    )
    [example], _ = build_examples(rows({"t": "the", "label": 2}), TOKENIZER, spec(), task)
    (sequence,) = example.sequences
    assert [target.candidate for target in sequence.targets] == [0, 1, 2]
    assert {target.position for target in sequence.targets} == {len(sequence.tokens) - 1}


def test_longer_candidates_have_a_sequence_each() -> None:
    [example], _ = build_examples(rows({"text": "the film", "label": 0}), TOKENIZER, spec(), LONG_WORDS)
    first, second = example.sequences
    assert format_sample(example, TOKENIZER) == (
        "row 1\n  <s>the film It was[ bad][ good] <- label\n  <s>the film It was[ great]"
    )
    assert [target.weight for target in first.targets] == [1 / 2] * 2
    assert [(target.weight, target.candidate) for target in second.targets] == [(1, 1)]


def test_longer_candidates_are_branches_of_their_prompt() -> None:
    model = spec(max_branched=48)
    [example], report = build_examples(rows({"text": "the film", "label": 0}), TOKENIZER, model, LONG_WORDS)
    [separate], _ = build_examples(rows({"text": "the film", "label": 0}), TOKENIZER, spec(), LONG_WORDS)
    assert format_sample(example, TOKENIZER) == format_sample(separate, TOKENIZER)
    assert "1 sequences" in report.summary()
    (sequence,) = example.sequences
    assert sequence.branches and len(sequence.tokens) < sum(len(each.tokens) for each in separate.sequences)


@pytest.mark.parametrize(
    ("texts", "tokens", "branches"),
    [
        ([(1, 2, 3, 4, 5), (1, 2, 3, 6, 7)], (1, 2, 3, 4, 6), (3, 4)),
        ([(1, 2, 3, 4, 5), (1, 2, 3, 4, 5)], (1, 2, 3, 4, 4), (3, 4)),
        ([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 7)], (1, 2, 3, 4, 4, 6), (3, 4)),
        ([(1, 2, 3, 4, 5, 6), (1, 3, 4, 5, 6, 7)], None, ()),
        ([tuple(range(40)), (*range(38), 8, 9)], None, ()),
    ],
    ids=["two branches", "the same text twice", "texts of other lengths", "little in common", "too long"],
)
def test_branches_share_what_their_candidates_have_in_common(
    texts: list[tuple[int, ...]], tokens: tuple[int, ...] | None, branches: tuple[int, ...]
) -> None:
    sequences = [
        TokenSequence(text, tuple(Target(n - 1, text[n], 1.0, index) for n in (len(text) - 2, len(text) - 1)))
        for index, text in enumerate(texts)
    ]
    result = with_branches(sequences, 38)
    assert (result.tokens, result.branches) == (tokens, branches) if result and tokens else tokens is result


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=2, max_size=4),
)
def test_the_sequences_of_branches_are_those_of_the_candidates(
    prompt: list[int], completions: list[list[int]]
) -> None:
    sequences = [
        TokenSequence(
            (*prompt, *completion),
            tuple(Target(len(prompt) + n - 1, token, 0.5, index) for n, token in enumerate(completion)),
        )
        for index, completion in enumerate(completions)
    ]
    branched = with_branches(sequences, 100)
    if branched is None:
        return
    assert len(branched.tokens) <= 7 / 8 * sum(len(each.tokens) - 1 for each in sequences)
    for part, sequence in zip(branched.split(), sequences, strict=True):
        assert part.tokens == sequence.tokens[: len(part.tokens)]
        assert part.targets == sequence.targets


def test_prefixed_tokenizer_has_one_token_words(prefixed_tokenizer: Tokenizer) -> None:
    [example], report = build_examples(rows(FILM), prefixed_tokenizer, spec(), load_task("sst2"))
    assert len(example.sequences) == 1 and not report.notes


def test_completion_objective_trains_the_right_candidate() -> None:
    row = {"premise": "the dog.", "question": "effect", "choice1": "No.", "choice2": "Yes.", "label": 1}
    [trained], _ = build_examples(rows(row), TOKENIZER, spec(), load_task("copa"))
    assert (trained.candidates, trained.label, len(trained.sequences)) == (1, None, 1)
    assert trained_text(trained, TOKENIZER) == " yes."
    [scored], _ = build_examples(rows(row), TOKENIZER, spec(), load_task("copa"), training=False)
    assert (scored.candidates, scored.label, len(scored.sequences)) == (2, 1, 2)
    assert scored.choices == ("No.", "Yes.")


def test_answers() -> None:
    row = {"title": "a", "context": "a cat on a mat", "question": "a", "answers": {"text": ["a mat", "mat"]}}
    [example], _ = build_examples(rows(row), TOKENIZER, spec(sequence_length=128), load_task("squad"))
    assert trained_text(example, TOKENIZER) == " a mat</s>"
    assert example.answers == ("a mat", "mat")


def test_encoder(encoder_tokenizer: Tokenizer) -> None:
    encoder = spec(readout="pooled")
    [example], report = build_examples(rows(FILM), encoder_tokenizer, encoder, load_task("sst2"))
    assert (
        format_sample(example, encoder_tokenizer) == "row 1\n  <s>the film was a cat</s>\n    -> class 1 of 2"
    )
    assert (example.candidates, example.label, example.sequences[0].targets) == (2, 1, ())
    assert len(example.sequences[0].tokens) == 7
    assert "target tokens" not in report.summary()


def test_encoder_cuts_the_end_and_keeps_its_special_tokens(encoder_tokenizer: Tokenizer) -> None:
    encoder = spec(readout="pooled", sequence_length=5)
    [example], report = build_examples(rows(FILM), encoder_tokenizer, encoder, load_task("sst2"), TRUNCATE)
    assert encoder_tokenizer.decode(example.sequences[0].tokens) == "<s>the film was</s>"
    assert "texts cut at the end: 1 row (1)" in report.summary()
    [problem] = problems_of(rows(FILM), encoder_tokenizer, encoder, load_task("sst2"))
    assert problem.startswith("row 1: it has 7 tokens, the bundle takes 5: shorten it")


def test_encoder_without_classes(encoder_tokenizer: Tokenizer) -> None:
    row = {"premise": "a", "question": "cause", "choice1": "b", "choice2": "c", "label": 0}
    [problem] = problems_of(rows(row), encoder_tokenizer, spec(readout="pooled"), load_task("copa"))
    assert problem == "an encoder predicts classes only; the task copa has no label_words"


# Rows that don't fit


def test_prompt_loses_its_beginning_and_keeps_bos() -> None:
    data = [Row(7, FILM), Row(9, {"sentence": "a", "label": 0})]
    examples, report = build_examples(data, TOKENIZER, spec(sequence_length=5), load_task("sst2"), TRUNCATE)
    assert TOKENIZER.decode(examples[0].sequences[0].tokens) == "<s> a cat It was"
    assert (
        "prompts cut at the beginning: 1 row (7); an export with a larger --sequence-length keeps them whole"
        in report.summary()
    )
    assert problems_of(data, TOKENIZER, spec(sequence_length=5), load_task("sst2")) == [
        "row 7: it has a prompt of 8 tokens and 0 after it, the bundle takes 5: shorten it, "
        "export with a larger --sequence-length, or set overflow to truncate"
    ]


def test_prompt_is_cut_alike_for_every_candidate() -> None:
    [example], _ = build_examples(
        rows({"text": "the film was a cat", "label": 0}),
        TOKENIZER,
        spec(sequence_length=6),
        LONG_WORDS,
        TRUNCATE,
    )
    assert [TOKENIZER.decode(each.tokens) for each in example.sequences] == [
        "<s> cat It was bad good",
        "<s> cat It was great",
    ]


def test_candidates_are_never_cut() -> None:
    data = rows({"text": "a", "label": 0})
    assert problems_of(data, TOKENIZER, spec(sequence_length=3), LONG_WORDS, TRUNCATE) == [
        "row 1: it has a candidate of 2 tokens, the bundle takes 3: export with a larger --sequence-length"
    ]


def test_long_text_is_refused_cut_or_split() -> None:
    data = rows({"text": "the film was a cat on a mat and a dog"})
    small = spec(sequence_length=6)
    assert problems_of(data, TOKENIZER, small) == [
        "row 1: it has 13 tokens, the bundle takes 6: shorten it, export with a larger "
        "--sequence-length, or set overflow to truncate or split"
    ]
    cut, report = build_examples(data, TOKENIZER, small, options=TRUNCATE)
    assert [format_sample(each, TOKENIZER) for each in cut] == ["row 1\n  <s>[the][ film][ was][ a][ cat]"]
    assert "ends cut off, not trained on: 1 row (1); --overflow split keeps them, or" in report.summary()
    split, report = build_examples(data, TOKENIZER, small, options=SPLIT)
    assert [format_sample(each, TOKENIZER)[8:] for each in split] == [
        "<s>[the][ film][ was][ a][ cat]",
        "<s> cat[ on][ a][ mat][ and]",
        "<s> mat and[ a][ dog][</s>]",
    ]
    assert report.notes == {"longer than the bundle takes, split into several examples": [1]}


def test_completion_keeps_half_the_program_for_its_prompt() -> None:
    data = rows({"prompt": "the film was a cat on a mat", "completion": " and a dog was bad and good"})
    [example], report = build_examples(data, TOKENIZER, spec(sequence_length=8), options=TRUNCATE)
    assert format_sample(example, TOKENIZER) == "row 1\n  <s> on a mat[ and][ a][ dog][ was]"
    assert set(report.notes) == {"prompts cut at the beginning", "ends cut off, not trained on"}


def test_split_completion() -> None:
    data = rows({"prompt": "the film", "completion": " was a cat on a mat"})
    examples, _ = build_examples(data, TOKENIZER, spec(sequence_length=6), options=SPLIT)
    assert [format_sample(each, TOKENIZER)[8:] for each in examples] == [
        "<s> film[ was][ a][ cat][ on]",
        "<s> cat on[ a][ mat][</s>]",
    ]


def test_split_is_not_for_candidates() -> None:
    [problem] = problems_of(rows(FILM), TOKENIZER, spec(), load_task("sst2"), SPLIT)
    assert problem.startswith("overflow split is for texts, completions and messages")


def test_a_bundle_that_is_too_small_for_any_row_is_refused() -> None:
    for options in (TRUNCATE, SPLIT):
        [problem] = problems_of(
            rows({"prompt": "the film", "completion": " was"}),
            TOKENIZER,
            spec(sequence_length=2),
            options=options,
        )
        assert (
            problem
            == "row 1: the bundle takes 2 tokens, too few to train on: export with a larger --sequence-length"
        )


# Rows that can't be used


@pytest.mark.parametrize(
    ("fields", "task", "problems"),
    [
        ({"text": ""}, None, ["row 2: its text is empty: there is nothing to learn from"]),
        ({"text": 3}, None, ["row 2: column 'text' is int, must be a text"]),
        ({"txt": "a"}, None, ["row 2: it is not a row of text: its columns are txt"]),
        ({"sentence": "a", "label": 7}, "sst2", ["row 2: column 'label' is 7, must be one of 0, 1"]),
        ({"label": 0}, "sst2", ["row 2: column 'sentence' is missing"]),
    ],
)
def test_problems_name_their_row(fields: dict[str, Any], task: str | None, problems: list[str]) -> None:
    good = FILM if task else {"text": "a cat"}
    data = rows(good, fields, good)
    assert problems_of(data, TOKENIZER, spec(), load_task(task) if task else None) == problems


def test_all_problems_are_collected() -> None:
    data = rows(*({"sentence": "a", "label": value} for value in range(60)))
    problems = problems_of(data, TOKENIZER, spec(), load_task("sst2"), source="train.tsv")
    assert len(problems) == 58
    assert problems[0] == "row 3: column 'label' is 2, must be one of 0, 1"


@pytest.mark.parametrize(
    ("fields", "task", "problem"),
    [
        ({"text": "a", "label": 1}, "sst2", "no row has the column 'sentence'; its columns are text, label"),
        (
            {"sentence": "a", "label": 1},
            None,
            "its columns are sentence, label; known are pairs: chosen, rejected;",
        ),
        ({}, None, "its columns are none; known are pairs: chosen, rejected;"),
    ],
)
def test_missing_columns_are_reported_once(fields: dict[str, Any], task: str | None, problem: str) -> None:
    [message] = problems_of(rows(*[fields] * 30), TOKENIZER, spec(), load_task(task) if task else None)
    assert message.startswith(problem)


def test_empty_completion_and_prompt(bare_tokenizer: Tokenizer) -> None:
    assert problems_of(rows({"prompt": "a", "completion": ""}), TOKENIZER, spec()) == [
        "row 1: its completion is empty: there is nothing to learn from"
    ]
    task = Task("a", "{t}", label_words={"0": "Yes", "1": "No"})
    assert problems_of(rows({"t": "", "label": 0}), bare_tokenizer, spec(), task) == [
        "row 1: it has an empty prompt: nothing predicts its candidates"
    ]


def test_candidates_that_are_one_token() -> None:
    same = Task("a", "{t}", choices=("x", "y"))
    assert problems_of(rows({"t": "a", "x": "Yes", "y": " Yes", "label": 0}), TOKENIZER, spec(), same) == [
        "row 1: it has two candidates with the same token: ' Yes' = 'ĠYes', ' Yes' = 'ĠYes'"
    ]


def test_tokenizer_of_another_program() -> None:
    [problem] = problems_of(rows(FILM), TOKENIZER, spec(vocabulary_size=310), load_task("sst2"))
    assert problem.endswith("(335), the bundle has 310 tokens: the tokenizer is not this bundle's")


# Properties

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
WORDY = st.lists(st.sampled_from("the film was bad good a cat dog".split()), max_size=40).map(" ".join)


def check_slots(example: Example, model: ModelSpec) -> None:
    for sequence in example.sequences:
        assert 0 < len(sequence.tokens) <= model.sequence_length
        assert sequence.targets
        for target in sequence.targets:
            assert 0 <= target.position < len(sequence.tokens)
    for candidate in range(example.candidates):
        weights = [s.weight for each in example.sequences for s in each.targets if s.candidate == candidate]
        assert np.isclose(sum(weights), 1)


@given(TEXTS | WORDY, st.integers(3, 40), st.sampled_from(["truncate", "split"]))
def test_texts_teach_each_token_by_the_one_before_it(text: str, length: int, overflow: Any) -> None:
    model, tokens = spec(sequence_length=length), TOKENIZER.encode(text, control=True)
    if not tokens:
        return
    if len(tokens) != length - 1:  # otherwise the end token doesn't fit
        tokens.append(2)
    examples, _ = build_examples(rows({"text": text}), TOKENIZER, model, options=BuildOptions(overflow))
    for example in examples:
        check_slots(example, model)
        for sequence in example.sequences:
            assert sequence.tokens[0] == 1
            assert all(sequence.tokens[target.position + 1] == target.token for target in sequence.targets)
    targets = [target.token for example in examples for target in example.sequences[0].targets]
    assert targets == (tokens if overflow == "split" else tokens[: len(targets)])


@given(WORDY, WORDY, st.integers(4, 40), st.sampled_from(["truncate", "split"]))
def test_completions_keep_their_boundary(prompt: str, completion: str, length: int, overflow: Any) -> None:
    model = spec(sequence_length=length)
    data = rows({"prompt": prompt, "completion": " " + completion})
    examples, _ = build_examples(data, TOKENIZER, model, options=BuildOptions(overflow))
    expected = [*TOKENIZER.encode_pair(prompt, " " + completion).completion, 2]
    for example in examples:
        check_slots(example, model)
        for target in example.sequences[0].targets:
            assert example.sequences[0].tokens[target.position + 1] == target.token
    targets = [target.token for example in examples for target in example.sequences[0].targets]
    assert targets == (expected if overflow == "split" else expected[: len(targets)])


@given(
    TEXTS | WORDY,
    st.lists(WORDY.filter(bool), min_size=2, max_size=4, unique=True),
    st.integers(45, 60),
)
def test_candidates_have_weights_that_sum_to_one(text: str, candidates: list[str], length: int) -> None:
    model = spec(sequence_length=length)
    task = Task("a", "{t}", choices_column="c")
    data = rows({"t": text, "c": candidates, "label": 1})
    [example], _ = build_examples(data, TOKENIZER, model, task, TRUNCATE)
    assert (example.candidates, example.label) == (len(candidates), 1)
    check_slots(example, model)
    if len(example.sequences) > 1:
        for sequence in example.sequences:
            assert all(sequence.tokens[target.position + 1] == target.token for target in sequence.targets)


# Dropped targets are reported

LONG = {"text": "a cat on a mat " * 10}


def test_rows_that_would_lose_more_target_tokens_than_allowed_are_refused() -> None:
    few = spec(sequence_length=9)
    allowed = BuildOptions(overflow="truncate", max_dropped=0.05)
    with raises(DataError, "targets-dropped") as caught:
        build_examples(rows(LONG), TOKENIZER, few, options=allowed)
    assert "--overflow split" in caught.value.remedy and "--sequence-length" in caught.value.remedy
    for harmless in (replace(allowed, overflow="split"), replace(allowed, max_dropped=1.0), TRUNCATE):
        assert build_examples(rows(LONG), TOKENIZER, few, options=harmless)


def test_split_rows_lose_nothing_and_dropped_targets_are_counted() -> None:
    whole = len(TOKENIZER.encode(LONG["text"])) + 1
    few = spec(sequence_length=9)
    parts, report = build_examples(rows(LONG), TOKENIZER, few, options=BuildOptions(overflow="split"))
    assert report.dropped == 0
    assert sum(len(sequence.targets) for part in parts for sequence in part.sequences) == whole
    assert not any(part.cut for part in parts)
    _, report = build_examples(rows(LONG), TOKENIZER, few, options=TRUNCATE)
    assert report.dropped == whole - 8
    assert f"{whole - 8} more don't fit" in report.summary()


def test_all_of_a_long_completion_that_does_not_fit_counts() -> None:
    data = rows({"prompt": "a cat", "completion": " on a mat" * 100})
    small = spec(sequence_length=8)
    [example], report = build_examples(data, TOKENIZER, small, options=TRUNCATE)
    whole = len(TOKENIZER.encode_pair("a cat", " on a mat" * 100).completion) + 1
    assert report.dropped + len(example.sequences[0].targets) == whole


def test_by_default_texts_are_split_and_others_are_truncated() -> None:
    auto, few = BuildOptions("auto"), spec(sequence_length=8)
    parts, report = build_examples(rows(LONG), TOKENIZER, few, options=auto)
    assert len(parts) > 1 and report.dropped == 0 and not any(part.cut for part in parts)
    assert "longer than the bundle takes, split into several examples: 1 row (1)" in report.summary()
    [cut], report = build_examples(
        rows({"prompt": "a", "completion": LONG["text"]}), TOKENIZER, few, options=auto
    )
    assert cut.cut and report.dropped > 0
    [film], _ = build_examples(rows(FILM), TOKENIZER, spec(sequence_length=5), load_task("sst2"), auto)
    assert film.cut


def test_only_cut_rows_are_marked() -> None:
    both = rows({"text": "a cat"}, LONG)
    examples, _ = build_examples(both, TOKENIZER, spec(), options=TRUNCATE)
    assert [example.cut for example in examples] == [False, True]


# Dependencies


def test_only_messages_need_jinja2_and_nothing_needs_torch() -> None:
    names = "example_building feedback_examples forms.form readers.splitting row_report sources".split()
    modules = [*(f"prge.data.{name}" for name in names), "prge.objectives.scoring"]
    code = f"import sys, {', '.join(modules)}\n"
    others = ["jinja2", "pyarrow", "datasets", "huggingface_hub", "torch", "transformers", "executorch"]
    code += f"print(sorted({{*{others}}} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout == "[]\n"


# From a file
