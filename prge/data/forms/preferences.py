"""Rows of preferences in TRL's formats, converted to two answers that are compared.

chosen, rejected           two texts or two lists of messages with a common beginning, which is the prompt
prompt, chosen, rejected   the answers after the prompt, or including it
prompt, completion, label  an answer, and whether it is liked
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prge.data.columns import Fields, RowError
from prge.data.forms.messages import (
    SYSTEM,
    make_conversation,
    template_variables,
    to_messages,
    with_system,
    without_training,
)
from prge.data.readers.files import Row
from prge.data.segments import Candidates, SegmentedText, Segmenter
from prge.errors import format_value

# Text, or messages.
Content = TypeVar("Content", str, list[Any])
OTHER = "other"
_LABELS = {"true": True, "false": False, "1": True, "0": False}


def pair_candidates(segmenter: Segmenter, variables: Sequence[str], row: Row) -> Candidates:
    """Return the chosen and the rejected answer of a pair as candidates.

    Args:
        segmenter: converts texts to segments.
        variables: columns that are variables of the chat template.
        row: A row with a pair.

    Raises:
        RowError: the row is not a valid pair.
        DataError, BundleError: as `messages_texts`.
    """
    pair = parse_pair(row.fields)
    answers = [pair["chosen"], pair["rejected"]]
    return Candidates(_texts(segmenter, variables, row, pair["prompt"], answers), "answers", 0)


def rating_candidates(segmenter: Segmenter, variables: Sequence[str], row: Row) -> Candidates:
    """Return a row's answer to its prompt as a candidate, and another row's one (see `rows_for_kto`)."""
    # Rows without a label are invalid pairs, whose error parse_pair raises.
    rating = parse_rating(row.fields) if {OTHER, "label"} & row.fields.keys() else parse_pair(row.fields)
    answers = [rating["completion"]]
    if OTHER in rating:
        answers.append(rating[OTHER])
        if type(rating[OTHER]) is not type(rating["prompt"]):
            raise RowError(
                "it and the row before must both be texts or both be messages", code="texts-and-messages"
            )
    texts = _texts(segmenter, variables, row, rating["prompt"], answers)
    is_liked = rating["label"]
    return Candidates(texts, "answers", None, is_liked, class_name=str(is_liked).lower())


def _texts(
    segmenter: Segmenter, variables: Sequence[str], row: Row, prompt: Any, answers: Sequence[Any]
) -> tuple[SegmentedText, ...]:
    """Return the texts of answers to one prompt, all texts or all messages."""
    if not isinstance(prompt, list):
        return tuple(
            segmenter.trained_text(*segmenter.prompt_and_completion(prompt, answer)) for answer in answers
        )
    from prge.data.tokenization.chat import check_messages, trained_turns

    try:
        prompt_messages = check_messages(with_system(row.fields.get(SYSTEM), prompt), answered=False)
        conversations = [check_messages([*prompt_messages, *answer]) for answer in answers]
    except ValueError as error:
        raise RowError(str(error), code="messages-malformed") from None
    texts = []
    for messages in conversations:
        turns = [index for index in trained_turns(messages) if index >= len(prompt_messages)]
        if not turns:
            raise RowError("one of its answers has no assistant message to train on", code="nothing-to-learn")
        template_arguments = template_variables(row.fields, variables)
        conversation = make_conversation(segmenter, row.number, messages, turns, template_arguments)
        renderings = conversation.renderings()
        if len(renderings) != 1 or len(renderings[0].turns) < len(turns):
            raise RowError(
                "one of its answers has several turns, and the chat template renders turns differently once "
                "others follow: end the answer after the first turn",
                code="turns-rendered-differently",
            )
        texts.append(conversation.to_segments(renderings[0]))
    return tuple(texts)


def chosen_fields(fields: Fields, chat: bool) -> Fields:
    """Return the chosen answer of a pair as `prompt` and `completion` or as `messages`; raises RowError."""
    pair = parse_pair(fields)
    return _as_completion(pair["prompt"], pair["chosen"])


def rated_fields(fields: Fields, chat: bool) -> Fields:
    """Return a rated answer as `prompt` and `completion` or as `messages`; raises RowError."""
    rating = parse_rating(fields)
    return _as_completion(rating["prompt"], rating["completion"])


def _as_completion(prompt: Any, answer: Any) -> Fields:
    if isinstance(prompt, list):
        return {"messages": [*without_training(prompt), *answer]}
    return {"prompt": prompt, "completion": answer}


def parse_pair(fields: Fields) -> Fields:
    """Parse a pair to `prompt`, `chosen` and `rejected`, all texts or all messages; raises RowError."""
    prompt, chosen, rejected = fields.get("prompt"), fields["chosen"], fields["rejected"]
    if isinstance(prompt, list) and isinstance(chosen, str) and isinstance(rejected, str):
        chosen, rejected = to_messages(chosen, "assistant"), to_messages(rejected, "assistant")
    _check_same_type({"chosen": chosen, "rejected": rejected})
    if chosen == rejected:
        raise RowError("its chosen and rejected answers are equal", code="answers-equal")
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        _check_not_empty(name, value)
    if isinstance(chosen, list):
        if isinstance(prompt, str):
            prompt = _prompt_messages(prompt, chosen, rejected)
        parts = _split_prompt(
            chosen, rejected, _common_prefix(chosen, rejected) if prompt is None else prompt
        )
    else:
        if not isinstance(prompt, str | None):
            raise RowError(
                f"its prompt is {format_value(prompt)}, must be a text like its chosen answer",
                code="texts-and-messages",
            )
        parts = _split_prompt(
            chosen, rejected, _common_word_prefix(chosen, rejected) if prompt is None else prompt
        )
    for name, value in zip(("chosen", "rejected"), parts[1:], strict=True):
        _check_not_empty(name, value, " after the common beginning")
    return dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))


def parse_rating(fields: Fields) -> Fields:
    """Parse a rated answer to `prompt`, `completion` and `label`, true or false; raises RowError."""
    prompt, completion, label = fields["prompt"], fields["completion"], fields["label"]
    if isinstance(prompt, list) != isinstance(completion, list):
        prompt, completion = to_messages(prompt, "user"), to_messages(completion, "assistant")
        other = {OTHER: to_messages(fields[OTHER], "assistant")} if OTHER in fields else {}
        fields = {**fields, "prompt": prompt, "completion": completion, **other}
    _check_same_type({"prompt": prompt, "completion": completion})
    _check_not_empty("completion", completion)
    known = _LABELS.get(str(label).lower()) if isinstance(label, bool | int | str) else None
    if known is None:
        raise RowError(
            f"its label is {format_value(label)}, must be true or false; --objective completion trains on "
            "completions with any label",
            code="label-unknown",
        )
    return {**fields, "label": known}


def rows_for_kto(rows: Sequence[Row], are_pairs: bool) -> list[Row]:
    """Return rows of ratings, each with the previous row's completion as `other` (the first: the last row's).

    Each pair becomes a liked and a disliked answer, and the liked answers come first. Invalid pairs stay.
    """
    invalid: list[Row] = []
    if are_pairs:
        pairs: list[tuple[Row, Fields]] = []
        for row in rows:
            try:
                pairs.append((row, parse_pair(row.fields)))
            except (KeyError, RowError):
                invalid.append(row)
        rows = [
            Row(
                row.number, {**row.fields, "prompt": pair["prompt"], "completion": pair[side], "label": liked}
            )
            for side, liked in (("chosen", True), ("rejected", False))
            for row, pair in pairs
        ]
    completions = [row.fields.get("completion") for row in rows]
    completions = [each if isinstance(each, str | list) else "" for each in completions]
    other = next((each for each in reversed(completions) if each), "")
    rated = []
    for row, completion in zip(rows, completions, strict=True):
        rated.append(Row(row.number, {**row.fields, OTHER: other}))
        other = completion or other
    return rated + invalid


def _check_same_type(values: Mapping[str, object]) -> None:
    for name, each in values.items():
        if not isinstance(each, str | list):
            raise RowError(
                f"its {name} is {format_value(each)}, must be a text or a list of messages",
                code="column-not-messages",
            )
    if len({type(each) for each in values.values()}) > 1:
        raise RowError(
            f"its {' and '.join(values)} must be both texts or both lists of messages",
            code="texts-and-messages",
        )


def _check_not_empty(name: str, value: str | list[Any], where: str = "") -> None:
    if not (value.strip() if isinstance(value, str) else value):
        raise RowError(f"its {name} is empty{where}", code="answer-empty")


def _split_prompt(chosen: Content, rejected: Content, prompt: Content) -> tuple[Content, Content, Content]:
    """Return prompt, chosen and rejected; a prompt that both answers begin with is removed from them."""
    size = len(prompt)
    starts_with_prompt = [each[:size] == prompt for each in (chosen, rejected)]
    if all(starts_with_prompt):
        return prompt, chosen[size:], rejected[size:]
    # One word may begin an answer by chance.
    if any(starts_with_prompt) and (isinstance(prompt, list) or len(prompt.split()) > 1):
        names = ("chosen", "rejected") if starts_with_prompt[0] else ("rejected", "chosen")
        raise RowError(
            f"its prompt begins {names[0]} and not {names[1]}: repeat it in both, or in neither",
            code="prompt-of-one-answer",
        )
    return prompt, chosen, rejected


def _common_word_prefix(chosen: str, rejected: str) -> str:
    """Return the common beginning of two texts in whole words; a space after it belongs to the answers."""
    common = "".join(_common_prefix(chosen, rejected))
    end = max((index for index, letter in enumerate(common) if letter.isspace()), default=len(common) - 1)
    return common[:end] if common[end : end + 1] == " " else common[: end + 1]


def _common_prefix(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return the common beginning of two texts or lists; raises RowError if it is empty."""

    def equal() -> Iterator[Any]:
        for each, other in zip(first, second, strict=False):
            if each != other:
                return
            yield each

    common = list(equal())
    if not common:
        raise RowError(
            "its chosen and rejected have no common beginning, and there is no prompt", code="prompt-missing"
        )
    return common


def _prompt_messages(prompt: str, chosen: list[Any], rejected: list[Any]) -> list[Any]:
    """Return the messages before two answers that correspond to a prompt given as a text."""
    firsts = [each[0].get("role") if isinstance(each[0], dict) else None for each in (chosen, rejected)]
    if firsts == ["assistant", "assistant"]:
        return [{"role": "user", "content": prompt}]
    common = _common_prefix(chosen, rejected)
    if not isinstance(common[-1], dict) or common[-1].get("content") != prompt:
        raise RowError(
            f"its prompt is {format_value(prompt)}, but chosen and rejected don't both begin with it",
            code="prompt-of-no-answer",
        )
    return common
