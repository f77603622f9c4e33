"""Decisions of a tuning as pure functions of measured facts: a value, and its reason in a sentence."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prge.errors import ConfigError
from prge.formats.signatures import DECODE, FORWARD, PREFILL
from prge.system.progress import format_duration
from prge.training.costs import BYTES_PER_TRAINED_VALUE, format_bytes, format_megabytes
from prge.training.estimators.table import ESTIMATORS, EstimatorName
from prge.training.settings import TrainingFlags
from server_export.tune.rates import longest_search

# With more parameters, float32 weights take more memory than an app on a phone should.
_SMALL_MODEL = 50_000_000
_LENGTH_STEP, _SHORTEST_LENGTH = 64, 64
# Epochs of a run, and bounds on the number of rows that it reads. Too many steps cost only time, since the
# best step on development rows is the result.
_EPOCHS, _MIN_READ, _MAX_READ, _MAX_EPOCHS = 3, 2_400, 24_000, 40
# The same bounds for prompts of a reward, each of which costs several completions.
_PROMPTS_READ = 800, 4_000
# Batch sizes by the minimum number of training rows that they need.
_BATCHES = ((1_000, 16), (200, 8), (40, 4), (10, 2))
_EVALUATIONS = 10
# Number of different rows of a class that is needed to hold out a tenth of them.
_FOLDED_ROWS = 10
# Number of completion tokens for each nat of a margin; and the usual beta, for completions of hundreds of
# tokens.
_TOKENS_PER_NAT, _MIN_BETA = 10, 0.1
# The largest adapter, and the share of the memory limit that its values may take.
ALL_LAYERS: Mapping[str, Any] = {"target_modules": ["all-linear"], "rank": 16, "adapter": "lora"}
_ADAPTER_SHARE = 1 / 4
# A loss below this share of another loss is lower by more than chance.
_CLEAR_GAIN = 0.98
# Losses that differ by less than this share are equal.
_LEAST_GAIN = 1e-5
# Largest share of a memory limit that an estimate may take.
_MARGIN = 0.95
# Largest share of the remaining time that an estimate may take; and the smallest share of all time for
# training.
_MARGIN_OF_TIME, _MIN_SHARE = 0.95, 1 / 3
# Minimum number of steps of a final run with a search: losses of shorter search runs differ only by chance.
_MIN_SEARCHED = 24

# The grid of the search.
RATES = (1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Decision:
    """The value of a setting and the reason for it."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True)
class Pace:
    """Durations of a run's parts, in seconds."""

    start: float
    """Time before the first step and after the last one."""
    step: float
    """Time of a step."""
    evaluation: float
    """Time of one evaluation of the development rows."""


@dataclass(frozen=True)
class RowFacts:
    """Measurements of the training examples of a run; a row that is too long becomes several examples."""

    rows: int
    """Number of examples."""
    longest: int
    """Number of tokens of the longest sequence."""
    tokens: int
    """Number of all tokens."""
    widest: int
    """Maximum number of sequences of an example."""
    targets: int = 0
    """Number of target tokens."""
    unknown: int = 0
    """Number of target tokens that are unknown tokens of the tokenizer."""
    fewest: int | None = None
    """Number of different rows of the smallest class; None: the model isn't an encoder."""
    objective: str = "completion"
    """Objective of the training."""
    completed: bool = False
    """Whether rows are prompts of a reward, each of which is completed several times."""


def scheme(parameters: int) -> Decision:
    """Choose the quantization of the frozen weights."""
    size = format_bytes(4 * parameters)
    if parameters < _SMALL_MODEL:
        return Decision("quantize", "fp32", f"the weights take {size} in float32")
    return Decision("quantize", "8da4w", f"the weights would take {size} in float32, an eighth in int4")


