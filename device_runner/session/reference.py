"""Reference scores of a preference run: the rows scored by the start adapter, kept in the run folder.

    reference.json    {"of": ..., "scores": [[chosen, rejected], ...], "sha256": ...}

`of` is the hash of everything that determines the scores: bundle, adapter, tokens. A file that is damaged or
of something else is computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prge.engine import Engine
from prge.errors import EngineError
from prge.formats.adapter import Adapter
from prge.formats.documents import DocumentError, parse_json
from prge.formats.run_folder import REFERENCE
from prge.objectives.examples import Example
from prge.objectives.scoring import with_reference_scores
from prge.system.atomic import write_file
from prge.system.regular_files import read_regular

Scores = list[list[float]]


def load_or_compute_references(
    folder: Path, bundle: str, engine: Engine, adapter: Adapter, examples: Sequence[Example]
) -> tuple[list[Example], str]:
    """Return examples with their reference scores, saved in a run folder, and a message for the user.

    Args:
        folder: folder of the run.
        bundle: hash of the bundle.
        engine: engine that scores.
        adapter: adapter that the run starts from.
        examples: examples with candidates, all of which have targets.

    Raises:
        RunError: the storage refuses.
        EngineError: a score is not finite.
    """
    path, key = folder / REFERENCE, _key(bundle, adapter, examples)
    scores = _read_scores(path, key, examples)
    if scores is None:
        existed = os.path.lexists(path)
        scored = with_reference_scores(engine, adapter, examples)
        scores = [list(each.reference) for each in scored]
        if not np.isfinite(scores).all():
            raise EngineError(
                "The start adapter's scores of these rows are not finite.",
                remedy="The adapter or the bundle is damaged: start from the bundle's own, or export again.",
                code="scores-not-finite",
            )
        write_file(path, json.dumps({"of": key, "scores": scores, "sha256": _digest(key, scores)}).encode())
        message = f"reference: {len(scores):,} rows scored with the start adapter"
        return scored, message + (f"; {REFERENCE} was damaged, or of another run" if existed else "")
    scored_pairs = zip(examples, scores, strict=True)
    return [replace(example, reference=tuple(values)) for example, values in scored_pairs], ""


def _read_scores(path: Path, key: str, examples: Sequence[Example]) -> Scores | None:
    """Return the scores in a file; None if the file is missing, damaged or of something else."""
    try:
        content: Any = parse_json(read_regular(path).decode())
        scores = content["scores"]
        is_valid = content["of"] == key and content["sha256"] == _digest(key, scores)
        is_valid = is_valid and [len(each) for each in scores] == [each.candidates for each in examples]
    except (OSError, DocumentError, UnicodeDecodeError, LookupError, TypeError):
        return None
    return scores if is_valid else None


def _key(bundle: str, adapter: Adapter, examples: Sequence[Example]) -> str:
    digest = hashlib.sha256(f"{bundle} ".encode())
    digest.update(adapter.values.tobytes())
    for example in examples:
        digest.update(repr((example.row, example.sequences)).encode())
    return digest.hexdigest()


def _digest(key: str, scores: Scores) -> str:
    """Return the digest of scores and their key; JSON keeps floats to the bit."""
    return hashlib.sha256((key + json.dumps(scores)).encode()).hexdigest()
