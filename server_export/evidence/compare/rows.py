"""The rows of a comparison: chosen once, written as files that every method reads whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from prge.errors import DataError, RunError
from prge.host.atomic import write_file
from prge.rows.readers import Row, Selection, select_rows
from prge.rows.sources import Part, read_source
from server_export.evidence.compare.settings import CompareSettings

SPLITS: tuple[Part, ...] = ("train", "dev", "test")


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
    files = {split: settings.rows_file(split) for split in SPLITS}
    columns = settings.columns
    chosen = {
        split: select_rows(read_source(files[split], split, columns).rows, selections[split])
        for split in SPLITS
    }
    _check_apart(files, chosen)
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
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


def _check_apart(files: Mapping[Part, Path], chosen: Mapping[Part, list[Row]]) -> None:
    taken: dict[tuple[Path, int], Part] = {}
    shared: dict[tuple[Part, Part], int] = {}
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
