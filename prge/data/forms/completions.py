"""Rows of a text, or of a prompt and a completion."""

from __future__ import annotations

from prge.data.columns import Fields, RowError, get_text
from prge.data.forms.messages import to_messages, without_training
from prge.data.readers.files import Row
from prge.data.segments import Segmenter, Texts
from prge.errors import format_value


def whole_text(segmenter: Segmenter, row: Row) -> Texts:
    """Convert a row of `text`, all of which is trained on; raises RowError."""
    return Texts((segmenter.trained_text(segmenter.text(get_text(row.fields, "text"))),))


def completion_text(segmenter: Segmenter, row: Row) -> Texts:
    """Convert a row of `prompt` and `completion`, which is trained on; both are texts; raises RowError."""
    prompt, completion = (get_text(row.fields, column) for column in ("prompt", "completion"))
    return Texts((segmenter.trained_text(*segmenter.prompt_and_completion(prompt, completion)),))


def completion_fields(fields: Fields, chat: bool) -> Fields:
    """Convert `prompt` and `completion` to `messages` if one of them is a list; raises RowError."""
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return fields
    prompt_messages, completion_messages = to_messages(prompt, "user"), to_messages(completion, "assistant")
    for name, value in (
        ("prompt", prompt_messages),
        ("completion", [] if completion is None else completion_messages),
    ):
        if not isinstance(value, list):
            raise RowError(
                f"its {name} is {format_value(value)}, must be a text or a list of messages",
                code="column-not-messages",
            )
    if (
        prompt_messages
        and isinstance(prompt_messages[-1], dict)
        and prompt_messages[-1].get("role") == "assistant"
    ):
        raise RowError(
            "its prompt ends with an answer: move it to the completion, or leave it out",
            code="prompt-ends-with-answer",
        )
    return {"messages": [*without_training(prompt_messages), *(completion_messages or [])]}
