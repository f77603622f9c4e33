"""Rows of messages: special columns, arguments and date of the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from prge.data.example_building import build_examples
from prge.data.options import BuildOptions
from prge.data.readers.files import Row
from prge.data.row_report import DataReport, warn_unread
from prge.data.tokenization.chat import ChatTemplate
from prge.data.tokenization.tokenizer import Tokenizer
from prge.errors import DataError
from prge.objectives.examples import tokens_sha256
from tests.bundles import make_spec
from tests.prge.data.chat_templates import CHATML, DATED, ENDS_WITH_EOS, OF_PARTS, TAGGED, THINKS
from tests.prge.data.published_templates import transformers_tokenizer
from tests.prge.data.tiny_tokenizers import byte_level_backend
from tests.refusals import raises

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def make_message(role: str, content: Any, **further: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **further}


QUESTION, ANSWER = make_message("user", "Hi"), make_message("assistant", "Yo")
CHAT = [QUESTION, ANSWER]


def built(template: str | None, *rows: Mapping[str, Any], **options: Any) -> tuple[list[str], DataReport]:
    """Return the texts of the examples of rows, with target tokens in brackets."""
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, chat_template=template)
    model = make_spec(sequence_length=900, vocabulary_size=1000)
    numbered = [Row(number, fields) for number, fields in enumerate(rows, 1)]
    examples, report = build_examples(numbered, tokenizer, model, options=BuildOptions("error", **options))
    texts = []
    for example in examples:
        (sequence,) = example.sequences
        positions = {target.position + 1 for target in sequence.targets}
        first = min(positions)
        assert positions == {*range(first, len(sequence.tokens))}, "one turn"
        head, tail = sequence.tokens[:first], sequence.tokens[first:]
        texts.append(f"{tokenizer.decode(head)}[{tokenizer.decode(tail)}]")
    return texts, report


def problem_of(template: str | None, row: Mapping[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        built(template, row)
    (problem,) = caught.value.problems
    return problem


def rendered(template: str, messages: list[Any], **variables: Any) -> str:
    """Render a chat with transformers, with the answer in brackets."""
    tokenizer = transformers_tokenizer(template)
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True, **variables
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    assert text.startswith(prompt)
    return f"{prompt}[{text[len(prompt) :]}]"


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_template_variables_are_given_to_the_template(as_text: bool) -> None:
    kwargs = {"enable_thinking": False}
    row = {"messages": CHAT, "tools": TOOLS, "chat_template_kwargs": kwargs}
    if as_text:
        row = {name: json.dumps(value) for name, value in row.items()}
    texts, report = built(THINKS, row)
    assert texts == [rendered(THINKS, CHAT, tools=TOOLS, enable_thinking=False)]
    assert report.columns == "messages, tools, chat_template_kwargs" and not report.unread


def test_a_column_with_the_name_of_a_variable_is_given_to_the_template() -> None:
    texts, report = built(THINKS, {"messages": CHAT, "enable_thinking": False, "id": 7})
    assert texts == [rendered(THINKS, CHAT, enable_thinking=False)]
    assert report.columns == "messages, enable_thinking; not read: id" and report.unread == ("id",)
    _, report = built(CHATML, {"messages": CHAT, "enable_thinking": False})
    assert report.columns == "messages; not read: enable_thinking"


def test_unread_template_arguments_are_reported() -> None:
    row = {"messages": CHAT, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    _, report = built(CHATML, row, {"messages": CHAT})
    assert "tools that the chat template does not read: 1 row (1)" in report.summary()
    assert "chat_template_kwargs that the chat template does not read: 1 row (1)" in report.summary()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"instruction": "Hi", "output": "Yo"},
        {"prompt": [QUESTION], "completion": [ANSWER]},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [make_message("assistant", "No")]},
        {"prompt": "Hi", "completion": [ANSWER], "label": True},
    ],
)
def test_a_column_system_is_the_system_message(row: Mapping[str, Any]) -> None:
    expected = rendered(CHATML, [make_message("system", "Be brief."), *CHAT])
    objective: Any = "completion" if {"chosen", "label"} & row.keys() else None
    texts, report = built(CHATML, {**row, "system": "Be brief."}, objective=objective)
    assert texts == [expected] and "system" in report.columns.split("; not read")[0]
    texts, _ = built(CHATML, {**row, "system": None}, objective=objective)
    assert texts == [rendered(CHATML, CHAT)]


def test_two_system_messages_that_differ_are_refused() -> None:
    row = {"messages": [make_message("system", "Be kind."), *CHAT], "system": "Be brief."}
    assert "its column system and its system message differ" in problem_of(CHATML, row)
    assert built(CHATML, {**row, "system": "Be kind."})[0] == [rendered(CHATML, row["messages"])]


def test_a_column_system_of_texts_is_not_read() -> None:
    _, report = built(CHATML, {"prompt": "a", "completion": " b", "system": "Be brief."})
    assert report.columns == "prompt, completion; not read: system"


def test_the_history_of_instructions_is_earlier_turns() -> None:
    row = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "Be brief."}
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, chat_template=CHATML)
    model = make_spec(sequence_length=900, vocabulary_size=1000)
    [example], report = build_examples([Row(1, row)], tokenizer, model)
    messages = [
        make_message("system", "Be brief."),
        make_message("user", "a"),
        make_message("assistant", "b"),
    ]
    messages += [make_message("user", "c"), make_message("assistant", "d")]
    expected = transformers_tokenizer(CHATML).apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(example.sequences[0].tokens) == expected
    target_tokens = [target.token for target in example.sequences[0].targets]
    assert tokenizer.decode(target_tokens) == "b<|im_end|>\nd<|im_end|>\n"
    assert report.columns == "instruction, output, history, system"
    assert "history must have lists of a question and its answer" in problem_of(
        CHATML, {**row, "history": ["a"]}
    )


def test_history_and_system_of_instructions_without_a_template() -> None:
    row = {"instruction": "c", "output": "d", "history": json.dumps([["a", "b"]]), "system": "Be brief."}
    texts, report = built(None, row)
    assert texts == [
        "Be brief.\n\n### Instruction:\na\n\n### Response:\nb\n\n"
        "### Instruction:\nc\n\n### Response:\n[d</s>]"
    ]
    assert not report.unread


@pytest.mark.parametrize("template", [CHATML, OF_PARTS])
def test_contents_may_be_parts_that_are_texts(template: str) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    texts, _ = built(template, {"messages": [make_message("user", parts), ANSWER]}, {"messages": CHAT})
    assert texts[0] == texts[1]
    image = [{"type": "image", "url": "a.png"}]
    assert problem_of(template, {"messages": [make_message("user", image), ANSWER]}) == (
        "row 1: message 1 (user) has a part of the type 'image': only text is supported"
    )


def test_null_keys_of_messages_are_ignored() -> None:
    """Rows of the hub's data sets all have the same keys, with nulls."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {}}}
    nulls = [
        make_message("user", "Hi", tool_calls=None),
        make_message("assistant", None, tool_calls=[call], weight=None),
    ]
    texts, _ = built(THINKS, {"messages": nulls, "tools": None})
    assert texts == [rendered(THINKS, nulls)]
    assert "has no text as content" in problem_of(
        THINKS, {"messages": [QUESTION, make_message("assistant", None)]}
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tools": "weather"}, "tools must be a list, or JSON of one, not 'weather'"),
        ({"tools": {"a": 1}}, "tools must be a list, or JSON of one"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a mapping of names to values"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must not name messages"),
        ({"system": 3}, "system must be a text, not 3"),
        ({"messages": "Hi"}, "messages must be a list, or JSON of one, not 'Hi'"),
        (
            {"messages": [QUESTION, make_message("assistant", "a", train="no")]},
            "has the train 'no', must be true or false",
        ),
        (
            {"messages": [QUESTION, make_message("assistant", "a", weight="1")]},
            "has the weight '1', must be 0 or 1",
        ),
    ],
)
def test_invalid_values_of_special_columns_are_refused(fields: Mapping[str, Any], expected: str) -> None:
    assert expected in problem_of(CHATML, {"messages": CHAT, **fields})


