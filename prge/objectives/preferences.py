"""Preference losses: for pairs of a chosen and a rejected answer, and for rated answers.

    pair      candidate 0 is the chosen answer, candidate 1 the rejected one
    rating    candidate 0 is the rated answer; for KTO, candidate 1 is another row's answer, whose reward
              measures how far the model has moved from its start

    scores, reference -> rewards [copies, examples, 2] -> losses, gradients

Scores are mean log-probabilities per token (examples.py); their product with the number of tokens is the sum.
The reference scores of an example are those by the adapter that the run starts from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from prge.engine import Float64Array, Target, TokenSequence
from prge.errors import ConfigError
from prge.objectives.examples import Example, LossNormalisation
from prge.objectives.objective import CROSS_ENTROPY, Objective
from prge.objectives.policy_gradient import clipped_surrogate, divergence_from_start

ObjectiveName = Literal[
    "auto", "completion", "candidates", "dpo", "ipo", "simpo", "orpo", "kto", "grpo", "es"
]
# The preferences in rows without a task: none (texts or completions), pairs, or ratings.
Preferring = Literal["", "pairs", "ratings"]
_SIGNS = np.array([1.0, -1.0])
# Closer to 0, the odds of a mean log-probability are float32 noise.
_MAX_LOGPROB = -1e-6
# Loss of a pair whose chosen answer is better with a probability of 0.9.
_CONFIDENT_LOSS = -math.log(0.9)


@dataclass(frozen=True)
class Preference(ABC):
    """Implements Objective with a loss that depends on rewards of answers.

    Attributes:
        beta: factor of the rewards; larger values keep the model closer to its start.
        needs_reference: whether rewards are relative to reference scores.
        sufficient_loss: evaluations count lower losses of development pairs as this value. Lowering them
            further mostly moves the model away from its start, so that it shouldn't decide which step is the
            best.
        is_separable: see Objective.
    """

    beta: float
    needs_reference: ClassVar[bool] = True
    sufficient_loss: ClassVar[float] = 0.0
    is_separable: ClassVar[bool] = True

    def rewards(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """Return the reward of each answer, f64 in the shape of the scores.

        Raises:
            ValueError: an example has no reference scores.
        """
        differences = scores - references_of(examples) if self.needs_reference else scores
        rewards: Float64Array = self.reward_scales(examples) * differences
        return rewards

    def reward_scales(self, examples: Sequence[Example]) -> Float64Array:
        """Return the reward per nat of each score, f64 [examples, 2]; here beta * number of tokens."""
        return self.beta * lengths_of(examples)

    @abstractmethod
    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""

    @abstractmethod
    def gradients(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""


class MarginPreference(Preference):
    """Implements Preference with a loss of the margin between the chosen and the rejected reward."""

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        return self.margin_losses(_margins(self.rewards(scores, examples)))[0]

    def gradients(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        _, grad_margins = self.margin_losses(_margins(self.rewards(scores, examples)))
        grad_scores: Float64Array = grad_margins[..., None] * _SIGNS * self.reward_scales(examples)
        return grad_scores

    @abstractmethod
    def margin_losses(self, margins: Float64Array) -> tuple[Float64Array, Float64Array]:
        """Return the losses for margins of rewards, and their derivatives with respect to the margins."""


@dataclass(frozen=True)
class DPO(MarginPreference):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290).

    Raises the reward of the chosen answer over the reward of the rejected one.

    Attributes:
        label_smoothing: assumed share of pairs whose answers are swapped.
    """

    label_smoothing: float = 0.0
    sufficient_loss: ClassVar[float] = _CONFIDENT_LOSS

    def margin_losses(self, margins: Float64Array) -> tuple[Float64Array, Float64Array]:
        """See MarginPreference."""
        swapped = self.label_smoothing
        losses = (1 - swapped) * np.logaddexp(0, -margins) + swapped * np.logaddexp(0, margins)
        return losses, swapped - _sigmoid(-margins)


@dataclass(frozen=True)
class IPO(MarginPreference):
    """Identity preference optimization (Azar et al. 2023, arXiv 2310.12036).

    The squared distance between the margin, of means over tokens, and 1 / (2 beta).
    """

    def reward_scales(self, examples: Sequence[Example]) -> Float64Array:
        """See Preference."""
        return np.ones((len(examples), 2))

    def margin_losses(self, margins: Float64Array) -> tuple[Float64Array, Float64Array]:
        """See MarginPreference."""
        excess = margins - 1 / (2 * self.beta)
        return excess**2, 2 * excess


@dataclass(frozen=True)
class SimPO(MarginPreference):
    """Simple preference optimization (Meng et al. 2024, arXiv 2405.14734).

    Raises the mean log-probability of the chosen answer over that of the rejected one, by the target margin
    `gamma`, without a reference.
    """

    gamma: float = 1.0
    needs_reference: ClassVar[bool] = False
    sufficient_loss: ClassVar[float] = _CONFIDENT_LOSS

    def reward_scales(self, examples: Sequence[Example]) -> Float64Array:
        """See Preference."""
        return np.full((len(examples), 2), self.beta)

    def margin_losses(self, margins: Float64Array) -> tuple[Float64Array, Float64Array]:
        """See MarginPreference."""
        excess = margins - self.gamma
        return np.logaddexp(0, -excess), -_sigmoid(-excess)


