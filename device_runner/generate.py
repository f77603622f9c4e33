"""`prge generate`: generate answers of a model and its adapters to prompts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device_runner.session.generation import (
    STDIN,
    GenerateSettings,
    open_generative_bundle,
    open_generator,
    print_note,
    read_adapters,
)
from device_runner.session.grammars import MAX_SCHEMA, Grammars, JsonOf
from device_runner.session.memory import watched_memory
from prge.cli.settings import parse_settings
from prge.data.columns import RowError
from prge.data.forms.messages import template_variables
from prge.data.forms.task import load_task
from prge.data.readers.files import row_location, select_rows
from prge.data.sources import describe_paths, read_source
from prge.data.tokenization.inputs import read_input_text
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.errors import DataError
from prge.formats.documents import DocumentError, read_document, read_json
from prge.generation.constraints import BeginConstraint
from prge.generation.loop import Completion, Generator, Request, Ticket
from prge.generation.prompts import Prompt, Prompts
from prge.generation.row_prompts import check_answerable, read_row_prompts
from prge.system.terminal import write_text

MAX_AT_ONCE = 8


@dataclass(frozen=True)
class _NumberedPrompt:
    """A prompt and its number: its row in the data or its position among the prompts, from 1."""

    row: int
    prompt: Prompt


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge generate --help`."""
    settings = parse_settings(GenerateSettings, argv, "prge generate", ["bundle"])
    with watched_memory(settings.memory, print_note):
        generate(settings)
    return 0


def generate(settings: GenerateSettings) -> None:
    """Write the answers to standard output, and the speed to standard error.

    Raises:
        PrgeError: bad input, or the engine failed.
    """
    bundle = open_generative_bundle(settings.bundle)
    tokenizer = load_bundle_tokenizer(bundle)
    if settings.prompt and not settings.chat and tokenizer.chat_template is not None:
        print_note("the model has a chat template: use --chat to apply it to the prompt")
    # All prompts come before the engine: a chat template runs in a forked child.
    renderer = Prompts(tokenizer, settings.date, control_tokens=settings.control_tokens)
    prompts = _read_prompts(settings, renderer)
    constraint = _read_constraint(settings, Grammars(tokenizer))
    source = "the prompts" if settings.data is None else describe_paths(settings.data)
    for event, written in renderer.written.items():
        print_note(f"{event}: {', '.join(f'{name} {count} times' for name, count in written.items())}")
    adapters = read_adapters(settings, bundle)
    count = len(prompts) * len(adapters)
    generator = open_generator(bundle, tokenizer, settings, min(count, MAX_AT_ONCE))
    settings_of_generation = settings.generation()
    names, requests = [], []
    for each in prompts:
        for name, adapter in adapters.items():
            names.append((each.row, name))
            requests.append(Request(each.prompt, adapter, settings_of_generation, constraint=constraint))
    start = time.perf_counter()
    if count == 1 and not settings.json:
        answers = [_streamed(generator, requests[0])]
    else:
        writer = _Writer(names, settings.json, len(adapters) > 1)
        answers = _written(generator, requests, writer, source)
    print_note("; ".join(_facts(answers, time.perf_counter() - start)))


def _read_prompts(settings: GenerateSettings, prompts: Prompts) -> list[_NumberedPrompt]:
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    if settings.messages is not None:
        messages, variables = _read_messages(settings.messages)
        messages = [*([] if messages[0]["role"] == "system" else system), *messages]
        return [_NumberedPrompt(1, prompts.encode_messages(messages, {**settings.variables, **variables}))]
    if settings.data is not None:
        return _read_row_prompts(settings, prompts, system)
    texts = [read_input_text(sys.stdin) if text == STDIN else text for text in settings.prompt]
    if settings.chat:
        turns = [[*system, {"role": "user", "content": text}] for text in texts]
        prompts_of_texts = [prompts.encode_messages(messages, settings.variables) for messages in turns]
    else:
        prompts_of_texts = [prompts.encode_text(text) for text in texts]
    return [_NumberedPrompt(number, prompt) for number, prompt in enumerate(prompts_of_texts, 1)]


