"""Rows of a data file to the examples of one bundle: what is context, what is learnt, what had to be cut.

    text                  every token after the first is learnt, and the end-of-sequence token after them;
                          `begin` is context
    prompt, completion    the completion is learnt, with the end-of-sequence token after it
    messages              what the assistant wrote is learnt, an example for each way that its template has
                          to render the turns
    Alpaca, ShareGPT      become one of the two above (forms.py)
    a task's candidates   one-token candidates share a sequence, a target each at the prompt's last token;
                          longer ones have a sequence each, weights 1 / tokens
    a task's answers      the first answer is learnt
    a task, encoder       one sequence without targets, and a class
    pairs, ratings        a sequence for each of two answers (preference_examples.py)

What doesn't fit a bundle is cut, split or refused as `overflow` says, and told in a `DataReport`:
a prompt loses its beginning, as in MeZO (arXiv 2305.17333); a candidate is never cut; a chat is split between
turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from prge.errors import DataError, shown
from prge.learning.examples import Example
from prge.learning.preferences import PREFERENCES, ObjectiveName, settled_objective
from prge.model_spec import ModelSpec
from prge.rows.control_tokens import ControlTokens
from prge.rows.conversations import chat_examples
from prge.rows.forms import (
    CONTROL_TOKENS,
    TEXT,
    WEIGHT,
    Form,
    column_names,
    columns_text,
    find_form,
    present_columns,
    text_of,
)
from prge.rows.preference_examples import pair, rating
from prge.rows.preferences import rated_rows
from prge.rows.readers import Row, Selection, select_rows
from prge.rows.report import (
    CONTROL,
    CONTROL_AS_TEXT,
    CONTROL_IN_PROMPTS,
    CONTROL_READ,
    CUTS,
    NO_ROOM_FOR_END,
    DataReport,
)
from prge.rows.sources import Source, read_source
from prge.rows.task import OBJECTIVES, RowError, Task
from prge.rows.task_examples import completion, task_examples
from prge.rows.tokenizer import Tokenizer
from prge.rows.windows import Made, Masked, Overflow, Reading, fits, learnt, learnt_after

if TYPE_CHECKING:
    from prge.rows.chat import ChatTemplate

# Of a row: more would be an oversight.
MOST_WEIGHT = 1e6
_READ_AS: Mapping[ControlTokens, str] = {
    "special": CONTROL_READ,
    "all": CONTROL_READ,
    "prompt": CONTROL_IN_PROMPTS,
    "text": CONTROL_AS_TEXT,
}


@dataclass(frozen=True)
class BuildOptions:
    """How rows become examples."""

    overflow: Overflow = "error"
    """What is too long for the bundle: `error`, `truncate`, or `split` (not candidates) it; `auto`: split
    texts and chats, truncate all else."""
    append_eos: bool = True
    """Learn an end-of-sequence token after texts, completions and answers, where the model has one and they
    don't end with it."""
    max_dropped: float | None = None
    """Largest share of target tokens that may be left out; None: any."""
    skip_unusable: bool = False
    """Leave out rows that can't be used, as long as there are others; the report has them."""
    objective: ObjectiveName | None = None
    """What is learnt of the rows; None: not of preferences, which are refused."""
    date: str | None = None
    """Day that a chat template takes for today, in ISO 8601; None: today."""
    control_tokens: ControlTokens = "special"
    """Where control tokens that are written in rows are control tokens: `special`, in texts, prompts and
    completions; `prompt`, in prompts alone; `all`, in messages too; `text`, nowhere."""


def load_examples(
    source: Source | Path | str,
    tokenizer: Tokenizer,
    model: ModelSpec,
    task: Task | None = None,
    selection: Selection | None = None,
    options: BuildOptions | None = None,
    *,
    training: bool = True,
) -> tuple[list[Example], DataReport]:
    """Select rows of a source, by default all, and build their examples; a path is read as training rows."""
    if not isinstance(source, Source):
        source = read_source(source)
    chosen = select_rows(source.rows, selection or Selection())
    return build_examples(
        chosen,
        tokenizer,
        model,
        task,
        options,
        training=training,
        source=source.name,
        renamed=source.renamed,
    )


