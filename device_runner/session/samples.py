"""Sample answers during training: answers to a few prompts before, during and after it.

    samples.jsonl    {"step": 0, "prompt": ..., "text": ...}     a line for each step and prompt

Answers are generated, or chosen among the candidates of a row, which is then saved with its `right`
candidate. They take the most likely token or candidate, so a resumed run has the same answers as an
uninterrupted one. A line that exists is not written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prge.data.forms.messages import template_variables
from prge.data.readers.files import FORMATS, Row, read_rows, read_text
from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import Engine
from prge.errors import DataError, as_clause, format_value
from prge.formats.documents import DocumentError, parse_json
from prge.formats.journal import Record
from prge.formats.run_folder import SAMPLES, as_run_error
from prge.generation.loop import GenerationSettings, Generator, Request
from prge.generation.prompts import Prompt, Prompts
from prge.objectives.examples import Example
from prge.objectives.scoring import score
from prge.system.atomic import write_file
from prge.system.regular_files import open_regular, read_regular
from prge.training.checkpoint import TrainingState
from prge.training.estimators.protocol import Measurement
from prge.training.monitor import RunMonitor, describe_prompt

MAX_TOKENS = 64


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt as its file has it, a text or messages, and as the model reads it."""

    source: Any
    prompt: Prompt


def read_prompts(path: Path, prompts: Prompts) -> list[SamplePrompt]:
    """Read the prompts of a file: jsonl, csv or tsv with a column prompt or messages, otherwise one per line.

    Raises:
        DataError: the file can't be read or is empty, or the model can't take a prompt; all such are named.
    """
    if path.suffix.lower() in FORMATS:
        rows = read_rows(path)
    else:
        lines = enumerate(read_text(path).splitlines(), 1)
        rows = [Row(number, {"prompt": line}) for number, line in lines if line.strip()]
    samples, problems = [], []
    for row in rows:
        try:
            samples.append(_prompt(row, prompts))
        except ValueError as error:
            problems.append(f"row {row.number}: {error}")
        except DataError as error:
            problems.append(f"row {row.number}: {'; '.join([as_clause(error.what), *error.problems])}")
    if problems or not samples:
        raise DataError(
            f"{path} can't be used as prompts:", problems or ["it has none"], code="prompts-unusable"
        )
    return samples


def _prompt(row: Row, prompts: Prompts) -> SamplePrompt:
    from prge.data.tokenization.chat import check_messages

    if "messages" in row.fields:
        messages = check_messages(row.fields["messages"], answered=False)
        return SamplePrompt(messages, prompts.encode_messages(messages, template_variables(row.fields)))
    text = row.fields.get("prompt")
    if not isinstance(text, str) or not text:
        raise ValueError(f"prompt is {format_value(text)}, must be a text; or use messages")
    return SamplePrompt(text, prompts.encode_text(text))


class Answerer(Protocol):
    """Answers prompts deterministically with the current model.

    Attributes:
        prompts: prompts as samples.jsonl holds them.
        references: the right answer of each prompt, or None.
    """

    prompts: Sequence[Any]
    references: Sequence[str | None]

    def answers(self, state: TrainingState) -> list[str]:
        """Return an answer to each prompt."""


class TextAnswerer:
    """Answers prompts with generated text."""

    def __init__(self, prompts: Sequence[SamplePrompt], generator: Generator) -> None:
        self.prompts: Sequence[Any] = [each.source for each in prompts]
        self.references: Sequence[str | None] = [None] * len(prompts)
        self._prompts = [each.prompt for each in prompts]
        self._generator = generator

    def answers(self, state: TrainingState) -> list[str]:
        """See Answerer."""
        # Training changes the adapter in place, and a generator's adapter must not change.
        adapter = state.adapter.copy()
        settings = GenerationSettings(MAX_TOKENS, overflow="truncate")
        answers = self._generator.generate([Request(each, adapter, settings) for each in self._prompts])
        self._generator.close()
        return [answer.text for answer in answers]


class CandidateAnswerer:
    """Answers rows of a task with the most likely candidate, for encoders with the current head."""

    def __init__(self, examples: Sequence[Example], engine: Engine, tokenizer: Tokenizer) -> None:
        self.prompts: Sequence[Any] = [
            tokenizer.decode(_prompt_tokens(each), special=False) for each in examples
        ]
        self.references: Sequence[str | None] = [
            each.choices[each.label].strip() for each in examples if each.label is not None
        ]
        self._examples = examples
        self._engine = engine

    def answers(self, state: TrainingState) -> list[str]:
        """See Answerer."""
        scored = score(self._engine, state.adapter, self._examples, state.head)
        chosen = zip(self._examples, scored.predictions.tolist(), strict=True)
        return [example.choices[choice].strip() for example, choice in chosen]


