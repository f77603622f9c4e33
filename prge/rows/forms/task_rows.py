"""A task's rows to what is learnt: the right answer, or candidates that are compared."""

from __future__ import annotations

from prge.rows.columns import RowError
from prge.rows.forms.task import Task
from prge.rows.readers.files import Row
from prge.rows.segments import Candidates, SegmentedText, Segmenter, Texts


def task_candidates(task: Task, is_alone: bool, segmenter: Segmenter, row: Row) -> Texts | Candidates:
    """The candidates of a task's row, or its first answer where it has no candidates.

    Where `is_alone` the right candidate is learnt without others. Raises RowError.
    """
    prompt = task.prompt(row.fields)
    if task.is_completion:
        answers = task.answers(row.fields)
        segments = segmenter.completed(prompt, task.join(prompt, answers[0]))
        return Texts((segmenter.learnt(*segments),), answers)
    choices, label = task.candidates(row.fields), task.label(row.fields)
    compared = (choices[label],) if is_alone else choices
    texts = [task.candidate_text(prompt, choice, row.fields) for choice in compared]
    return Candidates(
        tuple(SegmentedText(segmenter.completed(prompt, text, "candidate")) for text in texts),
        "choices",
        None if is_alone else label,
        answers=task.answers(row.fields) or (choices[label],),
        choices=choices,
        class_name=task.classes[label] if task.classes else None,
    )


def task_class(task: Task, segmenter: Segmenter, row: Row) -> Candidates:
    """What an encoder reads of a task's row, with its class; raises RowError."""
    text = task.encoder_text(row.fields)
    if not text.strip():
        raise RowError("has an empty text: there is nothing to learn from", code="text-empty")
    choices, label = task.candidates(row.fields), task.label(row.fields)
    return Candidates(
        (SegmentedText((segmenter.text(text, is_trained=False),), special_tokens="begin and end"),),
        "classes",
        label,
        answers=(choices[label],),
        choices=choices,
        class_name=task.classes[label],
    )