def test_a_prompt_that_ends_with_an_answer_is_refused() -> None:
    row = {"prompt": CHAT, "completion": [make_message("assistant", "more")]}
    assert "its prompt ends with an answer" in problem_of(CHATML, row)


def test_chats_with_several_renderings_are_cut_between_turns() -> None:
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, chat_template=ENDS_WITH_EOS)
    turns = [
        each
        for number in range(4)
        for each in (make_message("user", f"q{number}"), make_message("assistant", "a" * 9))
    ]
    row = Row(1, {"messages": [make_message("system", "Be kind."), *turns]})

    def examples(length: int, overflow: Any) -> tuple[list[Any], DataReport]:
        model = make_spec(sequence_length=length, vocabulary_size=1000)
        return build_examples([row], tokenizer, model, options=BuildOptions(overflow))

    whole, report = examples(900, "error")
    assert "others follow, split into several examples: 1 row (1)" in report.summary() and len(whole) == 4
    longest = max(report.lengths)
    for overflow in ("split", "truncate"):
        cut, report = examples(longest - 1, overflow)
        targets = [[target.token for target in each.sequences[0].targets] for each in whole]
        assert [[target.token for target in each.sequences[0].targets] for each in cut] == targets
        assert report.dropped == 0
        assert [each.sequences for each in cut[:3]] == [each.sequences for each in whole[:3]]
        text = tokenizer.decode(cut[3].sequences[0].tokens)
        assert "Be kind." in text and "q0" not in text and "q1" in text
        assert (
            "chats whose older turns don't fit before the answers that are trained on: 1 row (1)"
            in report.summary()
        )


