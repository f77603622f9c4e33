"""Classification heads that belong to an adapter or came with the model's checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prge.data.forms.task import Task, load_task
from prge.formats.bundle import Bundle
from prge.objectives.classification_head import Head
from prge.training.checkpoint import read_folder_head


def load_bundle_task(bundle: Bundle, name: str | Path | None) -> Task | None:
    """Load a task, with its classes in the order of the bundle's own head; None without a name.

    Raises:
        ConfigError: the task doesn't exist or is invalid.
    """
    return with_bundle_label_order(bundle, load_task(name)) if name else None


def with_bundle_label_order(bundle: Bundle, task: Task | None) -> Task | None:
    """Return the task with its classes in the order of the bundle's own head, if it has the same classes."""
    return None if task is None else _reordered(task, bundle.labels) or task


def load_head(bundle: Bundle, source: Path, task: Task | None, classes: int) -> Head | None:
    """Read the head in the folder of an adapter; None if there is no head for the task's classes.

    Args:
        bundle: the bundle of the adapter.
        source: folder of the adapter; the bundle's own adapter has the head that came with the checkpoint.
        task: the task, as `load_bundle_task` returns it.
        classes: number of classes of the rows.

    Raises:
        AdapterError: the head is damaged, or has another number of classes.
    """
    if source == bundle.adapter and (task is None or _reordered(task, bundle.labels) is None):
        return None
    return read_folder_head(source, classes, bundle.chain.width)


def describe_unused_head(bundle: Bundle) -> str:
    """Return a message that the checkpoint's own head isn't used; an empty string if it has none."""
    if not bundle.labels:
        return ""
    return f"the checkpoint's own head isn't used, whose classes are {', '.join(bundle.labels)}"


def _reordered(task: Task, labels: tuple[str, ...]) -> Task | None:
    """Return the task with its classes in the order of labels; None if they aren't the same classes.

    Classes are compared by name, by word and by number.
    """
    words = task.label_words
    index_by_name = {label.strip().lower(): index for index, label in enumerate(labels)}
    index_by_number = {str(index): index for index in range(len(labels))}
    if len(words) != len(labels) or len(index_by_name) != len(labels):
        return None
    for names, index_of in (
        (words, index_by_name),
        (words.values(), index_by_name),
        (words, index_by_number),
    ):
        indices = [index_of.get(name.strip().lower()) for name in names]
        keys = dict(zip(indices, words, strict=True))
        if None not in keys and len(keys) == len(labels):
            return replace(task, label_words={keys[n]: words[keys[n]] for n in range(len(labels))})
    return None
