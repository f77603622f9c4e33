"""Losses of rows that say what is preferred: pairs of a chosen and a rejected answer, and rated answers.

    pair      candidate 0 is the chosen answer, 1 the rejected one
    rating    candidate 0 is the answer, 1 one of another row: how far the model went from its start

    scores, reference -> rewards [copies, examples, 2] -> losses, slopes

Scores are means over tokens (examples.py); a sum is a mean times the tokens. The reference of an example are
the scores by the adapter that the run begins with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from prge.engine import Float64Array
from prge.errors import ConfigError
from prge.learning.examples import Example, LossNormalisation
from prge.learning.objectives import CROSS_ENTROPY, Objective

ObjectiveName = Literal["auto", "completion", "candidates", "dpo", "ipo", "simpo", "orpo", "kto"]
# What rows without a task hold: texts or completions, pairs, or ratings.
Preferring = Literal["", "pairs", "ratings"]
_SIDES = np.array([1.0, -1.0])
# The odds of a mean log-probability nearer to 0 are noise of float32.
_NEAREST_TO_CERTAIN = -1e-6
# Of a pair whose chosen answer is the better one with a probability of nine tenths.
_SURE = -math.log(0.9)


@dataclass(frozen=True)
class Preference(ABC):
    """Implements Objective by rewards of answers.

    `compares` says if rewards need a reference. A development pair whose loss is below `enough` is right:
    what lowers it further takes the model away from its start, and decides only between steps that are equal
    otherwise.
    """

    beta: float
    compares: ClassVar[bool] = True
    enough: ClassVar[float] = 0.0
    is_separate: ClassVar[bool] = True

    def rewards(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """What each answer is worth, f64 in the shape of the scores; with a reference, what it gained.

        Raises:
            ValueError: an example lacks its reference.
        """
        gained = scores - references_of(examples) if self.compares else scores
        rewards: Float64Array = self.units(examples) * gained
        return rewards

    def units(self, examples: Sequence[Example]) -> Float64Array:
        """Reward for each nat of a score, f64 [examples, 2]; by default beta for each nat of a sum."""
        return self.beta * lengths_of(examples)

    @abstractmethod
    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""

    @abstractmethod
    def slopes(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""


class OfMargins(Preference):
    """Implements Preference by how much higher the chosen reward is than the rejected one."""

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        return self.of_margins(_margins(self.rewards(scores, examples)))[0]

    def slopes(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        _, slopes = self.of_margins(_margins(self.rewards(scores, examples)))
        by_score: Float64Array = slopes[..., None] * _SIDES * self.units(examples)
        return by_score

    @abstractmethod
    def of_margins(self, margins: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Losses by the margins, and their derivatives."""


@dataclass(frozen=True)
class DPO(OfMargins):
    """The chosen answer gains more than the rejected one (Rafailov et al. 2023, arXiv 2305.18290).

    `label_smoothing` is the share of pairs that may be the wrong way round.
    """

    label_smoothing: float = 0.0
    enough: ClassVar[float] = _SURE

    def of_margins(self, margins: Float64Array) -> tuple[Float64Array, Float64Array]:
        """See OfMargins."""
        wrong = self.label_smoothing
        losses = (1 - wrong) * np.logaddexp(0, -margins) + wrong * np.logaddexp(0, margins)
        return losses, wrong - _sigmoid(-margins)


@dataclass(frozen=True)
class IPO(OfMargins):
    """The margin of means over tokens is to be 1 / (2 beta), no more (Azar et al. 2023, arXiv 2310.12036)."""

    def units(self, examples: Sequence[Example]) -> Float64Array:
        """See Preference."""
        return np.ones((len(examples), 2))

    def of_margins(self, margins: Float64Array) -> tuple[Float64Array, Float64Array]:
        """See OfMargins."""
        short = margins - 1 / (2 * self.beta)
        return short**2, 2 * short


@dataclass(frozen=True)
class SimPO(OfMargins):
    """The chosen mean is above the rejected one by a target `gamma` (Meng et al. 2024, arXiv 2405.14734)."""

    gamma: float = 1.0
    compares: ClassVar[bool] = False
    enough: ClassVar[float] = _SURE

    def units(self, examples: Sequence[Example]) -> Float64Array:
        """See Preference."""
        return np.full((len(examples), 2), self.beta)

    def of_margins(self, margins: Float64Array) -> tuple[Float64Array, Float64Array]:
        """See OfMargins."""
        beyond = margins - self.gamma
        return np.logaddexp(0, -beyond), -_sigmoid(-beyond)