def sequence_length(
    row: int, positions: int | None, needed: Callable[[int], int] = lambda length: 0, free: int = 0
) -> Decision:
    """Choose the maximum number of tokens of a row.

    Args:
        row: number of tokens of the longest row.
        positions: number of positions of the model; None: unlimited.
        needed: returns the bytes of memory that a step on one row needs, for a number of tokens.
        free: bytes of memory that a step may use.
    """
    value = max(-(-row // _LENGTH_STEP) * _LENGTH_STEP, _SHORTEST_LENGTH)
    why = f"the longest row has {row:,} tokens"
    if positions is not None and value > positions:
        value, why = positions, f"{why}, the model has {positions} positions"
    else:
        why += "; shorter rows cost only their own length"
    most = value
    while value > _SHORTEST_LENGTH and needed(value) > free:
        value = max(value // 2 // _LENGTH_STEP * _LENGTH_STEP, _SHORTEST_LENGTH)
    if value < most:
        why += (
            f"; a step on {most:,} would take {format_bytes(needed(most))}, on {value:,} "
            f"{format_bytes(needed(value))} of the {format_bytes(free)} that it may use"
        )
    return Decision("sequence_length", value, why)


def chat_template(has_template: bool) -> Decision | None:
    """Choose a chat template; None if the tokenizer has its own."""
    if has_template:
        return None
    return Decision("chat_template", "plain", "the rows are messages, and the tokenizer has no chat template")


def prepend_bos(name: str, without: float, begun: float) -> Decision:
    """Choose whether texts begin with the begin-of-sequence token.

    Args:
        name: the token.
        without: loss of the target tokens by the frozen model, without the token.
        begun: loss of the same target tokens with the token at the beginning of texts.
    """
    losses = f"the frozen model's loss of target tokens is {begun:.4g} after {name}, {without:.4g} without"
    return Decision("prepend_bos", "always" if begun < _CLEAR_GAIN * without else "never", losses)


def adapted(
    estimator: EstimatorName | None, is_encoder: bool, numel: int | None, free: int
) -> list[Decision]:
    """Choose target modules, rank, type and initialization of the adapter.

    Args:
        estimator: estimator that the user chose; None: exact.
        is_encoder: whether the model is an encoder, which overfits its few rows if both matrices are trained.
        numel: number of values of both matrices in all linear layers; None: some of these layers can't have
            an adapter.
        free: bytes of memory that the process of a run may use.
    """
    if estimator not in (None, "exact"):
        return _small_adapter("random", "random directions learn less with more parameters")
    if numel is None:
        return _small_adapter("eva", "not all linear layers can have an adapter")
    adapter_bytes = BYTES_PER_TRAINED_VALUE * numel
    if adapter_bytes > _ADAPTER_SHARE * free:
        why = f"all linear layers would take {format_bytes(adapter_bytes)} of a run's {format_bytes(free)}"
        return _small_adapter("eva", why)
    why = "with exact gradients, adapting all linear layers learns more than adapting some"
    values = {**ALL_LAYERS, "adapter": "lora-fa" if is_encoder else "lora", "init": "random"}
    return [Decision(name, value, why) for name, value in values.items()]


def _small_adapter(init: str, why: str) -> list[Decision]:
    """Choose a small adapter of PEFT's default layers, which are queries and values."""
    values = {"rank": 8, "adapter": "lora-fa", "init": init}
    return [Decision(name, value, why) for name, value in values.items()]


def roles(estimator: EstimatorName | None, generates: bool) -> Decision:
    """Choose the roles of the exported programs: only those that the tuning needs, since each takes time.

    Args:
        estimator: estimator that the user chose; None: exact.
        generates: whether the model learns to generate text, so that completions are sampled.
    """
    needed = (FORWARD, ESTIMATORS[estimator or "exact"].role, *((PREFILL, DECODE) if generates else ()))
    why = "steps, scores and sampled completions" if generates else "steps and scores"
    return Decision("roles", list(dict.fromkeys(needed)), f"{why} need them; --roles exports others")


def memory(free: int) -> Decision:
    """Choose the memory limit of a run on a phone, from the phone's free bytes."""
    return Decision("memory", free // 2, f"half of the {format_bytes(free)} that the phone has free")


def batch_size(facts: RowFacts) -> Decision:
    """Choose the batch size."""
    value = next((size for least, size in _BATCHES if facts.rows >= least), 1)
    return Decision("batch_size", value, f"there are {facts.rows:,} training rows")


def head_folds(facts: RowFacts) -> Decision | None:
    """Choose the number of folds of an encoder's heads; None: the default, or the model isn't an encoder."""
    if facts.fewest is None or facts.fewest >= _FOLDED_ROWS:
        return None
    why = f"the smallest class has {facts.fewest} different rows, too few to hold some out"
    return Decision("head_folds", 0, why)


def beta(facts: RowFacts) -> Decision | None:
    """Choose beta of a preference objective; None for other objectives.

    A margin of 2 means a probability of 0.9 that a pair is ranked correctly. It corresponds to 2 / beta nats
    of the completions, so that shorter completions need a larger beta.
    """
    if facts.objective not in ("dpo", "kto"):
        return None
    tokens = facts.targets / (facts.rows * facts.widest)
    value = float(f"{min(max(_TOKENS_PER_NAT * 2 / tokens, _MIN_BETA), 1.0):.2g}")
    return Decision("beta", value, f"completions have {tokens:.3g} tokens on average")


def steps(facts: RowFacts, batch: int, epochs: float | None = None, repeats: int = 1) -> Decision:
    """Choose the steps of the final run.

    Args:
        facts: the training rows.
        batch: examples of a step.
        epochs: the user's choice, if there is one.
        repeats: consecutive steps with the same examples.
    """
    least, most = _PROMPTS_READ if facts.completed else (_MIN_READ, _MAX_READ)
    read: float = min(max(_EPOCHS * facts.rows, least), most, _MAX_EPOCHS * facts.rows)
    if epochs is not None:
        read = epochs * facts.rows
    count = max(math.ceil(read / batch), 1)
    again = f", each for {repeats} steps" if repeats > 1 else ""
    epochs = count * batch / facts.rows
    return Decision(
        "steps", count * repeats, f"{epochs:.3g} epochs of {facts.rows:,} rows, {batch} per step{again}"
    )


def pace(elapsed: Sequence[float], heads: float, evaluation: float, whole: float) -> Pace:
    """Compute durations of a run's parts from a measured run of a few steps.

    Args:
        elapsed: seconds since the start of the run, after each of its steps.
        heads: seconds that fitting an encoder's heads took before the first step; other runs reuse these
            heads.
        evaluation: seconds of the run's only evaluation, at its end.
        whole: seconds from the start of the run's process to its end.
    """
    later = len(elapsed) - 1
    step = (elapsed[-1] - elapsed[0]) / later if later else max(elapsed[0] - heads, 0.0)
    return Pace(max(whole - heads - evaluation - len(elapsed) * step, 0.0), step, evaluation)


def training_seconds(count: int, pace: Pace, searched: bool, with_epsilons: bool = False) -> float:
    """Return the seconds of a final run of `count` steps, with the search before it if `searched`.

    `with_epsilons` means that the size of perturbations is searched too.
    """
    runs = longest_search(len(RATES), count, with_epsilons) if searched else []
    seconds = sum(pace.start + steps * pace.step + 2 * pace.evaluation for steps in runs)
    return seconds + pace.start + count * pace.step + (_EVALUATIONS + 1) * pace.evaluation


def steps_in(
    minutes: float,
    spent: float,
    pace: Pace,
    unlimited: Decision,
    searched: bool,
    with_epsilons: bool = False,
) -> list[Decision]:
    """Choose the steps of the final run for a time limit, and a learning rate if the search takes too long.

    Search and training get at least a third of the minutes, even if the export took longer.

    Args:
        minutes: the user's time limit for the whole tuning.
        spent: seconds of everything else: before training, and after the final run.
        pace: durations of a run's parts.
        unlimited: the steps without a time limit.
        searched: whether the learning rate is searched.
        with_epsilons: whether the size of perturbations is searched with it.
    """
    left = max(60 * minutes - spent, 60 * minutes * _MIN_SHARE)
    room = _MARGIN_OF_TIME * left
    counts = range(1, unlimited.value + 1)

    def fitting(searched: bool) -> int:
        return bisect_right(
            counts, room, key=lambda count: training_seconds(count, pace, searched, with_epsilons)
        )

    rest = "take a third" if spent + left > 60 * minutes else f"have {format_duration(left)} left"
    why = f"search and training {rest} of {minutes:g} minutes, at {pace.step:.3g} s per step"
    count = fitting(searched)
    if count >= unlimited.value:
        return [unlimited]
    if not searched or count >= _MIN_SEARCHED:
        return [Decision("steps", max(count, 1), why)]
    return [
        Decision("steps", max(fitting(searched=False), 1), why),
        Decision(
            "learning_rate", TrainingFlags.learning_rate, f"{minutes:g} minutes leave no time to search one"
        ),
    ]


def eval_steps(count: int) -> int:
    """Return the number of steps between evaluations."""
    return math.ceil(count / _EVALUATIONS)


def within_memory(batch: Decision, limit: int, needed: Callable[[int], int]) -> Decision:
    """Halve the batch size until a step fits into a memory limit.

    Args:
        batch: the batch size without a limit.
        limit: bytes of memory that the process of a run may use.
        needed: returns the bytes that it needs for a batch size.

    Raises:
        ConfigError: a single example doesn't fit.
    """
    count = int(batch.value)
    while count >= 1:
        if (used := needed(count)) <= _MARGIN * limit:
            bound = f"; --memory is {format_megabytes(limit)}, about {format_megabytes(used)} are used"
            return Decision("batch_size", count, batch.why + bound)
        count //= 2
    least = math.ceil(needed(1) / _MARGIN / 1e6) * 10**6
    raise ConfigError(
        f"--memory {format_megabytes(limit)} is too little:",
        [f"a run of this model needs at least {format_megabytes(least)}"],
        remedy="Give more, or use --quantize 8da4w, a smaller --sequence-length, or --adapt-layers top:k.",
        code="memory-too-little",
    )


def figure(loss: float, is_reward: bool) -> str:
    """Format a loss of development rows, which is a negative reward if `is_reward`."""
    return f"reward {0.0 - loss:.4g}" if is_reward else f"loss {loss:.4g}"


def best_rate(trials: Sequence[tuple[float, int, float]], is_reward: bool = False) -> Decision:
    """Choose the learning rate with the lowest loss among the longest trials.

    Args:
        trials: learning rate, steps and loss of development rows of each run; the loss of a run that diverged
            is infinite.
        is_reward: whether losses are negative rewards.

    Raises:
        ConfigError: all of these runs diverged.
    """
    longest = max(steps for _, steps, _ in trials)
    finals = sorted((loss, rate) for rate, steps, loss in trials if steps == longest)
    loss, rate = finals[0]
    if not math.isfinite(loss):
        raise ConfigError(
            "The search found no learning rate:",
            [f"all runs diverged: {', '.join(f'{rate:g}' for _, rate in finals)}"],
            remedy="Check the rows, or give a --learning-rate.",
            code="all-rates-diverged",
        )
    others = ", ".join(
        f"{0.0 - other if is_reward else other:.4g} with {other_rate:g}" for other, other_rate in finals[1:]
    )
    why = f"{figure(loss, is_reward)} after {longest} steps; {others}"
    return Decision("learning_rate", rate, why.rstrip("; "))


def best_epsilon(losses: Mapping[float, float]) -> Decision:
    """Choose the size of perturbations with the highest reward.

    Args:
        losses: negative reward of development prompts by size, infinite if the run diverged.
    """
    ordered = sorted(losses, key=lambda epsilon: (losses[epsilon], epsilon))
    rewards = ", ".join(f"{0.0 - losses[epsilon]:.4g} with {epsilon:g}" for epsilon in ordered)
    return Decision("epsilon", ordered[0], f"rewards of development prompts: {rewards}")


def shorter(
    trials: Sequence[tuple[float, int, float]], best: float | None, count: int, is_reward: bool = False
) -> list[Decision]:
    """Choose learning rate and steps of a second final run if a run of the search was better than the first.

    With few rows, the best learning rate of a short run may be too high for a long one.

    Args:
        trials: learning rate, steps and loss of development rows of each run of the search.
        best: loss of development rows at the best step of the final run; None: there is none.
        count: steps of the final run.
        is_reward: whether losses are negative rewards.

    Returns:
        The decisions; empty if the final run was the best.
    """
    if not trials or best is None:
        return []
    rate, steps, loss = min(trials, key=lambda trial: trial[2])
    if not loss < best - _LEAST_GAIN * abs(best):
        return []
    shown = f"{0.0 - best if is_reward else best:.4g}"
    why = f"{figure(loss, is_reward)} after {steps} steps with {rate:g}, at best {shown} in {count} steps"
    return [Decision("learning_rate", rate, why), Decision("steps", steps, why)]