@dataclass(frozen=True)
class ORPO(Preference):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691).

    The negative log-likelihood of the chosen answer plus beta times an odds ratio loss, without a reference.
    """

    needs_reference: ClassVar[bool] = False

    def reward_scales(self, examples: Sequence[Example]) -> Float64Array:
        """See Preference."""
        return np.full((len(examples), 2), self.beta)

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        losses: Float64Array = self.beta * np.logaddexp(0, -self._log_odds_ratio(scores)) - scores[..., 0]
        return losses

    def gradients(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        grad_log_odds = -self.beta * _sigmoid(-self._log_odds_ratio(scores))[..., None] * _SIGNS
        grad_scores: Float64Array = grad_log_odds / -np.expm1(np.minimum(scores, _MAX_LOGPROB))
        grad_scores[..., 0] -= 1
        return grad_scores

    def _log_odds_ratio(self, scores: Float64Array) -> Float64Array:
        """Return the log odds ratio of the chosen and the rejected answer, f64 [copies, examples]."""
        scores = np.minimum(scores, _MAX_LOGPROB)
        return _margins(scores - np.log(-np.expm1(scores)))


@dataclass(frozen=True)
class KTO(Preference):
    """Kahneman-Tversky optimization of rated answers (Ethayarajh et al. 2024, arXiv 2402.01306).

    Raises the reward of a liked answer over the mean reward of other rows' answers in the step, and lowers
    that of a disliked answer below it. The mean, at least 0, is treated as a constant.
    """

    is_separable: ClassVar[bool] = False

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        return self._losses_and_signs(scores, examples)[0]

    def gradients(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        losses, signs = self._losses_and_signs(scores, examples)
        grad_scores = np.zeros(scores.shape)
        grad_scores[..., 0] = -signs * losses * (1 - losses) * self.reward_scales(examples)[:, 0]
        return grad_scores

    def _losses_and_signs(
        self, scores: Float64Array, examples: Sequence[Example]
    ) -> tuple[Float64Array, Float64Array]:
        """Return the losses, f64 [copies, examples], and the sign of each rating, 1 or -1."""
        rewards = self.rewards(scores, examples)
        signs = np.where(liked_of(examples), 1.0, -1.0)
        distance = max(float(rewards[..., 1].mean()), 0.0)
        return _sigmoid(signs * (distance - rewards[..., 0])), signs


@dataclass(frozen=True)
class OfflineGRPO(Preference):
    """Policy gradients of rated answers that were written before: GRPO's clipped loss without sampling.

    The reward of an answer is 1 if it is liked, else -1, and its advantage the reward minus the mean of the
    step. The ratio is that of a whole answer, the exponential of the change of its mean log-probability
    (GSPO, Zheng et al. 2025, arXiv 2507.18071). Clipping it bounds how far bad answers are pushed away. An
    example has one candidate.

    Attributes:
        beta: factor of the divergence from the start.
        clip_range: beyond this change of the ratio, the gradient of an answer is zero.
    """

    clip_range: float = 0.2
    is_separable: ClassVar[bool] = False
    # Losses are negative.
    sufficient_loss: ClassVar[float] = -math.inf

    def reward_scales(self, examples: Sequence[Example]) -> Float64Array:
        """See Preference."""
        return lengths_of(examples)[:, :1]

    def losses(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        return self._losses_and_gradients(scores, examples)[0][..., 0]

    def gradients(self, scores: Float64Array, examples: Sequence[Example]) -> Float64Array:
        """See Objective."""
        return self._losses_and_gradients(scores, examples)[1]

    def _losses_and_gradients(
        self, scores: Float64Array, examples: Sequence[Example]
    ) -> tuple[Float64Array, Float64Array]:
        """Return the losses and their derivatives, both f64 [copies, examples, 1]."""
        rewards = np.where(liked_of(examples), 1.0, -1.0)[:, None]
        advantages, change = rewards - rewards.mean(), scores - references_of(examples)
        losses, gradients = clipped_surrogate(change, advantages, self.clip_range)
        divergence, derivative = divergence_from_start(change)
        return losses + self.beta * divergence, gradients + self.beta * derivative


@dataclass(frozen=True, kw_only=True)
class ObjectiveFlags:
    """The objective."""

    objective: ObjectiveName = "auto"
    """Loss to minimize. completion, candidates: cross-entropy; dpo, ipo, simpo, orpo: for pairs of answers;
    kto, grpo: for answers that are rated true or false; grpo, es: for a --reward of generated text (policy
    gradients; evolution strategies, which need forward passes alone). auto: chosen by the columns of the
    rows: dpo, kto or cross-entropy; with a --reward by the estimator: es for perturbed adapters, else
    grpo."""
    beta: float | None = None
    """Strength of the preference loss: larger values keep the model closer to its start. orpo: weight of the
    odds ratio loss. grpo: factor of the divergence from the start. Default: 0.1; simpo: 2; grpo: 0."""
    label_smoothing: float = 0.0
    """dpo: assumed share of pairs whose answers are swapped."""
    gamma: float = 1.0
    """simpo: target margin between the rewards."""
    loss_normalisation: LossNormalisation = "example"
    """Completions, texts and chats: how a step's loss is averaged. example: over tokens within each example,
    then over examples; token: over all target tokens of the step, as in transformers and TRL."""


@dataclass(frozen=True)
class ObjectiveEntry:
    """A preference objective: its class, rows, further settings, and default of beta."""

    make: Callable[..., Preference]
    rows: tuple[Preferring, ...] = ("pairs",)
    settings: tuple[str, ...] = ()
    beta: float = 0.1


PREFERENCES: Mapping[str, ObjectiveEntry] = {
    "dpo": ObjectiveEntry(DPO, settings=("label_smoothing",)),
    "ipo": ObjectiveEntry(IPO),
    "simpo": ObjectiveEntry(SimPO, settings=("gamma",), beta=2.0),
    "orpo": ObjectiveEntry(ORPO),
    "kto": ObjectiveEntry(KTO, rows=("ratings", "pairs")),
    "grpo": ObjectiveEntry(OfflineGRPO, rows=("ratings",), beta=0.0),
}
_BY_ROWS: Mapping[Preferring, ObjectiveName] = {"": "completion", "pairs": "dpo", "ratings": "kto"}


def resolve_objective(name: ObjectiveName, rows: Preferring) -> ObjectiveName:
    """Return the objective of rows without a task, where `auto` is decided by the rows.

    Raises:
        ValueError: the objective can't learn from these rows; the message says why.
    """
    if name == "auto":
        return _BY_ROWS[rows]
    if name in PREFERENCES and rows not in PREFERENCES[name].rows:
        needed = " or ".join(PREFERENCES[name].rows)
        needed += ", or from a --reward" if name == "grpo" else ""
        raise ValueError(f"--objective is {name}, which learns from {needed}")
    if name == "candidates":
        raise ValueError("--objective is candidates, which only a task has")
    return name


def make_objective(name: ObjectiveName, flags: ObjectiveFlags) -> Objective:
    """Construct an objective by name; raises ConfigError for settings of other objectives."""
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
            "These settings can't be used:",
            problems,
            remedy="Leave them out.",
            code="setting-of-other-objective",
        )
    if entry is None:
        return CROSS_ENTROPY
    beta = entry.beta if flags.beta is None else flags.beta
    return entry.make(beta, **{each: getattr(flags, each) for each in own})


def describe_objective(objective: Objective) -> dict[str, Any] | None:
    """Return name and settings of a preference objective for a journal; None for cross-entropy."""
    if not isinstance(objective, Preference):
        return None
    return {"name": type(objective).__name__.lower(), **asdict(objective)}


def with_other_answers(examples: Sequence[Example], longest: int) -> list[Example]:
    """Return rated answers for KTO, with the previous example's answer (the first: the last one's).

    Args:
        examples: rated answers, each one candidate in one sequence.
        longest: maximum number of tokens of a sequence; a longer one with another answer is cut.
    """
    previous = [*examples[-1:], *examples[:-1]]
    return [
        replace(example, sequences=(*example.sequences, _with_answer(example, other, longest)), candidates=2)
        for example, other in zip(examples, previous, strict=True)
    ]


def _with_answer(example: Example, other: Example, longest: int) -> TokenSequence:
    """Return an example's prompt with the answer of another example as candidate 1."""
    prompt = example.prompt
    answer = tuple(target.token for target in other.sequences[0].targets)[: longest - len(prompt)]
    targets = [Target(at, token, 1 / len(answer), 1) for at, token in enumerate(answer, len(prompt) - 1)]
    return TokenSequence(prompt + answer, tuple(targets))


