"""Tokens of a user's rows as a run builds them, for `--init eva` and for calibration."""

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
from prge.objectives.examples import Example, token_count, without_branches

_ROWS = 64


def row_tokens(
    paths: Paths,
    task: str | None,
    max_tokens: int,
    *,
    seed: int,
    tokenizer: Tokenizer,
    model: ModelSpec,
) -> list[tuple[int, ...]]:
    """Return the tokens of a random choice of rows, by sequence, at most `max_tokens` in total.

    Args:
        paths: the files of the rows.
        task: the task of the rows, as for `prge run --task`. For preferences, the chosen answer is used.
        max_tokens: the maximum number of tokens.
        seed: the seed of the choice.
        tokenizer: the device's tokenizer.
        model: the model that a run of these rows trains.

    Raises:
        PrgeError: the rows or their task can't be used.
    """
    loaded = load_task(task) if task else None
    overflow: Overflow = "split" if loaded is None or loaded.is_completion else "truncate"
    options = BuildOptions(overflow, objective=None if loaded else "completion")
    source = read_source(paths, "train", task=loaded)
    rows = select_rows(source.rows, Selection(shuffle_seed=seed))
    chosen: list[Example] = []
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        examples, _ = build_examples(part, tokenizer, model, loaded, options, source=source.name)
        chosen += examples
        if token_count(chosen) >= max_tokens:
            break
    return _first_tokens(chosen, max_tokens)


def _first_tokens(examples: Sequence[Example], max_tokens: int) -> list[tuple[int, ...]]:
    """Return the tokens of the examples' sequences up to `max_tokens` in total."""
    sequences: list[tuple[int, ...]] = []
    remaining = max_tokens
    for tokens in (each.tokens for example in examples for each in without_branches(example).sequences):
        if remaining <= 0:
            break
        sequences.append(tokens[:remaining])
        remaining -= len(tokens)
    return sequences