def build_examples(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    model: ModelSpec,
    task: Task | None = None,
    options: BuildOptions | None = None,
    *,
    training: bool = True,
    source: str = "the data",
    renamed: Mapping[str, str] | None = None,
    chat: ChatTemplate | None = None,
) -> tuple[list[Example], DataReport]:
    """Tokenize rows for a bundle.

    Args:
        training: build a task of objective `completion` with its right candidate alone; an evaluation
            (false) compares all candidates, in any number of sequences.
        source: names the data in errors.
        renamed: columns that have other names in the file, with these.
        chat: renders rows of messages; None: the tokenizer's chat template, compiled for this call.

    Raises:
        DataError: rows that lack a column, hold an unknown label, nothing to learn, or don't fit; all named.
    """
    if not rows:
        raise DataError(f"{source} can't be used", ["it has no rows"])
    options, present = options or BuildOptions(), present_columns(rows)
    make: Callable[[Reading, Row], Made]
    usual: Overflow
    if task is not None:
        task = _settled_task(task, model, options, source)
        read, kind = task.needed_columns(model.is_encoder), f"task {task.name}"
        _check_task(task, model, options.overflow, read, present, source)
        make = partial(task_examples, task, training)
        usual, objective = "truncate", cast(ObjectiveName, task.objective)
    else:
        asked = options.objective or "completion"
        form = _form_of(rows, model, source, renamed or {}, asked)
        chat = _template_of(form, tokenizer, source, options.date, chat)
        if chat is not None:
            form = form.rendered_by(chat.variables, present)
        objective = _objective_of(form, options, source)
        read = (*form.columns, *form.optional)
        kind = form.name + (", as messages" if form.chat == "takes" and chat is not None else "")
        make = partial(_of_form, form, chat, objective)
        if objective == "kto":
            rows = rated_rows(rows, form.prefers == "pairs")
        is_split = form is TEXT or (chat is not None and objective == "completion")
        usual = "split" if is_split else "truncate"
    overflow = usual if options.overflow == "auto" else options.overflow
    reading = Reading(tokenizer, model, overflow, options.append_eos, options.control_tokens)
    columns = columns_text(read, present, renamed or {})
    unread = tuple(column for column in present if column not in read)
    report = DataReport(
        f"{source} ({kind})", reading.length, columns, objective, read=tuple(read), unread=unread
    )
    examples = _built(rows, partial(_counted, make, read, reading), report)
    if report.unusable and not (options.skip_unusable and examples):
        raise DataError(
            f"{source} has rows that can't be used",
            [f"row {number}: {problem}" for number, problem in report.unusable.items()],
            remedy="correct or remove these rows",
        )
    _check_dropped(report, source, options.max_dropped)
    return examples, report


def _built(rows: Sequence[Row], make: Callable[[Row], Made], report: DataReport) -> list[Example]:
    """The examples of rows; what became of them, and what is wrong with some, goes into the report."""
    examples: list[Example] = []
    for row in rows:
        try:
            made = make(row)
        except RowError as problem:
            report.unusable[row.number] = str(problem)
            continue
        except DataError as error:
            headline = error.what.partition("\n")[0]
            report.unusable[row.number] = f"{headline}: {'; '.join(error.problems)}"
            continue
        for event in made.events:
            report.note(event, row.number)
            if event in CONTROL:
                report.written.setdefault(event, Counter()).update(made.written)
        report.dropped += made.dropped
        report.unknown += made.unknown
        if made.label is not None:
            report.classes[made.label] += 1
        is_cut = any(event in CUTS for event in made.events)
        examples += [replace(each, cut=True) for each in made.examples] if is_cut else made.examples
    report.rows = len(rows) - len(report.unusable)
    report.examples = len(examples)
    for example in examples:
        for sequence in example.sequences:
            report.lengths.append(len(sequence.tokens))
            report.targets.append(len(sequence.targets))
    return examples


