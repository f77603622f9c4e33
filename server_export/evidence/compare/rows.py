"""Choose the rows of a comparison once and write them as files that every method reads in full."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from prge.data.columns import format_column_names, present_columns
from prge.data.forms.form import find_form
from prge.data.forms.task import Task, load_task
from prge.data.readers.files import Row, Selection, json_fields, select_rows
from prge.data.sources import Part, RowSource, read_source
from prge.errors import DataError, RunError
from prge.system.atomic import write_file
from server_export.evidence.compare.settings import CompareSettings


def write_splits(settings: CompareSettings, folder: Path) -> dict[str, Path]:
    """Write train.jsonl, dev.jsonl and test.jsonl and return their paths by split.

    Raises:
        DataError: rows can't be read, a split would be empty, or a row would be in two splits.
        RunError: the files exist with other rows.
    """
    selections: dict[Part, Selection] = {
        "train": Selection(settings.train_start, settings.train_limit, settings.shuffle_seed),
        "dev": Selection(settings.dev_start, settings.dev_limit),
        "test": Selection(settings.test_start, settings.test_limit),
    }
    chosen: dict[Part, list[Row]] = {}
    taken: dict[tuple[Path, int], Part] = {}
    shared: Counter[str] = Counter()
    task = load_task(settings.task_path) if settings.task_path else None
    for split, selection in selections.items():
        file = settings.rows_file(split)
        source = read_source(file, split, settings.columns, task=task)
        chosen[split] = select_rows(source.rows, selection)
        _report_unread(source, task)
        others = [taken.setdefault((file.resolve(), row.number), split) for row in chosen[split]]
        shared.update(f"{other} and {split}" for other in others if other != split)
    if shared:
        raise DataError(
            "Splits must not share rows:",
            [f"{both} share {count} rows" for both, count in shared.items()],
            remedy="Choose starts and limits that don't overlap.",
            code="splits-share-rows",
        )
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    for split, rows in chosen.items():
        path = written[split] = folder / f"{split}.jsonl"
        content = "".join(
            json.dumps(json_fields(row.fields), ensure_ascii=False) + "\n" for row in rows
        ).encode()
        if not path.is_file():
            write_file(path, content)
        elif path.read_bytes() != content:
            raise RunError(
                f"{path} holds other rows than the current {settings.rows_file(split)}.",
                remedy="Start a new comparison in another folder.",
                code="rows-changed",
            )
    return written


def _report_unread(source: RowSource, task: Task | None) -> None:
    """Print the columns that no method reads.

    Columns that only a chat template reads are not printed here but by the methods' runs.
    """
    if task is not None:
        read = {*task.needed_columns(), *task.needed_columns(encoder=True)}
    else:
        form = find_form(source.rows, source.name, source.renamed)
        read = {*form.columns, *form.optional, *form.chat_columns}
    if unread := [column for column in present_columns(source.rows) if column not in read]:
        print(f"{source.name}: columns that are not read: {format_column_names(unread)}", flush=True)
