"""The classification head that a checkpoint came with, for the rows whose classes are its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prge.data.forms.task import Task, load_task
from prge.formats.bundle import Bundle
from prge.objectives.classification_head import Head
from prge.training.checkpoint import head_at


def load_bundle_task(bundle: Bundle, name: str | Path | None) -> Task | None:
    """The task of a name or file, with its classes in the order that the bundle's own head has them in.

    Raises:
        ConfigError: it can't be used.
    """
    return with_bundle_label_order(bundle, load_task(name)) if name else None


def with_bundle_label_order(bundle: Bundle, task: Task | None) -> Task | None:
    """A task with its classes in the order that the bundle's own head has them in, if these are its own."""
    return None if task is None else _in_order(task, bundle.labels) or task


def load_head(bundle: Bundle, source: Path, task: Task | None, classes: int) -> Head | None:
    """The head beside an adapter of a bundle; None where there is none for the task's classes.

    Args:
        bundle: of the adapter.
        source: folder of the adapter; the bundle's own has the head that the checkpoint came with.
        task: as `load_bundle_task` gives it.
        classes: of the rows.

    Raises:
        AdapterError: it is damaged, or of other classes than a run's rows.
    """
    if source == bundle.adapter and (task is None or _in_order(task, bundle.labels) is None):
        return None
    return head_at(source, classes, bundle.chain.width)


def describe_unused_head(bundle: Bundle) -> str:
    """Why rows are scored by another head than the checkpoint's own; empty if it has none."""
    if not bundle.labels:
        return ""
    return f"the checkpoint's own head isn't used, whose classes are {', '.join(bundle.labels)}"


def _in_order(task: Task, labels: tuple[str, ...]) -> Task | None:
    """The task in the order of labels; None if its classes aren't these, by name, word or number."""
    words = task.label_words
    named = {label.strip().lower(): place for place, label in enumerate(labels)}
    numbered = {str(place): place for place in range(len(labels))}
    if len(words) != len(labels) or len(named) != len(labels):
        return None
    ways = ((words, named), (words.values(), named), (words, numbered))
    for spelled, places in ways:
        found = [places.get(each.strip().lower()) for each in spelled]
        keys = dict(zip(found, words, strict=True))
        if None not in keys and len(keys) == len(labels):
            return replace(task, label_words={keys[n]: words[keys[n]] for n in range(len(labels))})
    return None