def _counted(make: Callable[[Reading, Row], Made], read: Sequence[str], reading: Reading, row: Row) -> Made:
    """What `make` makes of a row, with the control tokens that are written in the columns that are `read`."""
    if CONTROL_TOKENS in read and (own := row.fields.get(CONTROL_TOKENS)) is not None:
        if own not in get_args(ControlTokens):
            known = ", ".join(get_args(ControlTokens))
            raise RowError(f"its {CONTROL_TOKENS} is {shown(own)}, must be one of {known}")
        reading = replace(reading, control_tokens=cast(ControlTokens, own))
    made = make(reading, row)
    written = reading.tokenizer.count_control([row.fields.get(column) for column in read])
    if written and not any(event in CONTROL for event in made.events):
        made = replace(made, events=(*made.events, _READ_AS[reading.control_tokens]))
    return replace(made, written=written)


def _of_form(
    form: Form, chat: ChatTemplate | None, objective: ObjectiveName, reading: Reading, row: Row
) -> Made:
    """Examples of a row without a task, with the weight that the row has."""
    if objective in PREFERENCES:
        form.check(row)
        made = (rating if objective == "kto" else pair)(form, chat, reading, row)
    else:
        made = _learnt_of(form, chat, reading, row)
    if WEIGHT not in form.optional or row.fields.get(WEIGHT) is None:
        return made
    weight = _weight_of(row.fields[WEIGHT])
    return replace(made, examples=tuple(replace(each, weight=weight) for each in made.examples))


def _weight_of(value: object) -> float:
    """How much a row counts, by its column; raises RowError."""
    try:
        weight = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        weight = math.nan
    if not 0 < weight <= MOST_WEIGHT:
        raise RowError(
            f"its weight is {shown(value)}, must be a number above 0, at most {MOST_WEIGHT:g}: how much the "
            "row counts; give a column that says something else another name"
        )
    return weight


def _learnt_of(form: Form, chat: ChatTemplate | None, reading: Reading, row: Row) -> Made:
    """Examples of a row whose text, completion or answers are learnt."""
    row = form.row(row, chat=chat is not None)
    if "messages" in row.fields and chat is not None:
        return chat_examples(reading, chat, row)
    if form is TEXT:
        tokens, begin = reading.text(text_of(row.fields, "text")), len(reading.tokenizer.begin)
        if len(tokens) <= begin:
            raise RowError("its text is empty: there is nothing to learn from")
        whole = Masked(tokens, learnt_after(begin, len(tokens)), begin)
        ended = reading.ended(tokens)
        with_end = Masked(ended, learnt_after(begin, len(ended)), begin)
        if fits(whole.mask, reading.model) and not fits(with_end.mask, reading.model):
            return learnt(reading, row.number, replace(whole, events=(NO_ROOM_FOR_END,)))
        return learnt(reading, row.number, with_end)
    prompt, answer = (text_of(row.fields, column) for column in ("prompt", "completion"))
    return completion(reading, row.number, prompt, answer)


def _settled_task(task: Task, model: ModelSpec, options: BuildOptions, source: str) -> Task:
    """The task with the objective that is asked for, if one is."""
    asked = options.objective
    if asked in (None, "auto", task.objective):
        return task
    known = asked in OBJECTIVES and not model.is_encoder and not task.is_completion
    if known:
        return replace(task, objective=cast(str, asked))
    raise DataError(
        f"{source} can't be used",
        [f"--objective is {asked}, which the task {task.name} can't be learnt by"],
        remedy="leave --objective out, or give rows of pairs or ratings without a task",
    )


