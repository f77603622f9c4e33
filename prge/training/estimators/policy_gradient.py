"""Policy gradients: completions are sampled and rewarded, then another estimator computes their gradient.

    prompts -> completions -> rewards -> advantages -> examples -> exact gradients or tangents of the loss

See prge/objectives/policy_gradient.py for the loss. Completions may be used for several steps; the journal
keeps them for that, so that a resumed run uses the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from prge.engine import Call, Engine, FloatArray
from prge.formats.journal import Record
from prge.model_spec import AdaptedModule
from prge.objectives.examples import sequences_of
from prge.objectives.policy_gradient import (
    CompletionExample,
    LossType,
    RewardScale,
    advantages,
    completion_example,
    divergence_from_start,
    loss_weights,
)
from prge.training.estimators.protocol import Estimator, Measurement, Step
from prge.training.estimators.rollouts import DIVERGENCE, EQUAL_REWARDS, Rollout, reward_facts

_COMPLETIONS = "completions"


@dataclass(frozen=True)
class PolicyGradient:
    """Implements protocol.Estimator for completions that it samples.

    Attributes:
        estimator: computes the gradient of the loss of given completions.
        generations: completions of each prompt.
        iterations: steps that use the same completions.
        max_length: maximum number of tokens of a completion.
        loss_type: see `loss_weights`.
        scale: see `advantages`.
        needs_reference: whether the loss compares with the adapter that the run starts from.
        compares_copies: whether the estimator computes the loss of perturbed adapters, which didn't sample
            the completions.
    """

    estimator: Estimator
    generations: int
    iterations: int
    max_length: int
    loss_type: LossType
    scale: RewardScale
    needs_reference: bool
    compares_copies: bool

    def measure(self, engine: Engine, step: Step) -> Measurement:
        """Sample completions of the step's examples, or use those of an earlier step, and measure them.

        Rated answers are measured as they are (see prge.objectives.preferences.OfflineGRPO).
        """
        if step.rollouts is None:
            return self.estimator.measure(engine, step)
        source = step.rollouts
        stored = (source.step(step.number - step.number % self.iterations) or {}).get(_COMPLETIONS)
        if stored is None:
            adapters = [step.adapter.copy()]
            (rollouts,) = source.sample(
                adapters, step.examples, self.generations, seed=step.seed, step=step.number
            )
        else:
            rollouts = [
                [Rollout(tuple(each["tokens"]), each["reward"]) for each in group] for group in stored
            ]
        examples = self._examples(step, rollouts)
        facts = reward_facts([rollout for group in rollouts for rollout in group])
        if all(len({rollout.reward for rollout in group}) == 1 for group in rollouts):
            facts[EQUAL_REWARDS] = True
        now: list[tuple[float, ...]] = []
        if stored is not None:
            sampled = [tuple(each["log_probabilities"]) for group in stored for each in group]
            examples = [replace(each, sampled=values) for each, values in zip(examples, sampled, strict=True)]
        elif self.iterations > 1 or self.compares_copies:
            sampled = now = _log_probabilities(engine, step.adapter.values, examples)
            examples = [replace(each, sampled=values) for each, values in zip(examples, sampled, strict=True)]
            if self.iterations > 1:
                facts[_COMPLETIONS] = _to_json(rollouts, sampled)
        if self.needs_reference:
            reference = _log_probabilities(engine, source.start, examples)
            now = now or _log_probabilities(engine, step.adapter.values, examples)
            facts[DIVERGENCE] = _divergence(reference, now)
            pairs = zip(examples, reference, strict=True)
            examples = [replace(each, reference=values) for each, values in pairs]
        measurement = self.estimator.measure(engine, replace(step, examples=examples))
        return replace(measurement, facts={**measurement.facts, **facts})

    def _examples(self, step: Step, rollouts: Sequence[Sequence[Rollout]]) -> list[CompletionExample]:
        """Return the examples of all completions, with advantages and weights."""
        rewards = np.array([[rollout.reward for rollout in group] for group in rollouts])
        gains = advantages(rewards, self.scale).ravel()
        examples = [
            completion_example(prompt.row, prompt.sequences[0].tokens, rollout.tokens)
            for prompt, group in zip(step.examples, rollouts, strict=True)
            for rollout in group
        ]
        weights = loss_weights([each.candidates for each in examples], self.loss_type, self.max_length)
        return [
            replace(each, advantage=float(gain), weight=float(weight))
            for each, gain, weight in zip(examples, gains, weights, strict=True)
        ]

    def gradient(
        self, record: Mapping[str, Any], seed: int, step: int, modules: Sequence[AdaptedModule]
    ) -> FloatArray:
        """See Estimator.gradient."""
        return self.estimator.gradient(record, seed, step, modules)


def _divergence(reference: Sequence[tuple[float, ...]], now: Sequence[tuple[float, ...]]) -> float:
    """Return the mean divergence of all tokens from their reference."""
    change = np.concatenate([*map(np.array, now)]) - np.concatenate([*map(np.array, reference)])
    return float(divergence_from_start(change)[0].mean())


def _to_json(
    rollouts: Sequence[Sequence[Rollout]], sampled: Sequence[tuple[float, ...]]
) -> list[list[Record]]:
    """Return completions as the journal keeps them, with the log-probabilities of their tokens."""
    values = iter(sampled)
    return [
        [{**asdict(each), "log_probabilities": list(next(values))} for each in group] for group in rollouts
    ]


def _log_probabilities(
    engine: Engine, values: FloatArray, examples: Sequence[CompletionExample]
) -> list[tuple[float, ...]]:
    """Return the log-probabilities of the tokens of each example with an adapter's values."""
    (outputs,) = engine.forward(Call(sequences_of(examples), values[None]))
    ends = np.cumsum([example.candidates for example in examples])
    return [tuple(part.tolist()) for part in np.split(outputs.astype(np.float64), ends[:-1])]
