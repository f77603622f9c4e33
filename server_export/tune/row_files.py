"""The rows of a tuning as jsonl files in its folder, with the columns that training reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prge.data.columns import present_columns
from prge.data.example_building import build_examples
from prge.data.forms.form import find_form
from prge.data.forms.task import Task, load_task
from prge.data.options import BuildOptions, Overflow
from prge.data.readers.files import Row, json_fields, read_rows
from prge.data.sources import Part
from prge.data.tokenization.control_tokens import ControlTokens
from prge.data.tokenization.tokenizer import Tokenizer
from prge.generation.prompts import Prompts
from prge.model_spec import ModelSpec
from prge.objectives.preferences import ObjectiveName
from prge.system.atomic import new_folder, write_file
from server_export.tune.decisions import RowFacts
from server_export.tune.settings import TuneSettings

SAMPLES, _WORDS = 3, 8


@dataclass(frozen=True)
class RowFiles:
    """The folder of the rows.

    Attributes:
        folder: the folder.
        task: name or file of a task that the user gave.
        objective: objective of the training.
        append_eos: see BuildOptions, also for `control_tokens` and `date`.
    """

    folder: Path
    task: str | None
    objective: ObjectiveName = "auto"
    append_eos: bool = True
    control_tokens: ControlTokens = "special"
    date: str | None = None

    @classmethod
    def of(cls, settings: TuneSettings) -> RowFiles:
        """Return the files of a tuning."""
        return cls(
            settings.out / "rows",
            settings.task,
            settings.objective,
            settings.append_eos,
            settings.control_tokens,
            settings.date,
        )

    @property
    def train(self) -> Path:
        """File of the training rows."""
        return self.folder / "train.jsonl"

    @property
    def dev(self) -> Path | None:
        """File of the development rows, if there are any."""
        return self._file("dev")

    @property
    def test(self) -> Path | None:
        """File of the test rows, if there are any."""
        return self._file("test")

    @property
    def is_generative(self) -> bool:
        """Whether the model learns to generate text, and not to choose among candidates."""
        task = self._task()
        return task is None or task.generate is not None

    @property
    def has_candidates(self) -> bool:
        """Whether the model learns to choose among candidates."""
        task = self._task()
        return task is not None and not task.is_completion

    def write(self, parts: Mapping[Part, Sequence[Row]]) -> None:
        """Write the rows of all parts, one line for each row."""
        with new_folder(self.folder, overwrite=True) as folder:
            for part, rows in parts.items():
                lines = [json.dumps(json_fields(row.fields), ensure_ascii=False) + "\n" for row in rows]
                if rows:
                    (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        self.folder.chmod(0o700)

    @property
    def has_messages(self) -> bool:
        """Whether rows are messages, or become messages with a chat template."""
        return not self._task() and bool(find_form(read_rows(self.train), str(self.train)).chat)

    def facts(self, tokenizer: Tokenizer, model: ModelSpec, overflow: Overflow) -> RowFacts:
        """Measure the training rows as a run of the model uses them.

        Raises:
            DataError: rows can't be used.
        """
        examples, report = build_examples(
            read_rows(self.train),
            tokenizer,
            model,
            self._task(),
            BuildOptions(
                overflow,
                self.append_eos,
                objective=self.objective,
                control_tokens=self.control_tokens,
                date=self.date,
            ),
            source=str(self.train),
        )
        lengths = [len(sequence.tokens) for example in examples for sequence in example.sequences]
        widest = max(len(example.sequences) for example in examples)
        fewest = None
        if model.is_encoder:
            distinct = {(example.sequences[0].tokens, example.label) for example in examples}
            fewest = min(Counter(label for _, label in distinct).values())
        return RowFacts(
            len(examples),
            max(lengths),
            sum(lengths),
            widest,
            sum(report.targets),
            report.unknown,
            fewest,
            report.objective,
        )

    def write_prompts(self, tokenizer: Tokenizer) -> Path:
        """Write prompts of the first development rows, and return their file."""
        rows = read_rows(self.dev or self.train)[:SAMPLES]
        path = self.folder / "prompts.jsonl"
        prompts = self.prompts(rows, tokenizer)
        write_file(
            path, "".join(json.dumps(dict(each), ensure_ascii=False) + "\n" for each in prompts).encode()
        )
        return path

    def prompts(self, rows: Sequence[Row], tokenizer: Tokenizer) -> Iterator[Mapping[str, Any]]:
        """Yield the prompts of rows, as lines of a prompts file."""
        task, chat = self._task(), Prompts(tokenizer, self.date).chat
        form = find_form(rows, str(self.folder)) if task is None else None
        if form is not None and form.chat and chat is not None:
            form = form.rendered_by(chat.variables, present_columns(rows))
        for row in rows:
            if task is not None or form is None:
                yield {"prompt": task.prompt(row.fields) if task else ""}
                continue
            fields = form.row(row, chat=chat is not None).fields
            if "messages" in fields:
                yield {**fields, "messages": _without_last_answer(fields["messages"])}
            else:
                # The prompt of a plain text is its beginning.
                yield {"prompt": fields.get("prompt") or " ".join(str(fields["text"]).split(" ")[:_WORDS])}

    def _task(self) -> Task | None:
        return load_task(self.task) if self.task else None

    def _file(self, name: str) -> Path | None:
        path = self.folder / f"{name}.jsonl"
        return path if path.is_file() else None


def _without_last_answer(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation up to its last answer of the assistant."""
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    return [*messages[: answers[-1]]] if answers else [*messages]
