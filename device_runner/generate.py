"""`prge generate`: what a model and its adapters write after prompts."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device_runner.session.memory import watched_memory
from device_runner.session.speaking import (
    STDIN,
    GenerateSettings,
    note,
    open_generator,
    open_speaking,
    read_adapters,
)
from prge.errors import DataError, shown
from prge.files.documents import DocumentError, read_json
from prge.host.terminal import write_text
from prge.rows.columns import RowError, columns_text
from prge.rows.forms.form import find_form
from prge.rows.forms.messages import template_variables
from prge.rows.forms.task import load_task
from prge.rows.readers.feedback import TEMPLATE_KWARGS
from prge.rows.readers.files import Row, place_of_row, select_rows
from prge.rows.sources import describe_paths, read_source
from prge.rows.tokenization.inputs import read_text_of
from prge.rows.tokenization.tokenizer import bundle_tokenizer
from prge.text.loop import Answer, Generator, Request, Ticket
from prge.text.prompts import Prompt, Prompts
from prge.verbs.settings import parse_settings

MOST_AT_ONCE = 8


@dataclass(frozen=True)
class _Asked:
    """A prompt, with its row in the data or its place among the prompts, from 1."""

    row: int
    prompt: Prompt


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge generate --help`."""
    settings = parse_settings(GenerateSettings, argv, "prge generate", ["bundle"])
    with watched_memory(settings.memory, note):
        generate(settings)
    return 0


def generate(settings: GenerateSettings) -> None:
    """Write the answers to standard output, and how fast they came to standard error.

    Raises:
        PrgeError: bad input, or the engine failed.
    """
    bundle = open_speaking(settings.bundle)
    tokenizer = bundle_tokenizer(bundle)
    if settings.prompt and not settings.chat and tokenizer.chat_template is not None:
        note("the model has a chat template: --chat puts the prompt into it")
    # All prompts before the engine is there: a chat template runs in a forked child.
    prompts = Prompts(tokenizer, settings.date, control_tokens=settings.control_tokens)
    asked = _asked(settings, prompts)
    source = "the prompts" if settings.data is None else describe_paths(settings.data)
    for event, written in prompts.written.items():
        note(f"{event}: {', '.join(f'{name} {count} times' for name, count in written.items())}")
    adapters = read_adapters(settings, bundle)
    count = len(asked) * len(adapters)
    generator = open_generator(bundle, tokenizer, settings, min(count, MOST_AT_ONCE))
    how = settings.generation()
    names, requests = [], []
    for each in asked:
        for name, adapter in adapters.items():
            names.append((each.row, name))
            requests.append(Request(each.prompt, adapter, how))
    start = time.perf_counter()
    if count == 1 and not settings.json:
        answers = [_streamed(generator, requests[0])]
    else:
        writer = _Writer(names, settings.json, len(adapters) > 1)
        answers = _written(generator, requests, writer, source)
    note("; ".join(_facts(answers, time.perf_counter() - start)))


def _asked(settings: GenerateSettings, prompts: Prompts) -> list[_Asked]:
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    if settings.messages is not None:
        messages, variables = _read_messages(settings.messages)
        messages = [*_unless_there(system, messages), *messages]
        return [_Asked(1, prompts.of_messages(messages, {**settings.variables, **variables}))]
    if settings.data is not None:
        return _rows_asked(settings, prompts, system)
    texts = [read_text_of(sys.stdin) if text == STDIN else text for text in settings.prompt]
    if settings.chat:
        turns = [[*system, {"role": "user", "content": text}] for text in texts]
        made = [prompts.of_messages(messages, settings.variables) for messages in turns]
    else:
        made = [prompts.of_text(text) for text in texts]
    return [_Asked(number, prompt) for number, prompt in enumerate(made, 1)]


def _read_messages(path: Path) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """Messages of a file, and what the chat template is given with them."""
    try:
        content = read_json(path)
        fields = content if isinstance(content, dict) else {"messages": content}
        return _answerable(fields.get("messages")), template_variables(fields)
    except (OSError, DocumentError, RowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path} can't be answered",
            [reason],
            remedy='give JSON: [{"role": "user", "content": "..."}], or {"messages": ..., "tools": ...}',
            code="messages-unusable",
        ) from None


def _answerable(messages: object) -> list[Mapping[str, Any]]:
    """Messages that end with one to answer; raises RowError saying what they lack."""
    from prge.rows.tokenization.chat import check_messages

    try:
        return check_messages(messages, answered=False)
    except ValueError as error:
        raise RowError(str(error), code="messages-malformed") from None


