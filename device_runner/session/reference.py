"""What the adapter that a run begins with makes of its rows, computed once and kept in the run folder.

    reference.json    {"of": ..., "scores": [[chosen, rejected], ...], "sha256": ...}

`of` is the hash of all that the scores follow from: bundle, adapter, tokens. A file that is damaged, or of
anything else, is made again.
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
from prge.files.adapter import Adapter
from prge.files.documents import DocumentError, parse_json
from prge.files.run_folder import REFERENCE
from prge.host.atomic import write_file
from prge.host.regular_files import read_regular
from prge.learning.evaluation import referred
from prge.learning.examples import Example

Scores = list[list[float]]


def with_references(
    folder: Path, bundle: str, engine: Engine, adapter: Adapter, examples: Sequence[Example]
) -> tuple[list[Example], str]:
    """Examples with their reference, kept in a run folder, and what to tell of it.

    Args:
        folder: of the run.
        bundle: its hash.
        engine: scores.
        adapter: that the run begins with.
        examples: of candidates that all have targets.

    Raises:
        RunError: the storage refuses.
        EngineError: a score is not finite.
    """
    path, key = folder / REFERENCE, _key(bundle, adapter, examples)
    scores = _kept(path, key, examples)
    if scores is None:
        is_there = os.path.lexists(path)
        found = referred(engine, adapter, examples)
        scores = [list(each.reference) for each in found]
        if not np.isfinite(scores).all():
            raise EngineError(
                "the start adapter's scores of these rows are not finite",
                remedy="the adapter or the bundle is damaged: start from the bundle's own, or export again",
                code="scores-not-finite",
            )
        write_file(path, json.dumps({"of": key, "scores": scores, "sha256": _digest(key, scores)}).encode())
        told = f"reference: {len(scores):,} rows scored by the adapter of the start"
        return found, told + (f"; {REFERENCE} was damaged, or of another run" if is_there else "")
    kept = zip(examples, scores, strict=True)
    return [replace(example, reference=tuple(values)) for example, values in kept], ""


def _kept(path: Path, key: str, examples: Sequence[Example]) -> Scores | None:
    """The scores of a file; None where it isn't there, or isn't what it should be."""
    try:
        content: Any = parse_json(read_regular(path).decode())
        scores = content["scores"]
        whole = content["of"] == key and content["sha256"] == _digest(key, scores)
        whole = whole and [len(each) for each in scores] == [each.candidates for each in examples]
    except (OSError, DocumentError, UnicodeDecodeError, LookupError, TypeError):
        return None
    return scores if whole else None


def _key(bundle: str, adapter: Adapter, examples: Sequence[Example]) -> str:
    digest = hashlib.sha256(f"{bundle} ".encode())
    digest.update(adapter.values.tobytes())
    for example in examples:
        digest.update(repr((example.row, example.sequences)).encode())
    return digest.hexdigest()


def _digest(key: str, scores: Scores) -> str:
    """Digest of scores under their key; numbers in JSON are those that were written, to the bit."""
    return hashlib.sha256((key + json.dumps(scores)).encode()).hexdigest()
