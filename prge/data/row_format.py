"""The format of all rows of a file, a task's or a form, and the objective of their training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from prge.data.columns import format_column_names, present_columns
from prge.data.forms.form import TEXT, Form, find_form
from prge.data.forms.preferences import rows_for_kto
from prge.data.forms.task import OBJECTIVES, Task
from prge.data.forms.task_rows import task_candidates, task_class
from prge.data.options import BuildOptions, Overflow
from prge.data.readers.files import Row
from prge.data.segments import Candidates, Segmenter, Texts
from prge.data.tokenization.tokenizer import Tokenizer, compile_chat_template
from prge.errors import DataError
from prge.model_spec import ModelSpec
from prge.objectives.preferences import PREFERENCES, ObjectiveName, resolve_objective

if TYPE_CHECKING:
    from prge.data.tokenization.chat import ChatTemplate


@dataclass(frozen=True)
class RowFormat:
    """How the rows of a file become segments.

    Attributes:
        name: name of the format for users.
        columns: columns that are read.
        objective: objective of the training.
        default_overflow: how rows that are too long are handled unless the user sets it.
        rows: the rows.
        segments: converts one of the rows to segments.
        chat: the model's chat template, if the rows become messages.
    """

    name: str
    columns: tuple[str, ...]
    objective: ObjectiveName
    default_overflow: Overflow
    rows: Sequence[Row]
    segments: Callable[[Segmenter, Row], Texts | Candidates]
    chat: ChatTemplate | None = None


def task_format(
    rows: Sequence[Row], task: Task, model: ModelSpec, options: BuildOptions, training: bool, source: str
) -> RowFormat:
    """Return the format of a task's rows; for `training` on completions, with only the correct candidate.

    Raises:
        DataError: the rows lack columns, or the task doesn't fit the objective or the bundle.
    """
    objective = options.objective
    if objective in (None, "auto"):
        objective = cast(ObjectiveName, task.objective)
    is_known = objective in OBJECTIVES and not model.is_encoder and not task.is_completion
    if objective != task.objective and not is_known:
        raise DataError(
            f"{source} can't be used:",
            [f"--objective is {objective}, which doesn't fit the task {task.name}"],
            remedy="Leave --objective out, or give rows of pairs or ratings without a task.",
            code="objective-does-not-fit",
        )
    columns, present = task.needed_columns(model.is_encoder), present_columns(rows)
    if lacking := [column for column in columns if column not in present]:
        names = format_column_names(present)
        raise DataError(
            f"{source} can't be used:",
            [f"no row has the column {column!r}; its columns are {names}" for column in lacking],
            remedy=f"Give the data set of the task {task.name}, a task file, or --columns "
            f"{lacking[0]}=NAME with the name that the column has.",
            code="column-missing",
        )
    problems = []
    if model.is_encoder and not task.classes:
        problems.append(f"an encoder predicts classes only; the task {task.name} has no label_words")
    if options.overflow == "split" and not task.is_completion:
        problems.append(
            "overflow split is for texts, completions and messages; a prompt with candidates can't be split"
        )
    if problems:
        raise DataError(f"The task {task.name} doesn't fit the bundle:", problems, code="task-does-not-fit")
    is_alone = training and objective == "completion"
    segments = partial(task_class, task) if model.is_encoder else partial(task_candidates, task, is_alone)
    return RowFormat(f"task {task.name}", columns, objective, "truncate", rows, segments)


def form_format(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    model: ModelSpec,
    options: BuildOptions,
    source: str,
    renamed: Mapping[str, str],
    chat: ChatTemplate | None,
) -> RowFormat:
    """Return the format of rows whose form follows from their columns.

    `chat` is the model's compiled chat template; None compiles it if it is needed.

    Raises:
        DataError: the columns match no form, or the form doesn't fit the objective or the model.
        BundleError: the chat template is damaged.
    """
    if model.readout != "logprobs":
        raise DataError(
            f"{source} can't be used:",
            [f"the bundle's readout is {model.readout}: it can train on classes, not on texts"],
            remedy="Give a task (a name or a task file).",
            code="bundle-learns-no-texts",
        )
    form = find_form(rows, source, renamed, objective=options.objective or "completion")
    chat = (chat or compile_chat_template(tokenizer, options.date)) if form.chat else None
    if chat is None and form.chat == "needs":
        raise DataError(
            f"{source} can't be used:",
            ["its rows are messages, but the model has no chat template"],
            remedy="Export with --chat-template plain, use a chat model, or give prompts and completions.",
            code="chat-template-missing",
        )
    if chat is not None:
        form = form.rendered_by(chat.variables, present_columns(rows))
    objective = _objective_of(form, options, source)
    is_split = form is TEXT or (chat is not None and objective == "completion")
    return RowFormat(
        form.name + (", as messages" if form.chat == "takes" and chat is not None else ""),
        (*form.columns, *form.optional),
        objective,
        "split" if is_split else "truncate",
        rows_for_kto(rows, form.prefers == "pairs") if objective == "kto" else rows,
        partial(form.segments, objective),
        chat,
    )


def _objective_of(form: Form, options: BuildOptions, source: str) -> ObjectiveName:
    """Return the objective for rows of a form; raises DataError if they don't fit the options."""
    what = f"{source} can't be used:"
    if form.prefers and options.objective is None:
        raise DataError(
            what,
            [f"its rows are {form.name}, which only `prge tune`, `prge run` and `prge eval` accept"],
            remedy="Give rows of prompts and completions.",
            code="rows-of-preferences",
        )
    try:
        objective = resolve_objective(options.objective or "auto", form.prefers)
    except ValueError as error:
        remedy = "Leave --objective out: it follows from the columns."
        raise DataError(
            what, [f"{error}; its rows are {form.name}"], remedy=remedy, code="objective-does-not-fit"
        ) from None
    if objective in PREFERENCES and options.overflow == "split":
        raise DataError(
            what,
            [f"--overflow is split, but a row of {form.name} can't be split"],
            remedy="Give --overflow truncate.",
            code="overflow-does-not-fit",
        )
    return objective
