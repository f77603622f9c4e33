"""Rows that say what is preferred, as TRL has them, to two answers that are compared.

chosen, rejected           two texts or two lists of messages with a common beginning, which is the prompt
prompt, chosen, rejected   what follows the prompt, or the whole with it
prompt, completion, label  an answer, and whether it is liked
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prge.errors import shown
from prge.rows.columns import Fields, RowError
from prge.rows.forms.messages import (
    SYSTEM,
    as_messages,
    conversation_of,
    template_variables,
    unlearnt,
    with_system,
)
from prge.rows.readers.files import Row
from prge.rows.segments import Candidates, SegmentedText, Segmenter

# A text, or messages.
Said = TypeVar("Said", str, list[Any])
OTHER = "other"
_LABELS = {"true": True, "false": False, "1": True, "0": False}


def pair_candidates(segmenter: Segmenter, variables: Sequence[str], row: Row) -> Candidates:
    """The chosen answer of a pair, then the rejected one.

    Args:
        segmenter: of the rows.
        variables: columns that are variables of the chat template.
        row: of a pair.

    Raises:
        RowError: it is no pair, or can't be learnt.
        DataError, BundleError: as of `messages_texts`.
    """
    pair = pair_fields(row.fields)
    answers = [pair["chosen"], pair["rejected"]]
    return Candidates(_texts(segmenter, variables, row, pair["prompt"], answers), "answers", 0)


def rating_candidates(segmenter: Segmenter, variables: Sequence[str], row: Row) -> Candidates:
    """The answer of a row of `rated_rows`, then that of the other row after the same prompt; see above."""
    # A pair that can't be used tells why.
    rating = rating_fields(row.fields) if OTHER in row.fields else pair_fields(row.fields)
    if type(rating[OTHER]) is not type(rating["prompt"]):
        raise RowError("it and the row before are not both texts or both messages", code="texts-and-messages")
    answers = [rating["completion"], rating[OTHER]]
    texts = _texts(segmenter, variables, row, rating["prompt"], answers)
    is_liked = rating["label"]
    return Candidates(texts, "answers", None, is_liked, class_name=str(is_liked).lower())


def _texts(
    segmenter: Segmenter, variables: Sequence[str], row: Row, prompt: Any, answers: Sequence[Any]
) -> tuple[SegmentedText, ...]:
    """Answers after one prompt, all texts or all messages."""
    if not isinstance(prompt, list):
        return tuple(segmenter.learnt(*segmenter.completed(prompt, answer)) for answer in answers)
    from prge.rows.tokenization.chat import check_messages, learnt_turns

    try:
        asked = check_messages(with_system(row.fields.get(SYSTEM), prompt), answered=False)
        whole = [check_messages([*asked, *answer]) for answer in answers]
    except ValueError as error:
        raise RowError(str(error), code="messages-malformed") from None
    texts = []
    for messages in whole:
        turns = [index for index in learnt_turns(messages) if index >= len(asked)]
        if not turns:
            raise RowError(
                "one of its answers has no message of the assistant's that is learnt", code="nothing-to-learn"
            )
        given = template_variables(row.fields, variables)
        conversation = conversation_of(segmenter, row.number, messages, turns, given)
        renderings = conversation.renderings()
        if len(renderings) != 1 or len(renderings[0].turns) < len(turns):
            raise RowError(
                "one of its answers has several turns, which the chat template renders otherwise once others "
                "follow: end it after the first one",
                code="turns-rendered-differently",
            )
        texts.append(conversation.segmented(renderings[0]))
    return tuple(texts)


def liked_fields(fields: Fields, chat: bool) -> Fields:
    """What is liked of a pair, as `prompt` and `completion` or as `messages`; raises RowError."""
    pair = pair_fields(fields)
    return _answered(pair["prompt"], pair["chosen"])


def rated_fields(fields: Fields, chat: bool) -> Fields:
    """A rated answer, as `prompt` and `completion` or as `messages`; raises RowError."""
    rating = rating_fields(fields)
    return _answered(rating["prompt"], rating["completion"])


def _answered(prompt: Any, answer: Any) -> Fields:
    if isinstance(prompt, list):
        return {"messages": [*unlearnt(prompt), *answer]}
    return {"prompt": prompt, "completion": answer}


def pair_fields(fields: Fields) -> Fields:
    """A pair as `prompt`, `chosen` and `rejected`, all texts or all messages; raises RowError."""
    prompt, chosen, rejected = fields.get("prompt"), fields["chosen"], fields["rejected"]
    if isinstance(prompt, list) and isinstance(chosen, str) and isinstance(rejected, str):
        chosen, rejected = as_messages(chosen, "assistant"), as_messages(rejected, "assistant")
    _check_alike({"chosen": chosen, "rejected": rejected})
    if chosen == rejected:
        raise RowError("its chosen and rejected are equal: nothing is preferred", code="answers-equal")
    for name, said in (("chosen", chosen), ("rejected", rejected)):
        _check_said(name, said)
    if isinstance(chosen, list):
        if isinstance(prompt, str):
            prompt = _asked_by(prompt, chosen, rejected)
        parts = _parted(chosen, rejected, _common(chosen, rejected) if prompt is None else prompt)
    else:
        if not isinstance(prompt, str | None):
            raise RowError(
                f"its prompt is {shown(prompt)}, must be a text, as its chosen is", code="texts-and-messages"
            )
        parts = _parted(chosen, rejected, _common_words(chosen, rejected) if prompt is None else prompt)
    for name, said in zip(("chosen", "rejected"), parts[1:], strict=True):
        _check_said(name, said, " after what both begin with")
    return dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))


def rating_fields(fields: Fields) -> Fields:
    """A rated answer as `prompt`, `completion` and `label`, true or false; raises RowError."""
    prompt, completion, label = fields["prompt"], fields["completion"], fields["label"]
    if isinstance(prompt, list) != isinstance(completion, list):
        prompt, completion = as_messages(prompt, "user"), as_messages(completion, "assistant")
        other = {OTHER: as_messages(fields[OTHER], "assistant")} if OTHER in fields else {}
        fields = {**fields, "prompt": prompt, "completion": completion, **other}
    _check_alike({"prompt": prompt, "completion": completion})
    _check_said("completion", completion)
    known = _LABELS.get(str(label).lower()) if isinstance(label, bool | int | str) else None
    if known is None:
        raise RowError(
            f"its label is {shown(label)}, must be true or false; --objective completion learns completions "
            "whatever their label",
            code="label-unknown",
        )
    return {**fields, "label": known}


def rated_rows(rows: Sequence[Row], are_pairs: bool) -> list[Row]:
    """Rows of ratings, each with the completion of the one before as `other`, the first with the last one's.

    Pairs become a liked and a disliked answer each, first all that are liked; one that can't be used stays.
    """
    broken: list[Row] = []
    if are_pairs:
        pairs: list[tuple[Row, Fields]] = []
        for row in rows:
            try:
                pairs.append((row, pair_fields(row.fields)))
            except (KeyError, RowError):
                broken.append(row)
        rows = [
            Row(
                row.number, {**row.fields, "prompt": pair["prompt"], "completion": pair[side], "label": liked}
            )
            for side, liked in (("chosen", True), ("rejected", False))
            for row, pair in pairs
        ]
    said = [row.fields.get("completion") for row in rows]
    said = [each if isinstance(each, str | list) else "" for each in said]
    other = next((each for each in reversed(said) if each), "")
    found = []
    for row, own in zip(rows, said, strict=True):
        found.append(Row(row.number, {**row.fields, OTHER: other}))
        other = own or other
    return found + broken


def _check_alike(said: Mapping[str, object]) -> None:
    for name, each in said.items():
        if not isinstance(each, str | list):
            raise RowError(
                f"its {name} is {shown(each)}, must be a text or a list of messages",
                code="column-not-messages",
            )
    if len({type(each) for each in said.values()}) > 1:
        raise RowError(
            f"its {' and '.join(said)} must be both texts or both lists of messages",
            code="texts-and-messages",
        )


def _check_said(name: str, said: str | list[Any], where: str = "") -> None:
    if not (said.strip() if isinstance(said, str) else said):
        raise RowError(f"its {name} is empty{where}", code="answer-empty")


def _parted(chosen: Said, rejected: Said, prompt: Said) -> tuple[Said, Said, Said]:
    """Prompt, and what follows it: the answers as they are, or without the prompt that both begin with."""
    size = len(prompt)
    begin = [each[:size] == prompt for each in (chosen, rejected)]
    if all(begin):
        return prompt, chosen[size:], rejected[size:]
    # A word that one answer begins with too is no prompt of it.
    if any(begin) and (isinstance(prompt, list) or len(prompt.split()) > 1):
        names = ("chosen", "rejected") if begin[0] else ("rejected", "chosen")
        raise RowError(
            f"its prompt begins {names[0]} and not {names[1]}: give it before both, or before none",
            code="prompt-of-one-answer",
        )
    return prompt, chosen, rejected


def _common_words(chosen: str, rejected: str) -> str:
    """The common beginning of two texts in whole words; the space before the next word is the answers'."""
    common = "".join(_common(chosen, rejected))
    end = max((index for index, letter in enumerate(common) if letter.isspace()), default=len(common) - 1)
    return common[:end] if common[end : end + 1] == " " else common[: end + 1]


def _common(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """What two texts or lists begin with alike."""

    def equal() -> Iterator[Any]:
        for each, other in zip(first, second, strict=False):
            if each != other:
                return
            yield each

    found = list(equal())
    if not found:
        raise RowError(
            "its chosen and rejected have no common beginning, and there is no prompt", code="prompt-missing"
        )
    return found


def _asked_by(prompt: str, chosen: list[Any], rejected: list[Any]) -> list[Any]:
    """The messages before two answers that a prompt in words stands for."""
    firsts = [each[0].get("role") if isinstance(each[0], dict) else None for each in (chosen, rejected)]
    if firsts == ["assistant", "assistant"]:
        return [{"role": "user", "content": prompt}]
    common = _common(chosen, rejected)
    if not isinstance(common[-1], dict) or common[-1].get("content") != prompt:
        raise RowError(
            f"its prompt is {shown(prompt)}, its chosen and rejected don't both begin with it",
            code="prompt-of-no-answer",
        )
    return common