def _objective_of(form: Form, options: BuildOptions, source: str) -> ObjectiveName:
    """What is learnt of rows of a form; raises DataError where they don't fit what is asked for."""
    what = f"{source} can't be used"
    if form.prefers and options.objective is None:
        raise DataError(
            what,
            [f"its rows are {form.name}, which `prge tune`, `prge run` and `prge eval` take alone"],
            remedy="give rows of prompts and completions",
        )
    try:
        objective = settled_objective(options.objective or "auto", form.prefers)
    except ValueError as error:
        remedy = "leave --objective out: the columns choose it"
        raise DataError(what, [f"{error}; its rows are {form.name}"], remedy=remedy) from None
    if objective in PREFERENCES and options.overflow == "split":
        raise DataError(what, [f"--overflow is split; a row of {form.name} is one"], remedy="truncate them")
    return objective


def _form_of(
    rows: Sequence[Row],
    model: ModelSpec,
    source: str,
    renamed: Mapping[str, str],
    objective: ObjectiveName,
) -> Form:
    """The form of rows without a task."""
    if model.readout != "logprobs":
        raise DataError(
            f"{source} can't be used",
            [f"the bundle's readout is {model.readout}: it compares classes, learns no texts"],
            remedy="give a task (a name or a task file)",
        )
    return find_form(rows, source, renamed, objective=objective)


def _template_of(
    form: Form, tokenizer: Tokenizer, source: str, date: str | None, chat: ChatTemplate | None
) -> ChatTemplate | None:
    """What renders rows that become messages; None where they are texts."""
    if not form.chat:
        return None
    if tokenizer.chat_template is not None:
        return chat or compile_chat_template(tokenizer.chat_template, tokenizer, date)
    if form.chat == "needs":
        raise DataError(
            f"{source} can't be used",
            ["its rows are messages and the model has no chat template"],
            remedy="export with --chat-template plain, take a chat model, or prompts and completions",
        )
    return None


def compile_chat_template(source: str, tokenizer: Tokenizer, date: str | None) -> ChatTemplate:
    """The compiled chat template of a tokenizer; only rows of messages need jinja2."""
    try:
        from prge.rows.chat import ChatTemplate
    except ImportError:
        raise DataError("rows of messages need the package jinja2", [], remedy="pip install jinja2") from None
    return ChatTemplate(source, tokenizer.special_tokens, date)


def _check_task(
    task: Task,
    model: ModelSpec,
    overflow: Overflow,
    needed: Sequence[str],
    present: Sequence[str],
    source: str,
) -> None:
    """What a task asks of a bundle and of a file as a whole, whatever single rows are."""
    if lacking := [column for column in needed if column not in present]:
        names = column_names(present)
        raise DataError(
            f"{source} can't be used",
            [f"no row has the column {column!r}; its columns are {names}" for column in lacking],
            remedy=f"give the data set of the task {task.name}, a task file, or --columns "
            f"{lacking[0]}=NAME with the name that the column has",
        )
    problems = []
    if model.is_encoder and not task.classes:
        problems.append(f"an encoder knows classes only; the task {task.name} has no label_words")
    if overflow == "split" and not task.is_completion:
        problems.append(
            "overflow split is for texts, completions and messages: a prompt with candidates is one"
        )
    if problems:
        raise DataError(f"the task {task.name} doesn't fit the bundle", problems)


def _check_dropped(report: DataReport, source: str, limit: float | None) -> None:
    """Raise DataError if more target tokens would be left out than the options allow."""
    share = report.dropped_share
    if limit is not None and share > limit:
        targets = report.dropped + sum(report.targets)
        raise DataError(
            f"{source} would lose {share:.0%} of its target tokens",
            [
                f"{report.dropped} of {targets} don't fit rows of {report.sequence_length} tokens; "
                f"--max-dropped is {limit:g}"
            ],
            remedy="keep them all with --overflow split, or export with a larger --sequence-length; or "
            "leave them out with a larger --max-dropped",
        )
