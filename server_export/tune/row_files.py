"""The rows of a tuning: split, written as jsonl with the columns that are read, measured, and shown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prge.atomic import write_file
from prge.contract import Contract
from prge.rows.example_building import BuildOptions, build_examples
from prge.rows.forms import find_form
from prge.rows.readers import Row, Selection, read_rows, select_rows
from prge.rows.sources import Part, Source, files_of_part, read_source
from prge.rows.splitting import split_rows
from prge.rows.task import Task, load_task
from prge.rows.tokenizer import Tokenizer
from server_export.tune.decisions import RowFacts
from server_export.tune.settings import TuneSettings

# More tokens than any row has: nothing is cut while rows are measured.
_NO_BOUND = 1 << 24
SAMPLES, _WORDS = 3, 8


@dataclass(frozen=True)
class RowFiles:
    """The folder of the rows. `task` is the name or file that the user gave."""

    folder: Path
    task: str | None

    @property
    def train(self) -> Path:
        """Training rows."""
        return self.folder / "train.jsonl"

    @property
    def dev(self) -> Path | None:
        """Development rows, if there are any."""
        return self._file("dev")

    @property
    def test(self) -> Path | None:
        """Test rows, if there are any."""
        return self._file("test")

    @property
    def are_texts(self) -> bool:
        """Whether a model learns to write what the rows hold, and not to choose among candidates."""
        task = self._task()
        return task is None or task.generate is not None

    @property
    def have_candidates(self) -> bool:
        """Whether a model learns to choose."""
        task = self._task()
        return task is not None and not task.is_completion

    def write(self, settings: TuneSettings) -> list[str]:
        """Read what the user names, split off development rows if none are named, and write all parts.

        Returns:
            What a user should know, a line each.

        Raises:
            DataError: rows can't be read.
        """
        source = self._read(settings.data, "train", settings.columns)
        parts: dict[str, Sequence[Row]] = {"train": source.rows}
        notes = [f"{len(source.rows):,} rows from {source.name}"]
        named: dict[Part, Path | None] = {"dev": settings.dev, "test": settings.test}
        for name, given in named.items():
            where = settings.data if given is None and files_of_part(settings.data, name) else given
            if where is not None:
                other = self._read(where, name, settings.columns)
                parts[name] = other.rows
                notes.append(f"{name}: {len(other.rows):,} rows from {other.name}")
        if "dev" not in parts:
            task = self._task()
            split = split_rows(source.rows, columns=task.needed_columns() if task else None)
            parts |= {"train": split.train, "dev": split.dev}
            notes += split.notes
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for part, rows in parts.items():
            if rows:
                _write_lines(self.folder / f"{part}.jsonl", [row.fields for row in rows])
        return notes

    @property
    def chat(self) -> str:
        """Whether rows `needs` a chat template, `takes` one where there is one, or neither, ""."""
        return "" if self._task() else find_form(read_rows(self.train), str(self.train)).chat

    def some(self, count: int, tokenizer: Tokenizer, contract: Contract) -> list[tuple[int, ...]]:
        """Tokens of a random choice of training rows as a run of the contract takes them."""
        rows = select_rows(read_rows(self.train), Selection(limit=count, shuffle_seed=0))
        examples, _ = build_examples(
            rows, tokenizer, _unbounded(contract), self._task(), BuildOptions("auto"), source=str(self.train)
        )
        return [example.sequences[0].tokens for example in examples]

    def longest(self, tokenizer: Tokenizer, contract: Contract) -> int:
        """Tokens of the longest training row, for the contract of any call of the model.

        Raises:
            DataError: rows can't be used.
        """
        return self.facts(tokenizer, _unbounded(contract)).longest

    def facts(self, tokenizer: Tokenizer, contract: Contract) -> RowFacts:
        """Measure the training rows as a run of the contract takes them; raises as above."""
        examples, report = build_examples(
            read_rows(self.train),
            tokenizer,
            contract,
            self._task(),
            BuildOptions("auto"),
            source=str(self.train),
        )
        lengths = [len(sequence.tokens) for example in examples for sequence in example.sequences]
        widest = max(len(example.sequences) for example in examples)
        fewest = None
        if contract.is_encoder:
            different = {(example.sequences[0].tokens, example.label) for example in examples}
            fewest = min(Counter(label for _, label in different).values())
        return RowFacts(
            len(examples), max(lengths), sum(lengths), widest, sum(report.slots), report.unknown, fewest
        )

    def write_prompts(self, tokenizer: Tokenizer) -> Path:
        """Write prompts of the first development rows; returns their file."""
        rows = read_rows(self.dev or self.train)[:SAMPLES]
        path = self.folder / "prompts.jsonl"
        _write_lines(path, [*self._prompts(rows, tokenizer.chat_template is not None)])
        return path

    def _prompts(self, rows: Sequence[Row], chat: bool) -> Iterator[Mapping[str, Any]]:
        task = self._task()
        form = find_form(rows, str(self.folder)) if task is None else None
        for row in rows:
            if task is not None or form is None:
                yield {"prompt": task.prompt(row.fields) if task else ""}
                continue
            fields = form.row(row, chat=chat).fields
            if "messages" in fields:
                yield {"messages": _asked(fields["messages"])}
            else:
                # Of a text its beginning.
                yield {"prompt": fields.get("prompt") or " ".join(str(fields["text"]).split(" ")[:_WORDS])}

    def _read(self, where: Path, part: Part, columns: Sequence[str]) -> Source:
        """The rows that a user names; without a task with the columns of their form alone."""
        source = read_source(where, part, columns)
        if self.task:
            return source
        form = find_form(source.rows, source.name, source.renamed)
        return replace(source, rows=[form.own(row) for row in source.rows])

    def _task(self) -> Task | None:
        return load_task(self.task) if self.task else None

    def _file(self, name: str) -> Path | None:
        path = self.folder / f"{name}.jsonl"
        return path if path.is_file() else None


def _unbounded(contract: Contract) -> Contract:
    return replace(contract, sequence_length=_NO_BOUND, positions=_NO_BOUND)


def _asked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A conversation up to its last answer."""
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    return [*messages[: answers[-1]]] if answers else [*messages]


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(dict(line), ensure_ascii=False) + "\n" for line in lines)
    write_file(path, text.encode())
