"""The classification heads of an encoder's run: fitted on rows, or read from the run's journal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prge.engine import ForwardEngine
from prge.errors import ConfigError
from prge.formats.adapter import Adapter
from prge.formats.journal import Journal, Record, decode_array, encode_array
from prge.objectives.classification_head import CrossFittedHeads, Head, fit_cross_fitted, fit_head
from prge.objectives.examples import Example
from prge.objectives.scoring import pooled_states


@dataclass(frozen=True)
class Heads:
    """An encoder's classification head, and the cross-fitted heads that score its training rows."""

    head: Head | None = None
    cross_fitted: CrossFittedHeads | None = None

    def to_record(self, digest: str = "") -> Record:
        """Return the journal record of the heads; `digest` identifies what they were fitted on."""
        if self.head is None:
            raise ValueError("there is no head")
        folds = self.cross_fitted.heads if self.cross_fitted else ()
        return {
            "type": "head",
            **({"digest": digest} if digest else {}),
            "classes": len(self.head.bias),
            "values": encode_array(self.head.values),
            "folds": [encode_array(fold.values) for fold in folds],
        }

    @classmethod
    def from_journal(cls, journal: Journal, width: int, digest: str | None = None) -> Heads | None:
        """Read the heads from a run's journal; None if it has none, or none with this digest."""
        record = journal.first("head")
        if record is None or (digest is not None and record.get("digest") != digest):
            return None

        def decode(values: str) -> Head:
            parameters = decode_array(values)
            if record["classes"] * (width + 1) != parameters.size:
                raise ValueError(f"a head of {record['classes']} classes has {parameters.size} values")
            head = Head(record["classes"], width)
            head.values[:] = parameters
            return head

        with journal.reading(record):
            folds = [decode(values) for values in record["folds"]]
            return cls(decode(record["values"]), CrossFittedHeads(folds) if folds else None)


def fit_heads(engine: ForwardEngine, adapter: Adapter, examples: Sequence[Example], folds: int = 0) -> Heads:
    """Fit an encoder's head on examples, and cross-fitted heads if `folds` isn't 0.

    Of equal examples, only the first is used: the rows that are left out to measure a head's confidence must
    not occur among those that it is fitted on.

    Args:
        engine: computes the pooled states.
        adapter: the adapter to compute them with.
        examples: labelled examples.
        folds: number of cross-fitted heads.

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
            "The classification head can't be fitted:",
            [str(error)],
            remedy="Give more rows of every class" + (", or fewer --head-folds." if folds else "."),
            code="head-not-fitted",
        ) from None


def heads_digest(bundle: str, adapter: Adapter, examples: Sequence[Example], folds: int) -> str:
    """Return a hash of everything that fitted heads depend on.

    Args:
        bundle: hash of the bundle.
        adapter: the adapter that computes the pooled states.
        examples: the examples that the heads are fitted on.
        folds: number of cross-fitted heads.
    """
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
