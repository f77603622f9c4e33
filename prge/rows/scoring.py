"""Evaluation of an adapter on examples: the loss and the metric of their task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from prge.engine import Answering
from prge.files.adapter import Adapter
from prge.files.curves import SCORES
from prge.learning.evaluation import Scores, score
from prge.learning.examples import Example
from prge.learning.head import Head
from prge.rows.task import TEXT_METRICS, Task
from prge.rows.text_metrics import accuracy, exact_match, macro_f1, perplexity, rouge_l, token_f1

CUT_EXAMPLES = "cut_examples"
METRIC_NAMES = (*SCORES, CUT_EXAMPLES)


def evaluate(
    engine: Answering,
    adapter: Adapter,
    examples: Sequence[Example],
    task: Task | None,
    head: Head | None = None,
    pad: int = 0,
    select: Literal["metric", "loss"] = "metric",
) -> tuple[dict[str, Any], Scores]:
    """Score examples: a record with `loss`, the metric by its name, and `value`, where more is better.

    Without a task, and for completions, the metric is the perplexity per token. `cut_examples` is there if
    some examples are not whole.
    """
    scored = score(engine, adapter, examples, head, pad)
    record: dict[str, Any] = {"loss": scored.loss, "examples": len(examples)}
    if cut := sum(example.cut for example in examples):
        record[CUT_EXAMPLES] = cut
    if task is None or examples[0].label is None:
        name, metric = "perplexity", perplexity(scored.losses.tolist(), scored.tokens.tolist())
        better = -metric
    else:
        name, metric = metric_of(task, examples, scored)
        better = metric
    record[name] = metric
    record["value"] = better if select == "metric" else -scored.loss
    return record, scored


def metric_of(task: Task, examples: Sequence[Example], scored: Scores) -> tuple[str, float]:
    """Name and value of the task's metric over scored candidates."""
    predictions = scored.predictions.tolist()
    if task.metric in TEXT_METRICS:
        texts = [example.choices[choice] for example, choice in zip(examples, predictions, strict=True)]
        name = "f1" if task.metric == "f1_answer" else task.metric
        return name, text_metrics(task, texts, examples)[name]
    labels = [example.label for example in examples]
    if task.metric == "f1":
        return "f1", macro_f1(predictions, labels)
    if "answers" in task.columns:
        # Several candidates may be right, such as two names of one person.
        chosen = [e.choices[choice] in e.answers for e, choice in zip(examples, predictions, strict=True)]
        return "accuracy", accuracy(chosen, [True] * len(chosen))
    return "accuracy", accuracy(predictions, labels)


def text_metrics(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> dict[str, float]:
    """Means of the task's metrics of each text with the best of its example's answers, by their names.

    SQuAD's two, exact match and F1 of shared words, go together.
    """
    measures = (
        {"rouge_l": rouge_l} if task.metric == "rouge_l" else {"exact_match": exact_match, "f1": token_f1}
    )
    pairs = [(text, example.answers) for text, example in zip(texts, examples, strict=True)]
    return {name: sum(measure(*pair) for pair in pairs) / len(pairs) for name, measure in measures.items()}
