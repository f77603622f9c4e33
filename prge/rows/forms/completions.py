"""Rows of a text, or of a prompt and its completion, to texts that are learnt."""

from __future__ import annotations

from prge.errors import shown
from prge.rows.columns import Fields, RowError, text_of
from prge.rows.forms.messages import as_messages, unlearnt
from prge.rows.readers.files import Row
from prge.rows.segments import Segmenter, Texts


def whole_text(segmenter: Segmenter, row: Row) -> Texts:
    """A row of `text`, all of which is learnt; raises RowError."""
    return Texts((segmenter.learnt(segmenter.text(text_of(row.fields, "text"))),))


def completion_text(segmenter: Segmenter, row: Row) -> Texts:
    """A row of `prompt` and `completion`, both texts, of which the completion is learnt; raises RowError."""
    prompt, completion = (text_of(row.fields, column) for column in ("prompt", "completion"))
    return Texts((segmenter.learnt(*segmenter.completed(prompt, completion)),))


def completion_fields(fields: Fields, chat: bool) -> Fields:
    """A row of `prompt` and `completion`, as `messages` where one of them is; raises RowError."""
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return fields
    asked, answer = as_messages(prompt, "user"), as_messages(completion, "assistant")
    for name, said in (("prompt", asked), ("completion", [] if completion is None else answer)):
        if not isinstance(said, list):
            raise RowError(
                f"its {name} is {shown(said)}, must be a text or a list of messages",
                code="column-not-messages",
            )
    if asked and isinstance(asked[-1], dict) and asked[-1].get("role") == "assistant":
        raise RowError(
            "its prompt ends with an answer: put that into the completion, or leave it out",
            code="prompt-ends-with-answer",
        )
    return {"messages": [*unlearnt(asked), *(answer or [])]}
