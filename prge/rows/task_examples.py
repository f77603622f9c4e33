"""Prompts with completions, and a task's rows: candidates of a decoder, classes of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prge.engine import Target, TokenSequence
from prge.learning.examples import Example
from prge.rows.control_tokens import in_texts
from prge.rows.conversations import INEXACT
from prge.rows.readers import Row
from prge.rows.report import ENCODER_CUT, PROMPT_CUT
from prge.rows.task import RowError, Task
from prge.rows.tokenizer import Ids, Pair
from prge.rows.windows import Made, Masked, Reading, check_vocabulary, count_unknown, learnt, learnt_after

# Pieces of a word that an error spells.
SPELLED = 8


def completion(reading: Reading, row: int, prompt: str, text: str) -> Made:
    """Examples that learn a completion, the end-of-sequence token after it."""
    masked = completed(reading, prompt, text)
    most = len(masked.tokens)
    if reading.overflow == "truncate":
        # What lies further on is never learnt.
        most = int(masked.mask.argmax()) + reading.length + 1
    left = replace(masked, tokens=masked.tokens[:most], mask=masked.mask[:most])
    made = learnt(reading, row, left)
    return replace(made, dropped=made.dropped + len(masked.tokens[most:]))


def completed(reading: Reading, prompt: str, text: str) -> Masked:
    """A prompt and its completion, which is learnt with the end-of-sequence token after it.

    Raises:
        RowError: the completion is empty.
    """
    pair = reading.pair(prompt, text)
    if not len(pair.completion):
        raise RowError("its completion is empty: there is nothing to learn from")
    # What lies further back than the longest row is never read.
    begin = len(reading.tokenizer.begin)
    dropped = max(len(pair.prompt) - begin - reading.length, 0)
    answer = reading.ended(pair.completion)
    tokens = np.concatenate([pair.prompt[:begin], pair.prompt[begin + dropped :], answer])
    mask = learnt_after(len(pair.prompt) - dropped, len(tokens))
    return Masked(tokens, mask, begin, dropped, () if pair.exact else (INEXACT,))


def task_examples(task: Task, training: bool, reading: Reading, row: Row) -> Made:
    """Examples of a task's row; in training an objective of completions has the right candidate alone."""
    if reading.model.is_encoder:
        return _encoder_example(reading, task, row)
    prompt = task.prompt(row.fields)
    if task.is_completion:
        answers = task.answers(row.fields)
        made = completion(reading, row.number, prompt, task.join(prompt, answers[0]))
        return replace(made, examples=tuple(replace(each, answers=answers) for each in made.examples))
    candidates, label = task.candidates(row.fields), task.label(row.fields)
    answers = task.answers(row.fields) or (candidates[label],)
    is_alone = training and task.objective == "completion"
    texts = [task.candidate_text(prompt, candidate, row.fields) for candidate in candidates]
    pairs = [reading.pair(prompt, text) for text in ([texts[label]] if is_alone else texts)]
    if not all(len(pair.completion) for pair in pairs):
        raise RowError("has an empty candidate")
    sequences, is_cut = _candidates(reading, texts, pairs)
    count, right = (1, None) if is_alone else (len(pairs), label)
    events = () if all(pair.exact for pair in pairs) else (INEXACT,)
    return Made(
        (Example(row.number, sequences, count, right, answers, candidates),),
        (*events, PROMPT_CUT) if is_cut else events,
        unknown=sum(count_unknown(reading, pair.completion) for pair in pairs),
        label=task.classes[label] if task.classes else None,
    )


def _candidates(
    reading: Reading, texts: Sequence[str], pairs: Sequence[Pair]
) -> tuple[tuple[TokenSequence, ...], bool]:
    """Sequences of candidates after one prompt, cut alike for all of them, and whether it was cut."""
    longest = max(len(pair.completion) for pair in pairs)
    prompt = _cut_prompt(reading, pairs[0].prompt, 0 if longest == 1 else longest)
    is_cut, at = len(prompt) < len(pairs[0].prompt), len(prompt) - 1
    if longest == 1:
        tokens = [int(pair.completion[0]) for pair in pairs]
        if len(set(tokens)) < len(tokens):
            raise RowError(f"has two candidates that are one token: {_spelled(reading, texts, pairs)}")
        check_vocabulary(reading, [*prompt, *tokens])
        of_all = tuple(Target(at, token, 1.0, index) for index, token in enumerate(tokens))
        return (TokenSequence(prompt, of_all),), is_cut
    sequences = []
    for index, pair in enumerate(pairs):
        check_vocabulary(reading, [*prompt, *pair.completion])
        weight = 1 / len(pair.completion)
        tokens = pair.completion.tolist()
        targets = [Target(at + k, token, weight, index) for k, token in enumerate(tokens)]
        sequences.append(TokenSequence((*prompt, *tokens), tuple(targets)))
    return tuple(sequences), is_cut


def _cut_prompt(reading: Reading, prompt: Ids, after: int) -> tuple[int, ...]:
    """The prompt without as much of its beginning as leaves room for `after` tokens; `begin` stays."""
    if not len(prompt):
        raise RowError("has an empty prompt: nothing predicts its candidates")
    room = reading.length - after
    if len(prompt) <= room:
        return tuple(prompt.tolist())
    begin = reading.tokenizer.begin
    if reading.overflow == "error":
        raise RowError(
            f"has a prompt of {len(prompt)} tokens and {after} after it, the bundle takes {reading.length}: "
            "shorten it, export with a larger --sequence-length, or set overflow to truncate"
        )
    kept = room - len(begin)
    if kept < 1:
        raise RowError(
            f"has a candidate of {after} tokens, the bundle takes {reading.length}: "
            "export with a larger --sequence-length"
        )
    return (*begin, *prompt[-kept:].tolist())


def _spelled(reading: Reading, texts: Sequence[str], pairs: Sequence[Pair]) -> str:
    """Words with their pieces, for an error."""
    return ", ".join(
        f"{text!r} = "
        + " + ".join(repr(reading.tokenizer.token(token)) for token in pair.completion[:SPELLED].tolist())
        for text, pair in zip(texts, pairs, strict=True)
    )


def _encoder_example(reading: Reading, task: Task, row: Row) -> Made:
    """One sequence without targets, and a class."""
    text = task.encoder_text(row.fields)
    if not text.strip():
        raise RowError("has an empty text: there is nothing to learn from")
    label = task.label(row.fields)
    begin, end = reading.tokenizer.begin, reading.tokenizer.end
    tokens = reading.tokenizer.ids(text, control=in_texts(reading.control_tokens))
    room = reading.length - len(begin) - len(end)
    if room < 1:
        raise RowError(f"the bundle takes {reading.length} tokens, too few for any text: export a longer one")
    is_cut = len(tokens) > room
    if is_cut and reading.overflow != "truncate":
        raise RowError(
            f"has {len(begin) + len(tokens) + len(end)} tokens, the bundle takes {reading.length}: "
            "shorten it, export with a larger --sequence-length, or set overflow to truncate"
        )
    tokens = tokens[:room]
    check_vocabulary(reading, tokens)
    candidates = task.candidates(row.fields)
    sequence = TokenSequence((*begin, *tokens.tolist(), *end))
    example = Example(row.number, (sequence,), len(candidates), label, (candidates[label],), candidates)
    return Made((example,), (ENCODER_CUT,) if is_cut else (), label=task.classes[label])
