"""Forms of rows: recognition by their columns, and conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from prge.data.columns import RowError, format_columns
from prge.data.forms.form import find_form
from prge.data.readers.files import Row
from prge.errors import DataError
from tests.refusals import raises


def rows(*fields: Mapping[str, Any]) -> list[Row]:
    return [Row(number, each) for number, each in enumerate(fields, 1)]


def plain(fields: Mapping[str, Any], *, chat: bool = True, prompts_only: bool = False) -> Mapping[str, Any]:
    form = find_form(rows(fields), "the data", prompts_only=prompts_only)
    return form.row(Row(1, fields), chat=chat, prompts_only=prompts_only).fields


def turn(role: str, value: str) -> dict[str, str]:
    return {"from": role, "value": value}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        ("text", "text"),
        ("prompt completion", "prompt and completion"),
        ("messages", "messages"),
        ("instruction output", "Alpaca"),
        ("instruction input output", "Alpaca"),
        ("conversations", "ShareGPT"),
        # Rows that match several forms have the first one.
        ("text prompt completion", "prompt and completion"),
        ("text instruction input output", "Alpaca"),
        ("prompt messages", "messages"),
        ("prompt chosen rejected messages score_chosen", "pairs"),
        ("prompt completion label", "ratings"),
    ],
)
def test_columns_determine_the_form(columns: str, form: str) -> None:
    assert find_form(rows(dict.fromkeys(columns.split(), "a")), "the data").name == form


def test_columns_that_the_user_names_choose_the_form() -> None:
    both = rows({"text": "a", "prompt": "b", "completion": "c"})
    assert find_form(both, "the data").name == "prompt and completion"
    assert find_form(both, "the data", ["text"]).name == "text"
    with raises(DataError, "form-unknown", containing="text, prompt, completion"):
        find_form(both, "the data", ["txt"])


def test_the_error_for_unknown_columns_lists_known_forms() -> None:
    with pytest.raises(DataError) as caught:
        find_form(rows({"question": "a", "answer": "b"}), "a.jsonl")
    [problem] = caught.value.problems
    assert problem == (
        "its columns are question, answer; known are pairs: chosen, rejected; "
        "messages: messages; ShareGPT: conversations; ratings: prompt, completion, label; "
        "prompt and completion: prompt, completion; Alpaca: instruction, output; text: text"
    )
    assert "--columns prompt=question completion=answer" in caught.value.remedy


def test_a_file_has_one_form() -> None:
    mixed = rows({"text": "a"}, {"instruction": "a", "output": "b"})
    with raises(DataError, "forms-mixed", containing="Alpaca, text"):
        find_form(mixed, "the data")


def test_an_instruction_is_a_message_where_the_model_chats() -> None:
    fields = {"instruction": "Translate.", "input": "Hund", "output": "dog"}
    assert plain(fields) == {"messages": [message("user", "Translate.\n\nHund"), message("assistant", "dog")]}
    assert plain({**fields, "input": ""})["messages"][0] == message("user", "Translate.")
    assert plain({**fields, "input": None}) == plain({**fields, "input": ""})


def test_an_instruction_has_headings_where_the_model_has_no_template() -> None:
    fields = {"instruction": "Translate.", "input": "Hund", "output": "dog"}
    assert plain(fields, chat=False) == {
        "prompt": "### Instruction:\nTranslate.\n\n### Input:\nHund\n\n### Response:\n",
        "completion": "dog",
    }
    assert plain({**fields, "input": ""}, chat=False)["prompt"] == (
        "### Instruction:\nTranslate.\n\n### Response:\n"
    )


@pytest.mark.parametrize("roles", [("system", "human", "gpt"), ("SYSTEM", "User", "Assistant")])
def test_turns_are_messages(roles: tuple[str, str, str]) -> None:
    turns = [turn(role, text) for role, text in zip(roles, "abc", strict=True)]
    expected = [message("system", "a"), message("user", "b"), message("assistant", "c")]
    assert plain({"conversations": turns}) == {"messages": expected}
    assert plain({"conversations": expected}) == {"messages": expected}


@pytest.mark.parametrize(
    ("fields", "code", "value"),
    [
        ({"conversations": []}, "turns-malformed", "conversations"),
        ({"conversations": "Hi"}, "column-not-json", "'Hi'"),
        ({"conversations": [turn("human", "a"), {"from": "gpt"}]}, "turns-malformed", "turn 2"),
        (
            {"conversations": [turn("observation", "a")]},
            "role-unknown",
            "'observation'",
        ),
        ({"instruction": " ", "output": "a"}, "prompt-empty", "instruction"),
        ({"instruction": "a", "output": ""}, "answer-empty", "output"),
        ({"instruction": 3, "output": "a"}, "column-not-text", "'instruction'"),
        ({"instruction": "a", "input": 3, "output": "a"}, "column-not-text", "'input'"),
    ],
)
def test_invalid_rows_are_refused(fields: Mapping[str, Any], code: str, value: str) -> None:
    with raises(RowError, code, containing=value):
        plain(fields)


def test_a_row_of_another_form_is_refused() -> None:
    form = find_form(rows({"text": "a"}), "the data")
    with raises(RowError, "row-of-other-form", containing="txt"):
        form.row(Row(2, {"txt": "a"}), chat=False)


def test_a_row_has_nothing_of_other_forms() -> None:
    row = Row(1, {"text": "a", "messages": [], "id": 1})
    form = find_form([row], "the data", ["text"])
    assert form.row(row, chat=True) == Row(1, {"text": "a"})


def test_prompts_need_no_answer() -> None:
    assert plain({"prompt": "a"}, prompts_only=True) == {"prompt": "a"}
    assert plain({"instruction": "a"}, prompts_only=True) == {"messages": [message("user", "a")]}
    assert plain({"instruction": "a"}, prompts_only=True, chat=False)["prompt"].endswith("### Response:\n")


def test_format_columns() -> None:
    present = ["prompt", "completion", "id"]
    read = ("prompt", "completion")
    assert format_columns(read, present, {}) == "prompt, completion; not read: id"
    assert format_columns(read, present, {}, "for the reward") == "prompt, completion; for the reward: id"
    assert format_columns(read, present[:2], {"prompt": "question", "completion": "completion"}) == (
        "prompt from question, completion"
    )
