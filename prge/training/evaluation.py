"""Evaluation of an adapter on examples: the loss and the metrics."""

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
from prge.training.estimators.rollouts import REWARD_FACTS

CUT_EXAMPLES = "cut_examples"
# If the chosen answers' log-probability falls by more than this share of the rejected ones' fall, it is
# reported as harm and not as a side effect.
_SIDE_EFFECT_SHARE = 0.25
METRIC_NAMES = (
    *SCORES,
    *("margin", "chosen_change", "rejected_change"),
    *(name for name in REWARD_FACTS if name not in SCORES),
    CUT_EXAMPLES,
)


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
    """Evaluate an adapter on examples.

    Without a task, and for completions, the metric is the perplexity per token. Preferences have several
    metrics, see `preference_figures`; their `value` is the negative loss (lower losses than
    `sufficient_loss` count as that), minus the decrease of the chosen answers' log-probability in nats per
    token.

    Args:
        engine: computes the outputs.
        adapter: the adapter to evaluate.
        examples: at least one example.
        task: the task of the examples; None for texts, completions, chats and preferences.
        head: the classification head of an encoder.
        select: whether `value` is the metric or the negative loss.
        objective: the loss as a function of scores.
        normalisation: `token`: the loss of completions is the mean over all target tokens, and the perplexity
            is its exponential.
        on_progress: called with the number of sequences computed so far.

    Returns:
        A record with `loss`, `examples`, the metrics by name, `value` (higher is better), and `cut_examples`
        if some examples were truncated; and the scores of the examples.
    """
    scored = score(engine, adapter, examples, head, objective, on_progress=on_progress)
    record: dict[str, Any] = {"loss": scored.loss, "examples": len(examples)}
    if cut := sum(example.cut for example in examples):
        record[CUT_EXAMPLES] = cut
    if isinstance(objective, Preference):
        bounded_losses = np.maximum(scored.losses, objective.sufficient_loss)
        value = -math.fsum(bounded_losses) / len(examples) - _harm(scored, examples)
        return {**record, **preference_figures(objective, scored, examples), "value": value}, scored
    if task is None or examples[0].label is None:
        if normalisation == "token":
            record["loss"] = float((scored.losses * scored.tokens).sum() / scored.tokens.sum())
        losses = [-float(scores[0]) for scores in scored.scores]
        name, metric = "perplexity", perplexity(losses, scored.tokens.tolist())
        metric_value = -metric
    else:
        name, metric = metric_of(task, examples, scored)
        metric_value = metric
    record[name] = metric
    record["value"] = metric_value if select == "metric" else -record["loss"]
    return record, scored


def preference_figures(
    objective: Preference, scored: Scores, examples: Sequence[Example]
) -> dict[str, float]:
    """Compute the metrics of preferences.

    Rated answers are compared in all pairs of a liked and a disliked answer.

    Returns:
        `pairs_right`: share of pairs whose chosen answer has the higher reward; equal rewards count half.
        `margin`: mean difference between the rewards of the chosen and the rejected answer.
        `chosen_change`, `rejected_change`: mean change of an answer's log-probability since the start of the
            run.
        A metric without answers to compute it from is left out.
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
    values = {
        "pairs_right": (margins > 0) + 0.5 * (margins == 0),
        "margin": margins,
        "chosen_change": chosen,
        "rejected_change": rejected,
    }
    return {name: float(each.mean()) for name, each in values.items() if each.size}


def _harm(scored: Scores, examples: Sequence[Example]) -> float:
    """Return the mean decrease of the chosen answers' log-probability, in nats per token; at least 0."""
    changes = [
        values[0] - example.reference[0]
        for values, example in zip(scored.scores, examples, strict=True)
        if example.liked is not False
    ]
    return max(-float(np.mean(changes)), 0.0) if changes else 0.0


def displacement_warning(figures: Mapping[str, Any]) -> str:
    """Return a warning if chosen answers became less likely (likelihood displacement), or ""."""
    chosen, rejected = figures.get("chosen_change"), figures.get("rejected_change")
    if chosen is None or chosen >= 0:
        return ""
    fall = f"the log-probability of chosen development rows fell by {-chosen:.3g} since the start"
    if rejected is None or chosen > _SIDE_EFFECT_SHARE * rejected:
        return f"{fall} (likelihood displacement)"
    return (
        f"{fall}, that of rejected ones by {-rejected:.3g}: the run only lowers what is rejected, and harms "
        "what is chosen; a larger --beta or a lower --learning-rate harms it less, --objective orpo learns it"
    )


def metric_of(task: Task, examples: Sequence[Example], scored: Scores) -> tuple[str, float]:
    """Return the name and the value of the task's metric for scored candidates."""
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
    """Return the mean text metrics by name, each text compared with its best matching answer.

    Exact match and F1 of shared words, the two metrics of SQuAD, are always computed together.
    """
    measures = (
        {"rouge_l": rouge_l} if task.metric == "rouge_l" else {"exact_match": exact_match, "f1": token_f1}
    )
    pairs = [(text, example.answers) for text, example in zip(texts, examples, strict=True)]
    return {name: sum(measure(*pair) for pair in pairs) / len(pairs) for name, measure in measures.items()}
