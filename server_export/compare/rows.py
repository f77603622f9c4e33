"""The rows of a comparison: chosen once, written as files that every method reads whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prge.atomic import write_file
from prge.documents import DocumentError, parse_json
from prge.errors import DataError, RunError
from prge.rows.readers import Row, Selection, read_rows, select_rows
from server_export.compare.settings import CompareSettings

SPLITS = ("train", "dev", "test")


def write_splits(settings: CompareSettings, folder: Path) -> dict[str, Path]:
    """Write train.jsonl, dev.jsonl and test.jsonl; returns them by split.

    Raises:
        DataError: rows can't be read, nothing is left of a file, or one row would be in two splits.
        RunError: the files are there with other rows.
    """
    selections = {
        "train": Selection(settings.train_start, settings.train_limit, settings.shuffle_seed),
        "dev": Selection(settings.dev_start, settings.dev_limit),
        "test": Selection(settings.test_start, settings.test_limit),
    }
    files = {split: settings.data_folder / getattr(settings, split) for split in SPLITS}
    chosen = {split: select_rows(_read(files[split]), selections[split]) for split in SPLITS}
    _check_apart(files, chosen)
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, rows in chosen.items():
        path = written[split] = folder / f"{split}.jsonl"
        content = "".join(json.dumps(dict(row.fields), ensure_ascii=False) + "\n" for row in rows).encode()
        if not path.is_file():
            write_file(path, content)
        elif path.read_bytes() != content:
            raise RunError(
                f"{path} holds other rows than {files[split]} has now",
                remedy="begin a new comparison in another folder",
            )
    return written


def _read(path: Path) -> list[Row]:
    if path.suffix != ".json":
        return read_rows(path)
    try:
        texts: Any = parse_json(path.read_bytes())
    except DocumentError as error:
        raise DataError(f"{path} can't be read as data", [str(error)], remedy="write a jsonl file") from None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{path} can't be read as data", ["it is no JSON list of texts"], remedy="write a jsonl file"
        )
    return [Row(number, {"text": text}) for number, text in enumerate(texts, 1)]


def _check_apart(files: Mapping[str, Path], chosen: Mapping[str, list[Row]]) -> None:
    taken: dict[tuple[Path, int], str] = {}
    shared: dict[tuple[str, str], int] = {}
    for split, rows in chosen.items():
        for row in rows:
            other = taken.setdefault((files[split].resolve(), row.number), split)
            if other != split:
                shared[other, split] = shared.get((other, split), 0) + 1
    if shared:
        raise DataError(
            "splits must not share rows",
            [f"{first} and {second} share {count} rows" for (first, second), count in shared.items()],
            remedy="set the starts and limits apart",
        )
