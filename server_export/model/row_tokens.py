"""Tokens of a user's rows, as a run lays them out: what `--init eva` and calibration compute."""

from __future__ import annotations

from collections.abc import Sequence

from prge.cli.field_types import Paths
from prge.data.example_building import build_examples
from prge.data.forms.task import load_task
from prge.data.options import BuildOptions, Overflow
from prge.data.readers.files import Selection, select_rows
from prge.data.sources import read_source
from prge.data.tokenization.tokenizer import Tokenizer
from prge.model_spec import ModelSpec
from prge.objectives.examples import Example, token_count

_ROWS = 64


def row_tokens(
    paths: Paths,
    task: str | None,
    most: int,
    *,
    seed: int,
    tokenizer: Tokenizer,
    model: ModelSpec,
) -> list[tuple[int, ...]]:
    """Tokens of the sequences of a random choice of rows, `most` in all.

    Args:
        paths: of the rows.
        task: of the rows, as for `prge run --task`. Of preferences what is liked is taken.
        most: tokens.
        seed: of the choice.
        tokenizer: the device's.
        model: of a run of these rows.

    Raises:
        PrgeError: the rows or their task can't be used.
    """
    loaded = load_task(task) if task else None
    overflow: Overflow = "split" if loaded is None or loaded.is_completion else "truncate"
    options = BuildOptions(overflow, objective=None if loaded else "completion")
    source = read_source(paths, "train", task=loaded)
    rows = select_rows(source.rows, Selection(shuffle_seed=seed))
    found: list[Example] = []
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        examples, _ = build_examples(part, tokenizer, model, loaded, options, source=source.name)
        found += examples
        if token_count(found) >= most:
            break
    return _first(found, most)


def _first(examples: Sequence[Example], most: int) -> list[tuple[int, ...]]:
    """Tokens of the examples' sequences, the first `most` of all."""
    found: list[tuple[int, ...]] = []
    left = most
    for tokens in (sequence.tokens for example in examples for sequence in example.sequences):
        if left <= 0:
            break
        found.append(tokens[:left])
        left -= len(tokens)
    return found
