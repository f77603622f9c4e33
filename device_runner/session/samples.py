"""What the model says while it learns: a few prompts, answered before, on the way and after.

    samples.jsonl    {"step": 0, "prompt": ..., "text": ...}     a line for each step and prompt

Answers are written, or chosen among the candidates of a row, which then has the `right` one beside them. They
take the most likely token or candidate each time, so those of a resumed run are those of one that never
stopped. A line that is there already is not written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prge.engine import Engine
from prge.errors import DataError, shown
from prge.files.documents import DocumentError, parse_json
from prge.files.journal import Record
from prge.files.run_folder import SAMPLES, reported
from prge.host.atomic import write_file
from prge.host.regular_files import open_regular, read_regular
from prge.learning.checkpoint import TrainingState
from prge.learning.estimators.protocol import Measurement
from prge.learning.evaluation import score
from prge.learning.examples import Example
from prge.rows.forms.messages import template_variables
from prge.rows.readers.files import FORMATS, Row, read_rows, read_text
from prge.rows.tokenization.tokenizer import Tokenizer
from prge.running.watching import Watcher, describe_prompt
from prge.text.loop import GenerationSettings, Generator, Request
from prge.text.prompts import Prompt, Prompts

MOST_TOKENS = 64


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt as its file has it, a text or messages, and as the model reads it."""

    asked: Any
    prompt: Prompt


def read_prompts(path: Path, prompts: Prompts) -> list[SamplePrompt]:
    """Prompts of a file: jsonl, csv or tsv with the column prompt or messages, else one a line.

    Raises:
        DataError: it can't be read or has none, or the model can't take one of them; all are named.
    """
    if path.suffix.lower() in FORMATS:
        rows = read_rows(path)
    else:
        lines = enumerate(read_text(path).splitlines(), 1)
        rows = [Row(number, {"prompt": line}) for number, line in lines if line.strip()]
    found, problems = [], []
    for row in rows:
        try:
            found.append(_prompt(row, prompts))
        except ValueError as error:
            problems.append(f"row {row.number}: {error}")
        except DataError as error:
            headline = error.what.partition("\n")[0]
            problems.append(f"row {row.number}: {'; '.join([headline, *error.problems])}")
    if problems or not found:
        raise DataError(
            f"{path} can't be used as prompts", problems or ["it has none"], code="prompts-unusable"
        )
    return found


def _prompt(row: Row, prompts: Prompts) -> SamplePrompt:
    from prge.rows.tokenization.chat import check_messages

    if "messages" in row.fields:
        messages = check_messages(row.fields["messages"], answered=False)
        return SamplePrompt(messages, prompts.of_messages(messages, template_variables(row.fields)))
    text = row.fields.get("prompt")
    if not isinstance(text, str) or not text:
        raise ValueError(f"prompt is {shown(text)}, must be a text; or give messages")
    return SamplePrompt(text, prompts.of_text(text))


class Answerer(Protocol):
    """Answers what it is asked, always the same, as the model is at the time."""

    asked: Sequence[Any]
    right: Sequence[str | None]

    def answers(self, state: TrainingState) -> list[str]:
        """A text for each that is asked."""


class Writer:
    """Answers prompts by texts that the generator writes."""

    def __init__(self, prompts: Sequence[SamplePrompt], generator: Generator) -> None:
        self.asked: Sequence[Any] = [each.asked for each in prompts]
        self.right: Sequence[str | None] = [None] * len(prompts)
        self._prompts = [each.prompt for each in prompts]
        self._generator = generator

    def answers(self, state: TrainingState) -> list[str]:
        """See Answerer."""
        # Training changes the adapter, and a generator's must stay.
        adapter = state.adapter.copy()
        wanted = GenerationSettings(MOST_TOKENS, overflow="truncate")
        answers = self._generator.generate([Request(each, adapter, wanted) for each in self._prompts])
        self._generator.close()
        return [answer.text for answer in answers]


class Chooser:
    """Answers rows of a task by the candidate that the model takes, an encoder with the head of the time."""

    def __init__(self, examples: Sequence[Example], engine: Engine, tokenizer: Tokenizer) -> None:
        self.asked: Sequence[Any] = [tokenizer.decode(_asked(each), special=False) for each in examples]
        self.right: Sequence[str | None] = [
            each.choices[each.label].strip() for each in examples if each.label is not None
        ]
        self._examples = examples
        self._engine = engine

    def answers(self, state: TrainingState) -> list[str]:
        """See Answerer."""
        scored = score(self._engine, state.adapter, self._examples, state.head)
        chosen = zip(self._examples, scored.predictions.tolist(), strict=True)
        return [example.choices[choice].strip() for example, choice in chosen]


