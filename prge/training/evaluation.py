"""Evaluation of an adapter on examples: the loss and the metric of their task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from prge.data.forms.task import TEXT_METRICS, Task
from prge.data.metrics import accuracy, exact_match, macro_f1, perplexity, rouge_l, token_f1
from prge.engine import ForwardEngine
from prge.formats.adapter import Adapter
from prge.formats.curves import SCORES
from prge.objectives.classification_head import Head
from prge.objectives.examples import Example, LossNormalisation
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.objectives.preferences import Preference, lengths_of, liked_of, references_of
from prge.objectives.scoring import Scores, score

CUT_EXAMPLES = "cut_examples"
# Of the fall of rejected rows: more of it than this share is no side effect.
_SHARED = 0.25
METRIC_NAMES = (*SCORES, "margin", "chosen_change", "rejected_change", CUT_EXAMPLES)


def evaluate(
    engine: ForwardEngine,
    adapter: Adapter,
    examples: Sequence[Example],
    task: Task | None,
    *,
    head: Head | None = None,
    select: Literal["metric", "loss"] = "metric",
    objective: Objective = CROSS_ENTROPY,
    normalisation: LossNormalisation = "example",
    on_progress: Callable[[int], object] = lambda sequences: None,
) -> tuple[dict[str, Any], Scores]:
    """Score examples: a record with `loss`, the metric by its name, and `value`, where more is better.

    With the normalisation `token` the loss of completions is the mean over all their target tokens, and the
    perplexity its exponential.

    Without a task, and for completions, the metric is the perplexity per token. Preferences have several
    figures; their value is that of the loss, less the nats a token that the chosen answers fell.
    `cut_examples` is there if some examples are not whole.
    """
    scored = score(engine, adapter, examples, head, objective, on_progress=on_progress)
    record: dict[str, Any] = {"loss": scored.loss, "examples": len(examples)}
    if cut := sum(example.cut for example in examples):
        record[CUT_EXAMPLES] = cut
    if isinstance(objective, Preference):
        too_high = np.maximum(scored.losses, objective.sufficient_loss)
        value = -math.fsum(too_high) / len(examples) - _harm(scored, examples)
        return {**record, **preference_figures(objective, scored, examples), "value": value}, scored
    if task is None or examples[0].label is None:
        if normalisation == "token":
            record["loss"] = float((scored.losses * scored.tokens).sum() / scored.tokens.sum())
        lost = [-float(each[0]) for each in scored.scores]
        name, metric = "perplexity", perplexity(lost, scored.tokens.tolist())
        better = -metric
    else:
        name, metric = metric_of(task, examples, scored)
        better = metric
    record[name] = metric
    record["value"] = better if select == "metric" else -record["loss"]
    return record, scored


def preference_figures(
    objective: Preference, scored: Scores, examples: Sequence[Example]
) -> dict[str, float]:
    """What an adapter makes of answers that are preferred or not.

    Returns:
        `pairs_right`: share of pairs whose chosen answer has the higher reward; half where both have the
        same. Rated answers make pairs of each that is liked and each that isn't. `margin`: how much higher it
        is, a mean. `chosen_change`, `rejected_change`: means of how the log-probability of an answer changed
        since the start. Without what no answer tells.
    """
    scores = np.stack(scored.scores)[None]
    rewards = objective.rewards(scores, examples)[0]
    changes = (lengths_of(examples) * (scores - references_of(examples)))[0]
    if examples[0].liked is None:
        chosen, rejected = changes.T
        margins = rewards[:, 0] - rewards[:, 1]
    else:
        liked = liked_of(examples)
        chosen, rejected = changes[liked, 0], changes[~liked, 0]
        margins = rewards[liked, 0][:, None] - rewards[~liked, 0]
    found = {
        "pairs_right": (margins > 0) + 0.5 * (margins == 0),
        "margin": margins,
        "chosen_change": chosen,
        "rejected_change": rejected,
    }
    return {name: float(each.mean()) for name, each in found.items() if each.size}


def _harm(scored: Scores, examples: Sequence[Example]) -> float:
    """How much less likely the chosen answers became since the start, in nats a token; at least 0."""
    chosen = [
        values[0] - example.reference[0]
        for values, example in zip(scored.scores, examples, strict=True)
        if example.liked is not False
    ]
    return max(-float(np.mean(chosen)), 0.0) if chosen else 0.0


def displacement(figures: Mapping[str, Any]) -> str:
    """What to say of preferences that were learnt at the cost of what is chosen; empty if they weren't."""
    chosen, rejected = figures.get("chosen_change"), figures.get("rejected_change")
    if chosen is None or chosen >= 0:
        return ""
    fall = f"the log-probability of chosen development rows fell by {-chosen:.3g} since the start"
    if rejected is None or chosen > _SHARED * rejected:
        return f"{fall} (likelihood displacement)"
    return (
        f"{fall}, that of rejected ones by {-rejected:.3g}: the run only lowers what is rejected, and harms "
        "what is chosen; a larger --beta or a lower --learning-rate harms it less, --objective orpo learns it"
    )


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
