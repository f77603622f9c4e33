"""What an adversary knows of rows, and the rows that it guesses.

text      before | unknown                    every token is learnt
task      before | unknown | after            the last position chooses among candidates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prge.errors import DataError
from prge.learning.examples import Example


@dataclass(frozen=True)
class Form:
    """What is known of every row of a report: all but its unknown tokens and its label.

    `before` and `after` are the tokens around the unknown ones: a begin-of-sequence token, a template's
    words. `classes` are a task's candidates, of one token each; without any, a row is a text that is learnt.
    """

    before: tuple[int, ...]
    length: int
    after: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()

    @property
    def read(self) -> int:
        """Tokens that the model reads of a row: the last one of a text is a target alone."""
        return len(self.before) + self.length + len(self.after) - (not self.classes)

    @property
    def label_count(self) -> int:
        """Labels that a row may have; a text has one, which says nothing."""
        return max(len(self.classes), 1)

    @property
    def targets(self) -> slice:
        """The unknown tokens that are learnt, of a text."""
        return slice(0 if self.before else 1, self.length)


@dataclass(frozen=True)
class Rows:
    """Rows of one form: `tokens` i64 [rows, length] are the unknown ones, `labels` i64 [rows], 0 of texts."""

    tokens: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, chosen: slice | torch.Tensor) -> Rows:
        return Rows(self.tokens[chosen], self.labels[chosen])

    def with_token(self, position: int, tokens: torch.Tensor) -> Rows:
        """One row as many, each with another token at a position."""
        many = self.tokens.expand(len(tokens), -1).clone()
        many[:, position] = tokens
        return Rows(many, self.labels.expand(len(tokens)))


def joined(parts: list[Rows]) -> Rows:
    """Rows one after the other."""
    return Rows(torch.cat([part.tokens for part in parts]), torch.cat([part.labels for part in parts]))


def known_form(examples: Sequence[Example], begin: int, length: int) -> Form:
    """The form of examples that are cut to `length` unknown tokens.

    Args:
        examples: of texts, or of a task with candidates of one token each.
        begin: tokens that the tokenizer puts before every text.
        length: unknown tokens to keep.

    Raises:
        DataError: their loss is of another kind, or the task's template leaves nothing unknown.
    """
    first, sequences = examples[0], [example.sequences[0] for example in examples]
    is_text, problem = first.label is None, ""
    if any(len(example.sequences) != 1 for example in examples):
        problem = "their candidates have several tokens, or are many"
    elif is_text and any(len(each.targets) != len(each.tokens) - max(begin, 1) for each in sequences):
        problem = "only a part of their tokens is learnt"
    if problem:
        remedy = "give rows of texts, or a task whose candidates are one token each"
        raise DataError("these rows can't be attacked:", [problem], remedy=remedy, code="rows-not-attackable")
    if is_text:
        return Form(sequences[0].tokens[:begin], length)
    rows = [sequence.tokens for sequence in sequences]
    shortest = min(map(len, rows))
    before, after = 0, 0
    # A token that all rows share at an end is a template's, or as good as known.
    while before < shortest and len({row[before] for row in rows}) == 1:
        before += 1
    while after < shortest - before and len({row[-1 - after] for row in rows}) == 1:
        after += 1
    classes = tuple(target.token for target in sequences[0].targets)
    return Form(rows[0][:before], length, rows[0][len(rows[0]) - after :], classes)


def unknown_part(example: Example, form: Form) -> tuple[int, ...]:
    """The tokens of an example that are unknown, before they are cut to the form's length."""
    tokens = example.sequences[0].tokens
    return tokens[len(form.before) : len(tokens) - len(form.after)]
