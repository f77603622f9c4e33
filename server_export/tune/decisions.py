"""What is decided, as pure functions of measured facts: a value, and why in a sentence."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prge.errors import ConfigError
from prge.files.signatures import DECODE, PREFILL, STACK
from prge.host.progress import duration
from prge.learning.costs import BYTES_OF_A_NUMBER, bytes_text, megabytes
from prge.learning.estimators.table import ESTIMATORS, EstimatorName
from prge.running.training_flags import TrainingFlags
from server_export.tune.rates import longest_search

# Above so many parameters weights in float32 take more memory than a phone's app should.
_SMALL_MODEL = 50_000_000
_LENGTH_STEP, _SHORTEST_LENGTH = 64, 64
# Rows that a run reads: so many times each, within these bounds. A step that came too late costs time alone:
# the best step on development rows is the result.
_EPOCHS, _FEWEST_READ, _MOST_READ, _MOST_EPOCHS = 3, 2_400, 24_000, 40
# Rows of a step where there are so many rows at least.
_BATCHES = ((1_000, 16), (200, 8), (40, 4), (10, 2))
_EVALUATIONS = 10
# Different rows of a class of which a tenth can be left out.
_FOLDED_ROWS = 10
# Tokens for each nat that a margin of 1 takes; and the usual beta, for answers of some hundred tokens.
_NATS, _LEAST_BETA = 10, 0.1
# The largest adapter, and the share of a limit that it may take.
ALL_LAYERS: Mapping[str, Any] = {"target_modules": ["all-linear"], "rank": 16, "adapter": "lora"}
_ADAPTER_SHARE = 1 / 4
# A loss that is below so much of another is lower by more than chance.
_CLEARLY = 0.98
# The share of a limit that an estimate may come up to: the run itself measures what it holds already.
_MARGIN = 0.95
# Sequences that a call computes as fast as more.
# The share of the time that is left that an estimate may come up to; and of all of it that training has.
_MARGIN_OF_TIME, _LEAST_SHARE = 0.95, 1 / 3
# Of the final run: with fewer steps those of a search differ in nothing but chance.
_FEWEST_SEARCHED = 24

# The grid of the search.
RATES = (1e-3, 3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class Decision:
    """A setting's value and why it has it."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True)
class Pace:
    """Seconds that a run takes."""

    start: float
    """Until its first step, and after the last one."""
    step: float
    evaluation: float
    """Of development rows, once."""


@dataclass(frozen=True)
class RowFacts:
    """What was measured of training rows as a run takes them: those that are too long are several."""

    rows: int
    longest: int
    """Tokens of the longest."""
    tokens: int
    """Of all."""
    widest: int
    """Sequences of the row that has most of them."""
    targets: int = 0
    """Target tokens."""
    unknown: int = 0
    """Of these, how many the tokenizer can't spell."""
    fewest: int | None = None
    """Of an encoder's rows: how many different ones the smallest class has."""
    objective: str = "completion"
    """What is learnt of them."""


def scheme(parameters: int) -> Decision:
    """How frozen weights are kept."""
    size = bytes_text(4 * parameters)
    if parameters < _SMALL_MODEL:
        return Decision("quantize", "fp32", f"the weights take {size} in float32")
    return Decision("quantize", "8da4w", f"the weights would take {size} in float32, an eighth in int4")