def _read_constraint(settings: GenerateSettings, grammars: Grammars) -> BeginConstraint | None:
    """Read and compile the schema or the grammar of the answers; raises DataError or BundleError."""
    path = settings.json_schema or settings.grammar
    if path is None:
        return None
    try:
        if settings.json_schema:
            return grammars.sequence([JsonOf(read_json(path))])
        return grammars.grammar(read_document(path, MAX_SCHEMA).decode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path} can't be used:", [reason], code="grammar-refused") from None


def _read_messages(path: Path) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """Read messages from a file, and the variables of the chat template."""
    try:
        content = read_json(path)
        fields = content if isinstance(content, dict) else {"messages": content}
        return check_answerable(fields.get("messages")), template_variables(fields)
    except (OSError, DocumentError, RowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path} can't be answered:",
            [reason],
            remedy='Write JSON: [{"role": "user", "content": "..."}], or {"messages": ..., "tools": ...}',
            code="messages-unusable",
        ) from None


def _read_row_prompts(
    settings: GenerateSettings, prompts: Prompts, system: Sequence[Mapping[str, Any]]
) -> list[_NumberedPrompt]:
    """Return the prompts of a file's rows; raises DataError with all rows that have none."""
    assert settings.data is not None
    task = load_task(settings.task) if settings.task else None
    source = read_source(settings.data, "test", settings.columns, task=task)
    rows = select_rows(source.rows, settings.selection)
    read, notes = read_row_prompts(
        source, rows, prompts, task=task, system=system, variables=settings.variables
    )
    for note in notes:
        print_note(note)
    return [_NumberedPrompt(each.row.number, each.prompt) for each in read]


def _streamed(generator: Generator, request: Request) -> Completion:
    """Generate one answer and print it as it grows."""
    ticket = generator.submit(request, lambda text: write_text(sys.stdout, text))
    while generator.work():
        pass
    answer = ticket.wait(0)
    if not answer.text.endswith("\n"):
        write_text(sys.stdout, "\n")
    return answer


def _written(
    generator: Generator, requests: Sequence[Request], writer: _Writer, source: str
) -> list[Completion]:
    """Generate many answers and print each as soon as it and all before it are complete."""
    tickets: list[Ticket] = []
    problems: list[str] = []
    for (row, _), request in zip(writer.names, requests, strict=True):
        try:
            tickets.append(generator.submit(request))
        except DataError as error:
            problems += [f"row {row}: {problem}" for problem in error.problems]
    if problems:
        raise DataError(
            f"{source} can't be answered:",
            dict.fromkeys(problems),
            remedy="Shorten them, set a larger --context, or use --overflow truncate.",
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
    """Prints answers in order, each with its row and adapter."""

    names: Sequence[tuple[int, str]]
    json: bool
    several: bool

    def write(self, number: int, answer: Completion) -> None:
        row, adapter = self.names[number]
        if self.json:
            print(json.dumps({**row_location(row), "adapter": adapter, **_record(answer)}), flush=True)
            return
        heading = f"{row}, {adapter}" if self.several else str(row)
        write_text(sys.stdout, f"--- {heading}\n{answer.text}\n")


def _record(answer: Completion) -> dict[str, Any]:
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "reason": answer.reason,
        "prompt_tokens": answer.prompt_tokens,
        "cut_tokens": answer.cut_tokens,
        "prefill_tokens_per_second": answer.prefill_tokens_per_second,
        "tokens_per_second": answer.tokens_per_second,
    }


def _facts(answers: Sequence[Completion], seconds: float) -> Iterator[str]:
    """Yield phrases with the numbers of tokens and the speeds of generation."""
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
        yield f"{cut} prompts were too long for the context and lost their beginning"