def _asked(example: Example) -> tuple[int, ...]:
    """The tokens that all candidates follow; of an encoder, which has no candidates there, all."""
    first = example.sequences[0]
    return first.tokens[: first.targets[0].position + 1] if first.targets else first.tokens


class Samples:
    """Implements prge.learning.training.Observer: tells a watcher all; has answers made every so many steps.

    Args:
        answerer: makes them.
        state: of the model that is asked, as it is at the time.
        every: steps between samples; 0: none on the way.
        watcher: of the run.
    """

    def __init__(
        self,
        answerer: Answerer,
        state: TrainingState,
        every: int,
        watcher: Watcher,
    ) -> None:
        self._answerer = answerer
        self._state = state
        self._every = every
        self._watcher = watcher
        self._path = watcher.settings.out / SAMPLES
        self._records = _kept_records(self._path)
        self._last = 0
        watcher.told["samples"] = self.summary()
        self.take_due()

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """See prge.learning.training.Observer."""
        self._watcher.on_step(record, measurement)
        self.take_due()

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """See prge.learning.training.Observer."""
        self._watcher.on_evaluation(record, fresh)

    def take_due(self) -> None:
        """Have all answered if it is time for it."""
        step = self._state.step
        if step == 0 or (self._every and step % self._every == 0):
            self.take()

    def take(self) -> None:
        """Have those answered that have no answer of this step yet, and write the answers down."""
        self._last = step = self._state.step
        known, asked = self._of(step), self._answerer.asked
        if not all(json.dumps(each) in known for each in asked):
            self._ask(step, known)
        self._watcher.told["samples"] = self.summary()

    def _ask(self, step: int, known: Collection[str]) -> None:
        """Have all answered, and write down the answers that are not known."""
        # All of them, for an engine may round otherwise in other company.
        answers = self._answerer.answers(self._state)
        records = [
            {"step": step, "prompt": each, "text": text, **({"right": right} if right is not None else {})}
            for each, text, right in zip(self._answerer.asked, answers, self._answerer.right, strict=True)
            if json.dumps(each) not in known
        ]
        with reported(self._path), open_regular(self._path, "ab") as stream:
            stream.write("".join(json.dumps(record) + "\n" for record in records).encode())
            stream.flush()
            os.fsync(stream.fileno())
        self._records += records
        first = records[0]
        self._watcher.say(f"step {step}: {describe_prompt(first['prompt'])} -> {shown(first['text'])}")
        self._watcher.on_samples()

    def summary(self) -> Record:
        """Answers before the first step, and those taken last."""
        return {
            "before": list(self._of(0).values()),
            "after": list(self._of(self._last).values()),
        }

    def _of(self, step: int) -> dict[str, Record]:
        """The records of a step by their prompts."""
        return {json.dumps(each["prompt"]): each for each in self._records if each["step"] == step}


def read_samples(path: Path) -> list[Record]:
    """The whole records of a file of samples, in order; none where there is no file. Changes nothing."""
    return [record for _, record in _read(path) if record is not None]


def _kept_records(path: Path) -> list[Record]:
    """The records of a file of samples; what was torn leaves the file."""
    records = _read(path)
    if any(record is None for _, record in records):
        write_file(path, b"".join(line for line, record in records if record is not None))
    return [record for _, record in records if record is not None]


def _read(path: Path) -> list[tuple[bytes, Record | None]]:
    """The lines of a file of samples, each with its record if it is one."""
    if not os.path.lexists(path):
        return []
    with reported(path):
        lines = read_regular(path).splitlines(keepends=True)
    return [(line, sample_record(line)) for line in lines]


def sample_record(line: bytes) -> Record | None:
    """A line of a file of samples, if it is whole and a record."""
    try:
        record = parse_json(line)
    except DocumentError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and {"prompt", "text"} <= record.keys()
    whole = whole and isinstance(record["text"], str) and isinstance(record.get("right", ""), str)
    whole = whole and type(record.get("step")) is int
    return record if whole else None