def test_a_date_stands_for_today() -> None:
    def tokens(date: str | None) -> str:
        tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, chat_template=DATED)
        model = make_spec(sequence_length=900, vocabulary_size=1000)
        options = BuildOptions("error", date=date)
        return tokens_sha256(
            build_examples([Row(1, {"messages": CHAT})], tokenizer, model, options=options)[0]
        )

    texts, _ = built(DATED, {"messages": CHAT}, date="2024-02-28")
    assert texts == [f"<s>Today is 28 Feb 2024.\n{rendered(CHATML, CHAT)}"]
    assert tokens("2024-02-28") == tokens("2024-02-28") != tokens("2024-02-29") != tokens(None)


@pytest.mark.parametrize("source", ["{{ [1, 2, 3, 4, 5, 6, 7, 8, 9] | random }}", "{{ lipsum(1) }}"])
def test_templates_with_random_numbers_are_deterministic(source: str) -> None:
    first, second = (ChatTemplate(source, SPECIAL) for _ in range(2))
    texts = {each.render([QUESTION]) for each in (first, second, first)}
    assert len(texts) == 1


def test_no_template_is_compiled_without_messages() -> None:
    source = "{{ messages[0].role }}{% for m in messages %}{{ m.content }}|{% endfor %}"
    [result] = ChatTemplate(source, SPECIAL).renderings([ANSWER, QUESTION, ANSWER])
    assert [result.text[start:end] for start, end in result.spans] == ["Yo|", "Yo|"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["tool_calls", "reasoning_content"]),
        (CHATML.replace("in messages", "in messages if message.role != 'tool'"), None),
        (THINKS, []),
        (THINKS.replace("message.reasoning_content or ''", "''"), ["reasoning_content"]),
    ],
)
def test_ignored_parts_of_messages_are_reported(template: str, expected: list[str] | None) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {}}}
    messages = [
        QUESTION,
        make_message("assistant", "Let me see.", reasoning_content="Hm.", tool_calls=[call]),
    ]
    messages += [make_message("tool", "21"), ANSWER]
    tokenizer = Tokenizer(byte_level_backend(), bos_id=1, eos_id=2, chat_template=template)
    model = make_spec(sequence_length=900, vocabulary_size=1000)
    _, report = build_examples([Row(1, {"messages": messages})], tokenizer, model)
    result = [event.partition(" that the chat")[0] for event in report.notes if "leaves out" in event]
    all_of_it = ["messages of the role tool", "tool_calls", "reasoning_content"]
    assert result == (all_of_it if expected is None else expected)


def test_the_variables_of_a_template_are_listed() -> None:
    assert ChatTemplate(THINKS, SPECIAL).variables == {"tools", "enable_thinking"}
    assert ChatTemplate(CHATML, SPECIAL).variables == ChatTemplate(DATED, SPECIAL).variables == set()


def test_ambiguous_generation_tags_are_refused() -> None:
    source = TAGGED.replace("{%- for message in messages %}", "{%- for message in messages[-1:] %}")
    messages = [*CHAT, QUESTION, ANSWER]
    [result] = ChatTemplate(source, SPECIAL).renderings(messages)
    assert len(result.spans) == 1
    with raises(DataError, "turns-not-separable"):
        ChatTemplate(source, SPECIAL).renderings(messages, [3])


def test_unread_columns_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = built(CHATML, {"messages": CHAT, "told_once": 1})
    for _ in range(2):
        warn_unread(report)
    assert capsys.readouterr().err == "the data (messages): columns that are not read: told_once\n"