def _rows_asked(
    settings: GenerateSettings, prompts: Prompts, system: Sequence[Mapping[str, Any]]
) -> list[_Asked]:
    """Prompts of the rows of a file; raises DataError with all rows that have none."""
    assert settings.data is not None
    task = load_task(settings.task) if settings.task else None
    source = read_source(settings.data, "test", settings.columns, task=task)
    chosen = select_rows(source.rows, settings.selection)
    asked: list[_Asked] = []
    read: Counter[str] = Counter()
    problems: list[str] = []
    for row in chosen:
        try:
            if task is not None:
                columns = columns_text(task.needed_columns(), [*row.fields], source.renamed)
                read[f"(task {task.name}), columns: {columns}"] += 1
                prompt = prompts.of_text(task.prompt(row.fields))
            else:
                form = find_form([row], source.name, source.renamed, asked=True)
                if form.chat and prompts.chat is not None:
                    form = form.rendered_by(prompts.chat.variables, [*row.fields])
                columns = columns_text((*form.asked, *form.optional), [*row.fields], source.renamed)
                read[f"({form.name}), columns: {columns}"] += 1
                plain = form.row(row, chat=form.chat != "" and prompts.chat is not None, asked=True)
                if "messages" in plain.fields:
                    messages = _asked_of(plain)
                    messages = [*_unless_there(system, messages), *messages]
                    variables = {**settings.variables, **plain.fields.get(TEMPLATE_KWARGS, {})}
                    prompt = prompts.of_messages(messages, variables)
                else:
                    prompt = prompts.of_text(_text_of(plain))
            asked.append(_Asked(row.number, prompt))
        except RowError as problem:
            problems.append(f"row {row.number}: {problem}")
        except DataError as error:
            problems.append(f"row {row.number}: {'; '.join(error.problems)}")
    if problems:
        raise DataError(f"{source.name} has rows that can't be answered", problems, code="rows-unanswerable")
    for how, count in read.items():
        note(f"{source.name}: {count} rows {how}")
    return asked


def _text_of(row: Row) -> str:
    for column in ("prompt", "text"):
        if column in row.fields:
            if not isinstance(row.fields[column], str):
                problem = f"column {column!r} is {shown(row.fields[column])}, must be a text"
                raise RowError(problem, code="column-not-text")
            return str(row.fields[column])
    raise AssertionError("a form without a prompt")


def _asked_of(row: Row) -> list[Mapping[str, Any]]:
    """A row's messages up to the last one that the assistant didn't write: what it wrote is the reference."""
    messages = row.fields["messages"]
    while isinstance(messages, list) and messages and _role(messages[-1]) == "assistant":
        messages = messages[:-1]
    return _answerable(messages)


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _unless_there(
    system: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    return [] if messages[0]["role"] == "system" else system


def _streamed(generator: Generator, request: Request) -> Answer:
    """One answer, written while it is made."""
    ticket = generator.submit(request, lambda text: write_text(sys.stdout, text))
    while generator.work():
        pass
    answer = ticket.wait(0)
    if not answer.text.endswith("\n"):
        write_text(sys.stdout, "\n")
    return answer


def _written(generator: Generator, requests: Sequence[Request], writer: _Writer, source: str) -> list[Answer]:
    """Many answers, each written as soon as it and those before it are made."""
    tickets: list[Ticket] = []
    problems: list[str] = []
    for (row, _), request in zip(writer.names, requests, strict=True):
        try:
            tickets.append(generator.submit(request))
        except DataError as error:
            problems += [f"row {row}: {problem}" for problem in error.problems]
    if problems:
        raise DataError(
            f"{source} can't be answered",
            dict.fromkeys(problems),
            remedy="shorten them, give a larger --context, or --overflow truncate",
            code="rows-unanswerable",
        )
    written = 0
    while written < len(tickets):
        generator.work()
        while written < len(tickets) and (tickets[written].answer or tickets[written].error):
            writer.write(written, tickets[written].wait(0))
            written += 1
    return [ticket.wait(0) for ticket in tickets]


@dataclass(frozen=True)
class _Writer:
    """Writes answers one after another, each with the row and the adapter that it is of."""

    names: Sequence[tuple[int, str]]
    json: bool
    several: bool

    def write(self, number: int, answer: Answer) -> None:
        row, adapter = self.names[number]
        if self.json:
            print(json.dumps({**place_of_row(row), "adapter": adapter, **_record(answer)}), flush=True)
            return
        heading = f"{row}, {adapter}" if self.several else str(row)
        write_text(sys.stdout, f"--- {heading}\n{answer.text}\n")


def _record(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "reason": answer.reason,
        "prompt_tokens": answer.prompt_tokens,
        "cut_tokens": answer.cut_tokens,
        "prefill_tokens_per_second": answer.prefill_tokens_per_second,
        "tokens_per_second": answer.tokens_per_second,
    }


def _facts(answers: Sequence[Answer], seconds: float) -> Iterator[str]:
    """What was made, and how fast."""
    tokens = sum(len(answer.tokens) for answer in answers)
    if len(answers) == 1:
        (answer,) = answers
        speed = f", {answer.tokens_per_second:.1f}/s" if answer.tokens_per_second else ""
        prefill = f", {answer.prefill_tokens_per_second:.1f}/s" if answer.prefill_tokens_per_second else ""
        yield f"{answer.prompt_tokens} prompt tokens{prefill}"
        yield f"{tokens} tokens{speed}, ended by {answer.reason}"
    else:
        yield f"{len(answers)} answers, {tokens} tokens in {seconds:.1f} s"
    if cut := sum(answer.cut_tokens > 0 for answer in answers):
        yield f"{cut} prompts lost their beginning: too long for the context"
