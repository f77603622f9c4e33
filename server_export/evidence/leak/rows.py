"""Rows of a report: the part that an adversary knows, and the part that it guesses.

text      prefix | unknown                    every token is a target
task      prefix | unknown | suffix           the last position chooses among candidates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prge.errors import DataError
from prge.objectives.examples import Example


@dataclass(frozen=True)
class KnownForm:
    """The known part of every row of a report: everything but the unknown tokens and the label.

    Attributes:
        prefix: tokens before the unknown ones, such as a begin-of-sequence token or a template's words.
        length: number of unknown tokens.
        suffix: tokens after the unknown ones.
        classes: a task's candidates of one token each; without them, a row is a text that is trained on.
    """

    prefix: tuple[int, ...]
    length: int
    suffix: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()

    @property
    def input_length(self) -> int:
        """Number of tokens that the model reads; the last token of a text is only a target."""
        return len(self.prefix) + self.length + len(self.suffix) - (not self.classes)

    @property
    def label_count(self) -> int:
        """Number of labels that a row may have; a text has one without meaning."""
        return max(len(self.classes), 1)

    @property
    def targets(self) -> slice:
        """The unknown tokens of a text that are targets."""
        return slice(0 if self.prefix else 1, self.length)


@dataclass(frozen=True)
class Rows:
    """Rows of one form: unknown `tokens` i64 [rows, length], and `labels` i64 [rows], 0 for texts."""

    tokens: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: slice | torch.Tensor) -> Rows:
        return Rows(self.tokens[index], self.labels[index])

    def with_token(self, position: int, tokens: torch.Tensor) -> Rows:
        """Return copies of a single row, each with another token at a position."""
        copies = self.tokens.expand(len(tokens), -1).clone()
        copies[:, position] = tokens
        return Rows(copies, self.labels.expand(len(tokens)))


def join_rows(parts: list[Rows]) -> Rows:
    """Concatenate rows."""
    return Rows(torch.cat([part.tokens for part in parts]), torch.cat([part.labels for part in parts]))


def known_form(examples: Sequence[Example], bos_count: int, length: int) -> KnownForm:
    """Return the form of examples that are truncated to `length` unknown tokens.

    Args:
        examples: texts, or examples of a task with candidates of one token each.
        bos_count: number of tokens that the tokenizer adds before every text.
        length: number of unknown tokens to keep.

    Raises:
        DataError: the examples have another loss, or only a part of their tokens are targets.
    """
    first, sequences = examples[0], [example.sequences[0] for example in examples]
    is_text, problem = first.label is None, ""
    if any(len(example.sequences) != 1 for example in examples):
        problem = "their candidates have several tokens, or there are too many"
    elif is_text and any(len(each.targets) != len(each.tokens) - max(bos_count, 1) for each in sequences):
        problem = "only a part of their tokens are targets"
    if problem:
        remedy = "Give rows of texts, or a task whose candidates are one token each."
        raise DataError("Cannot attack these rows:", [problem], remedy=remedy, code="rows-not-attackable")
    if is_text:
        return KnownForm(sequences[0].tokens[:bos_count], length)
    rows = [sequence.tokens for sequence in sequences]
    shortest = min(map(len, rows))
    prefix, suffix = 0, 0
    # A token that all rows share at an end comes from the template, or is as good as known.
    while prefix < shortest and len({row[prefix] for row in rows}) == 1:
        prefix += 1
    while suffix < shortest - prefix and len({row[-1 - suffix] for row in rows}) == 1:
        suffix += 1
    classes = tuple(target.token for target in sequences[0].targets)
    return KnownForm(rows[0][:prefix], length, rows[0][len(rows[0]) - suffix :], classes)


def unknown_part(example: Example, form: KnownForm) -> tuple[int, ...]:
    """Return the unknown tokens of an example before they are truncated to the form's length."""
    tokens = example.sequences[0].tokens
    return tokens[len(form.prefix) : len(tokens) - len(form.suffix)]
