"""An encoder's classification heads: fitted on rows, or as a run's journal holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prge.engine import ForwardEngine
from prge.errors import ConfigError
from prge.files.adapter import Adapter
from prge.files.journal import Journal, Record, decode_array, encode_array
from prge.learning.evaluation import pooled_states
from prge.learning.examples import Example
from prge.learning.head import CrossFittedHeads, Head, fit_cross_fitted, fit_head


@dataclass(frozen=True)
class Heads:
    """An encoder's classification head, and those that score the training rows in its stead."""

    head: Head | None = None
    cross_fitted: CrossFittedHeads | None = None

    def to_record(self, digest: str = "") -> Record:
        """The journal's record of them; `digest` is that of what they were fitted on."""
        if self.head is None:
            raise ValueError("there is no head")
        folds = self.cross_fitted.heads if self.cross_fitted else ()
        return {
            "kind": "head",
            **({"digest": digest} if digest else {}),
            "classes": len(self.head.bias),
            "values": encode_array(self.head.values),
            "folds": [encode_array(fold.values) for fold in folds],
        }

    @classmethod
    def from_journal(cls, journal: Journal, width: int, digest: str | None = None) -> Heads | None:
        """The heads that a run's journal holds; with a digest only those that were fitted on just that."""
        record = journal.first("head")
        if record is None or (digest is not None and record.get("digest") != digest):
            return None

        def decode(values: str) -> Head:
            numbers = decode_array(values)
            if record["classes"] * (width + 1) != numbers.size:
                raise ValueError(f"a head of {record['classes']} classes has {numbers.size} values")
            head = Head(record["classes"], width)
            head.values[:] = numbers
            return head

        with journal.reading(record):
            folds = [decode(values) for values in record["folds"]]
            return cls(decode(record["values"]), CrossFittedHeads(folds) if folds else None)


def fit_heads(engine: ForwardEngine, adapter: Adapter, examples: Sequence[Example], folds: int = 0) -> Heads:
    """Fit an encoder's head on examples, and with `folds` those that score the examples in its stead.

    Of equal examples one is taken: rows that are left out to measure a head's confidence must be new to it.

    Raises:
        ConfigError: a class has too few rows.
    """
    classes = examples[0].candidates
    examples = _distinct(examples)
    rows = [example.row for example in examples]
    labels = np.array([example.label for example in examples])
    states = pooled_states(engine, adapter, examples)
    try:
        head = fit_head(states, labels, classes)
        return Heads(head, fit_cross_fitted(states, labels, rows, classes, folds) if folds else None)
    except ValueError as error:
        raise ConfigError(
            "the classification head can't be fitted",
            [str(error)],
            remedy="give more rows of every class" + (", or fewer --head-folds" if folds else ""),
            code="head-not-fitted",
        ) from None


def digest_of(bundle: str, adapter: Adapter, examples: Sequence[Example], folds: int) -> str:
    """What heads depend on: the hash of a bundle, an adapter, the examples that they are fitted on, folds."""
    content = hashlib.sha256(f"{bundle} {folds} {examples[0].candidates} ".encode())
    content.update(adapter.values.tobytes())
    for example in examples:
        content.update(repr((example.row, example.label, example.sequences[0].tokens)).encode())
    return content.hexdigest()


def _distinct(examples: Sequence[Example]) -> list[Example]:
    first: dict[tuple[tuple[int, ...], int | None], Example] = {}
    for example in examples:
        first.setdefault((tuple(example.sequences[0].tokens), example.label), example)
    return list(first.values())