def _prompt_tokens(example: Example) -> tuple[int, ...]:
    """Return the tokens before the candidates; for encoders, which have no candidate tokens, all tokens."""
    first = example.sequences[0]
    return first.tokens[: first.targets[0].position + 1] if first.targets else first.tokens


class Samples:
    """Implements prge.training.loop.Observer: forwards everything to a monitor, and takes samples in between.

    Args:
        answerer: answers the prompts.
        state: training state of the model that answers.
        every: steps between samples; 0: none during training.
        monitor: observer of the run.
    """

    def __init__(
        self,
        answerer: Answerer,
        state: TrainingState,
        every: int,
        monitor: RunMonitor,
    ) -> None:
        self._answerer = answerer
        self._state = state
        self._every = every
        self._monitor = monitor
        self._path = monitor.settings.out / SAMPLES
        self._records = _repaired_records(self._path)
        self._last = 0
        monitor.summary_facts["samples"] = self.summary()
        self.take_due()

    def on_step(self, record: Record, measurement: Measurement | None) -> None:
        """See prge.training.loop.Observer."""
        self._monitor.on_step(record, measurement)
        self.take_due()

    def on_evaluation(self, record: Record, fresh: bool) -> None:
        """See prge.training.loop.Observer."""
        self._monitor.on_evaluation(record, fresh)

    def take_due(self) -> None:
        """Answer all prompts if the current step is due."""
        step = self._state.step
        if step == 0 or (self._every and step % self._every == 0):
            self.take()

    def take(self) -> None:
        """Answer the prompts that have no answer of the current step, and write the answers."""
        self._last = step = self._state.step
        known, prompts = self._records_of(step), self._answerer.prompts
        if not all(json.dumps(each) in known for each in prompts):
            self._answer(step, known)
        self._monitor.summary_facts["samples"] = self.summary()

    def _answer(self, step: int, known: Collection[str]) -> None:
        """Answer all prompts, and write the answers that are not known."""
        # All prompts, because an engine may round differently with other sequences in a call.
        answers = self._answerer.answers(self._state)
        records = [
            {"step": step, "prompt": each, "text": text, **({"right": right} if right is not None else {})}
            for each, text, right in zip(
                self._answerer.prompts, answers, self._answerer.references, strict=True
            )
            if json.dumps(each) not in known
        ]
        with as_run_error(self._path), open_regular(self._path, "ab") as stream:
            stream.write("".join(json.dumps(record) + "\n" for record in records).encode())
            stream.flush()
            os.fsync(stream.fileno())
        self._records += records
        first = records[0]
        self._monitor.note(
            f"step {step}: {describe_prompt(first['prompt'])} -> {format_value(first['text'])}"
        )
        self._monitor.on_samples()

    def summary(self) -> Record:
        """Return the answers before the first step, and the latest ones."""
        return {
            "before": list(self._records_of(0).values()),
            "after": list(self._records_of(self._last).values()),
        }

    def _records_of(self, step: int) -> dict[str, Record]:
        """Return the records of a step by prompt."""
        return {json.dumps(each["prompt"]): each for each in self._records if each["step"] == step}


def read_samples(path: Path) -> list[Record]:
    """Read the valid records of a samples file in order; none if there is no file. Changes nothing."""
    return [record for _, record in _read(path) if record is not None]


def _repaired_records(path: Path) -> list[Record]:
    """Read the valid records of a samples file, and remove incomplete lines from it."""
    records = _read(path)
    if any(record is None for _, record in records):
        write_file(path, b"".join(line for line, record in records if record is not None))
    return [record for _, record in records if record is not None]


def _read(path: Path) -> list[tuple[bytes, Record | None]]:
    """Read the lines of a samples file, each with its record if it is valid."""
    if not os.path.lexists(path):
        return []
    with as_run_error(path):
        lines = read_regular(path).splitlines(keepends=True)
    return [(line, sample_record(line)) for line in lines]


def sample_record(line: bytes) -> Record | None:
    """Parse a line of a samples file; None unless it is complete and valid."""
    try:
        record = parse_json(line)
    except DocumentError:
        return None
    is_valid = line.endswith(b"\n") and isinstance(record, dict) and {"prompt", "text"} <= record.keys()
    is_valid = is_valid and isinstance(record["text"], str) and isinstance(record.get("right", ""), str)
    is_valid = is_valid and type(record.get("step")) is int
    return record if is_valid else None
