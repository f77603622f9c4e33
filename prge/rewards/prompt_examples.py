"""Prompts as examples: a model writes their completions, and a reward scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prge.data.readers.files import Selection, select_rows
from prge.data.sources import RowSource
from prge.engine import TokenSequence
from prge.errors import DataError
from prge.generation.prompts import Prompt, Prompts
from prge.generation.row_prompts import read_row_prompts
from prge.objectives.examples import Example


@dataclass(frozen=True, slots=True)
class PromptExample(Example):
    """A prompt without a completion.

    Attributes:
        encoded: the prompt as the model reads it.
        source: the prompt as its row has it: a text or messages.
        fields: all columns of the row.
    """

    encoded: Prompt = field(default_factory=lambda: Prompt(()))
    source: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)


def prompt_examples(
    source: RowSource, selection: Selection, prompts: Prompts, *, context: int, max_length: int
) -> tuple[list[PromptExample], list[str]]:
    """Return an example for each prompt of the selected rows, and lines for the user on what was read.

    Args:
        source: the source of the rows; they need only prompts.
        selection: the rows to use.
        prompts: encodes texts and messages.
        context: maximum number of tokens of a prompt and its completion.
        max_length: maximum number of tokens of a completion.

    Raises:
        DataError: rows have no prompt, or leave no room for a completion; all such rows are named.
    """
    rows = select_rows(source.rows, selection)
    read, notes = read_row_prompts(source, rows, prompts, others="for the reward")
    if problems := [
        f"row {each.row.number}: its prompt has {len(each.prompt.tokens)} tokens, with {max_length} of a "
        f"completion the context of {context} is exceeded"
        for each in read
        if len(each.prompt.tokens) + max_length > context
    ]:
        raise DataError(
            f"{source.name} has prompts that are too long:",
            problems,
            remedy="Shorten them, or take a smaller --max-completion-length.",
            code="prompt-too-long",
        )
    if empty := [f"row {each.row.number}: its prompt is empty" for each in read if not each.prompt.tokens]:
        raise DataError(f"{source.name} can't be used:", empty, code="prompt-empty")
    examples = [
        PromptExample(
            each.row.number,
            (TokenSequence(each.prompt.tokens),),
            0,
            None,
            encoded=each.prompt,
            source=each.source,
            fields=each.row.fields,
        )
        for each in read
    ]
    return examples, notes


def rollout_context(prompts: Sequence[Example], max_length: int) -> int:
    """Return the largest number of tokens of a prompt and its completion of `max_length` tokens."""
    return max(len(prompt.sequences[0].tokens) for prompt in prompts) + max_length
