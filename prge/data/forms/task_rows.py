"""Rows of a task: the correct answer to train on, or candidates to compare."""

from __future__ import annotations

from prge.data.columns import RowError
from prge.data.forms.task import Task
from prge.data.readers.files import Row
from prge.data.segments import Candidates, SegmentedText, Segmenter, Texts


def task_candidates(task: Task, is_alone: bool, segmenter: Segmenter, row: Row) -> Texts | Candidates:
    """Return the candidates of a task's row, or its first answer if the task has no candidates.

    With `is_alone`, only the correct candidate is returned, to be trained on. Raises RowError.
    """
    prompt = task.prompt(row.fields)
    if task.is_completion:
        answers = task.answers(row.fields)
        segments = segmenter.prompt_and_completion(prompt, task.join(prompt, answers[0]))
        return Texts((segmenter.trained_text(*segments),), answers)
    choices, label = task.candidates(row.fields), task.label(row.fields)
    compared = (choices[label],) if is_alone else choices
    texts = [task.candidate_text(prompt, choice, row.fields) for choice in compared]
    return Candidates(
        tuple(SegmentedText(segmenter.prompt_and_completion(prompt, text, "candidate")) for text in texts),
        "choices",
        None if is_alone else label,
        answers=task.answers(row.fields) or (choices[label],),
        choices=choices,
        class_name=task.classes[label] if task.classes else None,
    )


def task_class(task: Task, segmenter: Segmenter, row: Row) -> Candidates:
    """Return the text of a task's row for an encoder, with its class; raises RowError."""
    text = task.encoder_text(row.fields)
    if not text.strip():
        raise RowError("it has an empty text: there is nothing to learn from", code="text-empty")
    choices, label = task.candidates(row.fields), task.label(row.fields)
    return Candidates(
        (SegmentedText((segmenter.text(text, is_trained=False),), special_tokens="begin and end"),),
        "classes",
        label,
        answers=(choices[label],),
        choices=choices,
        class_name=task.classes[label],
    )