def references_of(examples: Sequence[Example]) -> Float64Array:
    """Return the reference scores, f64 [examples, 2]; raises ValueError if an example has none."""
    if missing := [example.row for example in examples if len(example.reference) != example.candidates]:
        raise ValueError(f"row {missing[0]} has no reference scores")
    return np.array([example.reference for example in examples], np.float64)


def liked_of(examples: Sequence[Example]) -> NDArray[np.bool_]:
    """Return whether the answer of each example is liked, bool [examples]."""
    return np.array([bool(example.liked) for example in examples])


def lengths_of(examples: Sequence[Example]) -> Float64Array:
    """Return the number of tokens of both answers, f64 [examples, 2]."""
    lengths = np.zeros((len(examples), 2))
    for row, example in zip(lengths, examples, strict=True):
        for sequence in example.sequences:
            for target in sequence.targets:
                row[target.candidate] += 1
    return lengths


def _margins(rewards: Float64Array) -> Float64Array:
    return rewards[..., 0] - rewards[..., 1]


def _sigmoid(values: Float64Array) -> Float64Array:
    result: Float64Array = 0.5 * (1 + np.tanh(values / 2))
    return result


def _owner(setting: str) -> str:
    return " or ".join(name for name, each in PREFERENCES.items() if setting in (*each.settings, "beta"))