@dataclass(frozen=True)
class ORPO(Preference):
    """The chosen answer is learnt, and its odds are above the rejected one's.

    Hong et al. 2024, arXiv 2403.07691.
    """

    compares: ClassVar[bool] = False

    def units(self, examples: Sequence[Example]) -> Float64Array:
        """See Preference."""
        return np.full((len(examples), 2), self.beta)

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        found: Float64Array = self.beta * np.logaddexp(0, -self._log_odds(scores)) - scores[..., 0]
        return found

    def slopes(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        by_odds = -self.beta * _sigmoid(-self._log_odds(scores))[..., None] * _SIDES
        slopes: Float64Array = by_odds / -np.expm1(np.minimum(scores, _NEAREST_TO_CERTAIN))
        slopes[..., 0] -= 1
        return slopes

    def _log_odds(self, scores: Float64Array) -> Float64Array:
        """Of the chosen answer over the rejected one, f64 [copies, examples]."""
        scores = np.minimum(scores, _NEAREST_TO_CERTAIN)
        return _margins(scores - np.log(-np.expm1(scores)))


@dataclass(frozen=True)
class KTO(Preference):
    """A liked answer gains more than the step's answers of other rows do on average, a disliked one less.

    That average, at least 0, is a number without slope (Ethayarajh et al. 2024, arXiv 2402.01306).
    """

    is_separate: ClassVar[bool] = False

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        return self._shares(scores, examples)[0]

    def slopes(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        shares, signs = self._shares(scores, examples)
        slopes = np.zeros(scores.shape)
        slopes[..., 0] = -signs * shares * (1 - shares) * self.units(examples)[:, 0]
        return slopes

    def _shares(self, scores: Float64Array, examples: Sequence[Example]) -> tuple[Float64Array, Float64Array]:
        """What an answer lacks of being rated right, f64 [copies, examples]; 1 of a liked answer, -1 else."""
        rewards = self.rewards(scores, examples)
        signs = np.where(liked_of(examples), 1.0, -1.0)
        distance = max(float(rewards[..., 1].mean()), 0.0)
        return _sigmoid(signs * (distance - rewards[..., 0])), signs


@dataclass(frozen=True, kw_only=True)
class ObjectiveFlags:
    """What is learnt."""

    objective: ObjectiveName = "auto"
    """What training lowers: completion or candidates: the cross-entropy of what is right; of pairs dpo, ipo,
    simpo, orpo; of answers that are rated true or false kto. auto: by the columns of the rows: dpo, kto, or
    cross-entropy."""
    beta: float | None = None
    """How strongly a preference holds to the start: larger is closer. orpo: weight of the odds. Default: 0.1;
    simpo: 2."""
    label_smoothing: float = 0.0
    """dpo: share of pairs that may be the wrong way round."""
    gamma: float = 1.0
    """simpo: margin to reach, in units of the reward."""
    loss_normalisation: LossNormalisation = "example"
    """Of completions, texts and chats. example: the loss of a step is the mean of its examples' means over
    tokens; token: the mean over all target tokens of the step, as transformers and TRL have it."""


@dataclass(frozen=True)
class Entry:
    """One objective of preferences: which rows it learns from, and the settings that it has beside beta."""

    make: Callable[..., Preference]
    rows: tuple[Preferring, ...] = ("pairs",)
    settings: tuple[str, ...] = ()
    beta: float = 0.1


PREFERENCES: Mapping[str, Entry] = {
    "dpo": Entry(DPO, settings=("label_smoothing",)),
    "ipo": Entry(IPO),
    "simpo": Entry(SimPO, settings=("gamma",), beta=2.0),
    "orpo": Entry(ORPO),
    "kto": Entry(KTO, rows=("ratings", "pairs")),
}
_BY_ROWS: Mapping[Preferring, ObjectiveName] = {"": "completion", "pairs": "dpo", "ratings": "kto"}


def settled_objective(given: ObjectiveName, rows: Preferring) -> ObjectiveName:
    """The objective of rows without a task; raises ValueError saying why a given one isn't theirs."""
    if given == "auto":
        return _BY_ROWS[rows]
    if given in PREFERENCES and rows not in PREFERENCES[given].rows:
        need = " or ".join(PREFERENCES[given].rows)
        raise ValueError(f"--objective is {given}, which learns from {need}")
    if given == "candidates":
        raise ValueError("--objective is candidates, which only a task has")
    return given


def make_objective(name: ObjectiveName, flags: ObjectiveFlags) -> Objective:
    """The objective of a settled name; raises ConfigError where settings belong to another."""
    entry = PREFERENCES.get(name)
    own = entry.settings if entry else ()
    problems = [
        f"--{each.replace('_', '-')} belongs to --objective {_owner(each)}, the objective is {name}"
        for each in ("beta", "label_smoothing", "gamma")
        if getattr(flags, each) != getattr(ObjectiveFlags, each)
        and each not in own
        and not (entry and each == "beta")
    ]
    if flags.loss_normalisation == "token" and name != "completion":
        problems.append(
            f"--loss-normalisation token is for completions, texts and chats; the objective is {name}"
        )
    if problems:
        raise ConfigError(
            "these settings can't be used:",
            problems,
            remedy="leave them out",
            code="setting-of-other-objective",
        )
    if entry is None:
        return CROSS_ENTROPY
    beta = entry.beta if flags.beta is None else flags.beta
    return entry.make(beta, **{each: getattr(flags, each) for each in own})


def describe_objective(objective: Objective) -> dict[str, Any] | None:
    """What a preference is, as a journal keeps it; None of cross-entropy."""
    if not isinstance(objective, Preference):
        return None
    return {"name": type(objective).__name__.lower(), **asdict(objective)}


def references_of(examples: Sequence[Example]) -> Float64Array:
    """Scores by the adapter that the run begins with, f64 [examples, 2]; ValueError if one is missing."""
    if lacking := [example.row for example in examples if len(example.reference) != example.candidates]:
        raise ValueError(f"row {lacking[0]} has no reference")
    return np.array([example.reference for example in examples], np.float64)


def liked_of(examples: Sequence[Example]) -> NDArray[np.bool_]:
    """Whether the answer of each example is liked, bool [examples]."""
    return np.array([bool(example.liked) for example in examples])


def lengths_of(examples: Sequence[Example]) -> Float64Array:
    """Tokens of both answers, f64 [examples, 2]."""
    return np.array([[len(each.targets) for each in example.sequences] for example in examples], np.float64)


def _margins(rewards: Float64Array) -> Float64Array:
    return rewards[..., 0] - rewards[..., 1]


def _sigmoid(values: Float64Array) -> Float64Array:
    found: Float64Array = 0.5 * (1 + np.tanh(values / 2))
    return found


def _owner(setting: str) -> str:
    return " or ".join(name for name, each in PREFERENCES.items() if setting in (*each.settings, "beta"))
