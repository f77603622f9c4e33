"""What the rows of a file are as a whole: of a task or of a form, and what is learnt of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from prge.errors import DataError
from prge.learning.preferences import PREFERENCES, ObjectiveName, settled_objective
from prge.model_spec import ModelSpec
from prge.rows.columns import column_names, present_columns
from prge.rows.fitting import Overflow
from prge.rows.forms import TEXT, Form, find_form
from prge.rows.preferences import rated_rows
from prge.rows.readers import Row
from prge.rows.segments import Candidates, Formatting, Texts
from prge.rows.task import OBJECTIVES, Task
from prge.rows.task_rows import task_candidates, task_class
from prge.rows.tokenizer import Tokenizer

if TYPE_CHECKING:
    from prge.rows.chat import ChatTemplate


@dataclass(frozen=True)
class RowFormat:
    """How the rows of a file become segments.

    `name` names what they are, `columns` are those that are read, `objective` is what is learnt of them.
    `segments` makes segments of one of the `rows`; `usual_overflow` is what becomes of those that are too
    long where the user leaves it open.
    """

    name: str
    columns: tuple[str, ...]
    objective: ObjectiveName
    usual_overflow: Overflow
    rows: Sequence[Row]
    segments: Callable[[Formatting, Row], Texts | Candidates]
    chat: ChatTemplate | None = None


def task_format(
    rows: Sequence[Row],
    task: Task,
    model: ModelSpec,
    *,
    training: bool,
    objective: ObjectiveName | None,
    overflow: Overflow,
    source: str,
) -> RowFormat:
    """How a task's rows become segments.

    Args:
        rows: of the file.
        task: of the rows.
        model: of the bundle.
        training: whether an objective of completions has the right candidate alone.
        objective: that is asked for; None: the task's.
        overflow: that is asked for.
        source: names the data in errors.

    Raises:
        DataError: the rows lack columns, or the task doesn't fit the objective or the bundle.
    """
    task = _settled_task(task, model, objective, source)
    columns = task.needed_columns(model.is_encoder)
    _check_task(task, model, overflow, columns, present_columns(rows), source)
    segments = partial(task_class, task) if model.is_encoder else partial(task_candidates, task, training)
    return RowFormat(
        f"task {task.name}", columns, cast(ObjectiveName, task.objective), "truncate", rows, segments
    )


def form_format(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    model: ModelSpec,
    *,
    objective: ObjectiveName | None,
    overflow: Overflow,
    source: str,
    renamed: Mapping[str, str],
    date: str | None,
    chat: ChatTemplate | None,
) -> RowFormat:
    """How rows become segments whose columns say what they are.

    Args:
        rows: of the file.
        tokenizer: of the bundle, with its chat template.
        model: of the bundle.
        objective: that is asked for; None: no preferences.
        overflow: that is asked for.
        source: names the data in errors.
        renamed: columns that have other names in the file.
        date: day that a chat template takes for today.
        chat: the compiled chat template; None: it is compiled where it is needed.

    Raises:
        DataError: the columns are of no form, or of one that doesn't fit the objective or the model.
        BundleError: the chat template is damaged.
    """
    form = _form_of(rows, model, source, renamed, objective or "completion")
    chat = _template_of(form, tokenizer, source, date, chat)
    if chat is not None:
        form = form.rendered_by(chat.variables, present_columns(rows))
    settled = _objective_of(form, objective, overflow, source)
    is_split = form is TEXT or (chat is not None and settled == "completion")
    return RowFormat(
        form.name + (", as messages" if form.chat == "takes" and chat is not None else ""),
        (*form.columns, *form.optional),
        settled,
        "split" if is_split else "truncate",
        rated_rows(rows, form.prefers == "pairs") if settled == "kto" else rows,
        partial(form.segments, settled),
        chat,
    )


def _settled_task(task: Task, model: ModelSpec, asked: ObjectiveName | None, source: str) -> Task:
    """The task with the objective that is asked for, if one is."""
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


def _objective_of(form: Form, asked: ObjectiveName | None, overflow: Overflow, source: str) -> ObjectiveName:
    """What is learnt of rows of a form; raises DataError where they don't fit what is asked for."""
    what = f"{source} can't be used"
    if form.prefers and asked is None:
        raise DataError(
            what,
            [f"its rows are {form.name}, which `prge tune`, `prge run` and `prge eval` take alone"],
            remedy="give rows of prompts and completions",
        )
    try:
        objective = settled_objective(asked or "auto", form.prefers)
    except ValueError as error:
        remedy = "leave --objective out: the columns choose it"
        raise DataError(what, [f"{error}; its rows are {form.name}"], remedy=remedy) from None
    if objective in PREFERENCES and overflow == "split":
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