def sequence_length(
    row: int, positions: int | None, needed: Callable[[int], int] = lambda length: 0, free: int = 0
) -> Decision:
    """Most tokens of a row, for the longest one.

    Args:
        row: tokens of the longest.
        positions: of the model; None: any number.
        needed: bytes of a step on one row of so many tokens.
        free: what it may take.
    """
    value = max(-(-row // _LENGTH_STEP) * _LENGTH_STEP, _SHORTEST_LENGTH)
    why = f"the longest row has {row:,} tokens"
    if positions is not None and value > positions:
        value, why = positions, f"{why}, the model has {positions} positions"
    else:
        why += "; a row costs its own length"
    most = value
    while value > _SHORTEST_LENGTH and needed(value) > free:
        value = max(value // 2 // _LENGTH_STEP * _LENGTH_STEP, _SHORTEST_LENGTH)
    if value < most:
        why += (
            f"; a step on {most:,} would take {bytes_text(needed(most))}, on {value:,} "
            f"{bytes_text(needed(value))} of the {bytes_text(free)} that it may have"
        )
    return Decision("sequence_length", value, why)


def chat_template(has_template: bool) -> Decision | None:
    """How messages become text; None: by the tokenizer's own template."""
    if has_template:
        return None
    return Decision("chat_template", "plain", "the rows are messages, and the tokenizer has no chat template")


def prepend_bos(name: str, without: float, begun: float) -> Decision:
    """Whether texts begin with the begin-of-sequence token, by the frozen model's losses of target tokens."""
    losses = f"the frozen model's loss of target tokens is {begun:.4g} after {name}, {without:.4g} without"
    return Decision("prepend_bos", "always" if begun < _CLEARLY * without else "never", losses)


def adapted(
    estimator: EstimatorName | None, is_encoder: bool, numbers: int | None, free: int
) -> list[Decision]:
    """Which layers, at which rank, what of them is trained, where `lora_a` comes from.

    Args:
        estimator: the user's; None: exact.
        is_encoder: whether the model is one, of whose few rows both matrices learn too much.
        numbers: that both matrices of all linear layers have; None: not all of these can have an adapter.
        free: most bytes of the run's process.
    """
    if estimator not in (None, "exact"):
        return _of_queries("random", "random directions learn less of more numbers")
    if numbers is None:
        return _of_queries("eva", "not all linear layers can have an adapter")
    taken = BYTES_OF_A_NUMBER * numbers
    if taken > _ADAPTER_SHARE * free:
        why = (
            f"all linear layers would take {bytes_text(taken)} of the {bytes_text(free)} that a run may have"
        )
        return _of_queries("eva", why)
    why = "with exact gradients all linear layers learn more than some"
    values = {**ALL_LAYERS, "adapter": "lora-fa" if is_encoder else "lora", "init": "random"}
    return [Decision(name, value, why) for name, value in values.items()]


def _of_queries(init: str, why: str) -> list[Decision]:
    """PEFT's usual layers: queries and values."""
    values = {"rank": 8, "adapter": "lora-fa", "init": init}
    return [Decision(name, value, why) for name, value in values.items()]


def roles(estimator: EstimatorName | None, writes_texts: bool) -> Decision:
    """Roles of the exported programs: those that the tuning runs, since each takes its time to export.

    Args:
        estimator: the user's; None: exact.
        writes_texts: whether the model learns to write, so that samples of its texts are taken.
    """
    needed = (STACK, ESTIMATORS[estimator or "exact"].role, *((PREFILL, DECODE) if writes_texts else ()))
    why = "steps, scores and samples of texts" if writes_texts else "steps and scores"
    return Decision("roles", list(dict.fromkeys(needed)), f"{why} need them; --roles exports others")


def memory(free: int) -> Decision:
    """Most bytes of a run's process on a phone that has so many free."""
    return Decision("memory", free // 2, f"half of the {bytes_text(free)} that the phone has free")


def batch_size(facts: RowFacts) -> Decision:
    """Rows of a step."""
    value = next((size for least, size in _BATCHES if facts.rows >= least), 1)
    return Decision("batch_size", value, f"there are {facts.rows:,} training rows")


def head_folds(facts: RowFacts) -> Decision | None:
    """Heads that score rows which they were not fitted on; None: as many as usual, or no encoder."""
    if facts.fewest is None or facts.fewest >= _FOLDED_ROWS:
        return None
    why = f"the smallest class has {facts.fewest} different rows, too few to leave some out"
    return Decision("head_folds", 0, why)


def beta(facts: RowFacts) -> Decision | None:
    """How closely preferences hold to the start; None: as usual, or none are learnt.

    A pair is right with a probability of nine tenths at a margin of 2, which is 2 / beta nats of the answers.
    """
    if facts.objective not in ("dpo", "kto"):
        return None
    tokens = facts.targets / (facts.rows * facts.widest)
    value = float(f"{min(max(_NATS * 2 / tokens, _LEAST_BETA), 1.0):.2g}")
    return Decision("beta", value, f"answers have {tokens:.3g} tokens on average")


def steps(facts: RowFacts, batch: int, epochs: float | None = None) -> Decision:
    """Steps of the final run; `epochs` are the user's."""
    read: float = min(max(_EPOCHS * facts.rows, _FEWEST_READ), _MOST_READ, _MOST_EPOCHS * facts.rows)
    if epochs is not None:
        read = epochs * facts.rows
    count = max(math.ceil(read / batch), 1)
    return Decision(
        "steps", count, f"{count * batch / facts.rows:.3g} epochs of {facts.rows:,} rows, {batch} a step"
    )


def pace(taken: Sequence[float], heads: float, evaluation: float, whole: float) -> Pace:
    """What a run takes, by one of a few steps.

    Args:
        taken: seconds of the run after each of its steps.
        heads: what fitting an encoder's heads took of the first; other runs take them.
        evaluation: of the one at its end, as other runs have one at their start too.
        whole: from the start of its process to its end.
    """
    later = len(taken) - 1
    step = (taken[-1] - taken[0]) / later if later else max(taken[0] - heads, 0.0)
    return Pace(max(whole - heads - evaluation - len(taken) * step, 0.0), step, evaluation)


def training_seconds(count: int, pace: Pace, searched: bool) -> float:
    """How long a final run of so many steps takes, with the search before it if there is one."""
    runs = longest_search(len(RATES), count) if searched else []
    seconds = sum(pace.start + steps * pace.step + 2 * pace.evaluation for steps in runs)
    return seconds + pace.start + count * pace.step + (_EVALUATIONS + 1) * pace.evaluation


def steps_in(minutes: float, spent: float, pace: Pace, most: Decision, searched: bool) -> list[Decision]:
    """Steps of the final run in the time that is left, and a rate where that is too little to search one.

    Search and training have a third of the minutes at least: an export may take longer than all of them.

    Args:
        minutes: for all of it, as the user gave them.
        spent: seconds that the rest takes: what was before, and what comes after the final run.
        pace: of runs.
        most: what the rows ask for.
        searched: whether the learning rate is to be searched.
    """
    left = max(60 * minutes - spent, 60 * minutes * _LEAST_SHARE)
    room = _MARGIN_OF_TIME * left
    counts = range(1, most.value + 1)

    def fitting(searched: bool) -> int:
        return bisect_right(counts, room, key=lambda count: training_seconds(count, pace, searched))

    rest = "take a third" if spent + left > 60 * minutes else f"have {duration(left)} left"
    told = f"search and training {rest} of {minutes:g} minutes, at {pace.step:.3g} s a step"
    count = fitting(searched)
    if count >= most.value:
        return [most]
    if not searched or count >= _FEWEST_SEARCHED:
        return [Decision("steps", max(count, 1), told)]
    return [
        Decision("steps", max(fitting(searched=False), 1), told),
        Decision(
            "learning_rate", TrainingFlags.learning_rate, f"{minutes:g} minutes leave no time to search one"
        ),
    ]


def evaluate_every(count: int) -> int:
    """Steps between evaluations."""
    return math.ceil(count / _EVALUATIONS)


def within_memory(batch: Decision, limit: int, needed: Callable[[int], int]) -> Decision:
    """Examples of a step whose memory has a bound: as many as wanted, or a half, a quarter, ... of them.

    Args:
        batch: what is wanted.
        limit: most bytes of the run's process.
        needed: bytes that it takes with so many examples in a step.

    Raises:
        ConfigError: one is too many.
    """
    count = int(batch.value)
    while count >= 1:
        if (taken := needed(count)) <= _MARGIN * limit:
            bound = f"; --memory is {megabytes(limit)}, about {megabytes(taken)} are taken"
            return Decision("batch_size", count, batch.why + bound)
        count //= 2
    least = math.ceil(needed(1) / _MARGIN / 1e6) * 10**6
    raise ConfigError(
        f"--memory {megabytes(limit)} is too little:",
        [f"a run of this model needs at least {megabytes(least)}"],
        remedy="give more, take --quantize 8da4w, a smaller --sequence-length, or --adapt-layers top:k",
        code="memory-too-little",
    )


def best_rate(trials: Sequence[tuple[float, int, float]]) -> Decision:
    """The learning rate of the best trial of the longest ones.

    Args:
        trials: rate, steps and loss of development rows, infinite where the run diverged.

    Raises:
        ConfigError: all diverged.
    """
    longest = max(steps for _, steps, _ in trials)
    finals = sorted((loss, rate) for rate, steps, loss in trials if steps == longest)
    loss, rate = finals[0]
    if not math.isfinite(loss):
        raise ConfigError(
            "no learning rate was found:",
            [f"all runs diverged: {', '.join(f'{rate:g}' for _, rate in finals)}"],
            remedy="look at the rows, or give a --learning-rate",
            code="all-rates-diverged",
        )
    others = ", ".join(f"{each:.4g} with {rate:g}" for each, rate in finals[1:])
    return Decision("learning_rate", rate, f"loss {loss:.4g} after {longest} steps; {others}".rstrip("; "))


def shorter(trials: Sequence[tuple[float, int, float]], best: float | None, count: int) -> list[Decision]:
    """Rate and steps of a second final run, where the first came to less than a run of the search.

    With few rows a rate that is best for a short run may be too high for a long one.

    Args:
        trials: rate, steps and loss of development rows of the search.
        best: loss of development rows at the best step of the final run; None: it has none.
        count: steps of the final run.

    Returns:
        Nothing where the final run is the best of all.
    """
    if not trials or best is None:
        return []
    rate, steps, loss = min(trials, key=lambda trial: trial[2])
    if not loss < best:
        return []
    told = f"loss {loss:.4g} after {steps} steps with {rate:g}, at best {best:.4g} in {count} steps"
    return [Decision("learning_rate", rate, told), Decision("steps", steps, told)]
