"""Answers that a model writes: the prompts of questions, cut so that an answer has room behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prge.errors import DataError
from prge.examples import Example
from prge.rows.task import Generate
from prge.rows.tokenizer import Tokenizer

Prompt = tuple[int, ...]
Writer = Callable[[Sequence[Prompt], Generate], Sequence[str]]
"""The likeliest text after each of some prompts."""


def prompt_of(example: Example, tokenizer: Tokenizer, room: int) -> Prompt:
    """The tokens before an example's answer; of those beyond `room` it loses the beginning, as in MeZO."""
    sequence = example.sequences[0]
    prompt = sequence.tokens[: sequence.slots[0].position + 1]
    if len(prompt) <= room:
        return prompt
    begin = tokenizer.begin
    return (*begin, *prompt[-max(room - len(begin), 1) :])


def prompts_of(
    examples: Sequence[Example], tokenizer: Tokenizer, generate: Generate, context: int, cut: bool
) -> tuple[list[Prompt], list[int]]:
    """Prompts of questions, and the rows of those that were cut.

    Args:
        examples: of a task whose answers are texts.
        generate: how long an answer may be.
        context: most tokens of prompt and answer together.
        cut: whether prompts that are too long may be cut.

    Raises:
        DataError: some are too long and must not be cut, or answers leave no room for any prompt.
    """
    room = context - generate.max_tokens
    if room <= len(tokenizer.begin):
        raise DataError(
            f"answers of up to {generate.max_tokens} tokens leave no room for a question",
            [f"question and answer together have at most {context} tokens"],
            remedy="lower generate.max_tokens of the task, or export with a larger --sequence-length",
        )
    long = [example.row for example in examples if example.sequences[0].slots[0].position >= room]
    if long and not cut:
        raise DataError(
            f"questions leave no room for answers of up to {generate.max_tokens} tokens",
            [f"row {row}: the question has more than {room} tokens" for row in long],
            remedy="lower generate.max_tokens of the task, export with a larger --sequence-length, or set "
            "overflow to truncate",
        )
    return [prompt_of(example, tokenizer, room) for example in examples], long
