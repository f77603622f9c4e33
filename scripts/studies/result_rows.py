"""Rows of the tasks of results.py, from the published files of the data sets.

MeZO's protocol (arXiv 2305.17333): 1,000 training rows, 500 development rows, which choose learning rate and
step, and 1,000 test rows; fewer if there are fewer, or if rows are long. A quarter of the published training
rows is set aside for development; rows with the same text, such as the questions about a paragraph, stay
together. Test rows are from the published development files, because the labels of published test rows are
secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import style
from verbs import write_rows

from prge.data.forms.task import load_task
from prge.data.readers.files import Selection, read_rows, select_rows

Rows = list[dict[str, Any]]
SPLITS = ("train", "dev", "test")
SEED = 0  # of the shuffle before rows are split


class StudyTask(NamedTuple):
    """A task: its title, its rows, and the share of the study's forward passes that a run of it gets."""

    title: str
    counts: tuple[int, int, int] = (1000, 500, 1000)  # most rows of each split
    files: tuple[str, str] = ("train.jsonl", "val.jsonl")  # of labelled rows, and of test rows
    group: str = ""  # column whose value no training row shares with a development row
    passes: float = 1.0


STYLE, TEXTS = "style", "wikitext"
TASKS: dict[str, StudyTask] = {
    "sst2": StudyTask("SST-2", files=("train.tsv", "dev.tsv")),
    # Longer rows: fewer passes, and fewer rows to score.
    "rte": StudyTask("RTE", (1000, 200, 1000), group="premise", passes=0.25),
    "wic": StudyTask("WiC", (1000, 200, 1000), passes=0.25),
    "wsc": StudyTask("WSC", (420, 140, 104), group="text", passes=0.25),
    "copa": StudyTask("COPA", (300, 100, 100)),
    "multirc": StudyTask("MultiRC", (1000, 100, 500), group="paragraph", passes=0.25),
    STYLE: StudyTask("A style of answers", (300, 60, 100)),
    TEXTS: StudyTask("WikiText", (800, 100, 100), passes=0.25),
}


def write_task(name: str, data: Path, folder: Path) -> Path:
    """Write train.jsonl, dev.jsonl and test.jsonl of a task, unless they exist, and return their folder."""
    if not (folder / f"{SPLITS[-1]}.jsonl").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        splits = make_splits(name, data / name)
        for split in SPLITS:
            write_rows(folder / f"{split}.jsonl", splits[split])
    return folder


def make_splits(name: str, data: Path) -> dict[str, Rows]:
    """Return the rows of a task by split, always the same; `data` is the folder of its data set."""
    task = TASKS[name]
    if name == STYLE:
        return {**style.make_rows()}
    if name == TEXTS:
        passages = json.loads((data / "wikitext_1000.json").read_text(encoding="utf-8"))
        texts = iter([{"text": text} for text in passages])  # in order: neighbours are from one article
        return {
            split: [next(texts) for _ in range(count)]
            for split, count in zip(SPLITS, task.counts, strict=True)
        }
    columns = load_task(name).needed_columns()
    labelled, held_out = (
        [
            {column: each[column] for column in columns}
            for row in read_rows(data / file)
            for each in flat_rows(name, row.fields)
        ]
        for file in task.files
    )
    return split_rows(labelled, held_out, task.group, task.counts)


def flat_rows(name: str, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a task that a published row holds."""
    if name == "rte":
        return [{**row, "label": int(row["label"] != "entailment")}]
    if name == "wsc":
        return [{**row, **row["target"]}]
    if name == "multirc":
        passage = row["passage"]
        return [
            {"paragraph": passage["text"], **question, **answer, "answer": answer["text"]}
            for question in passage["questions"]
            for answer in question["answers"]
        ]
    return [row]


def split_rows(labelled: Rows, held_out: Rows, group: str, counts: Sequence[int]) -> dict[str, Rows]:
    """Return training and development rows of one file, and test rows of another; see StudyTask."""
    groups: dict[object, Rows] = {}
    for number, row in enumerate(labelled):
        groups.setdefault(row[group] if group else number, []).append(row)
    pools: dict[str, Rows] = {"train": [], "dev": [], "test": held_out}
    for rows in select_rows([*groups.values()], Selection(shuffle_seed=SEED)):
        pools["dev" if 4 * len(pools["dev"]) < len(labelled) else "train"] += rows
    return {
        split: select_rows(pools[split], Selection(0, count, SEED))
        for split, count in zip(SPLITS, counts, strict=True)
    }
