"""Rollouts: completions of prompts by a generator, with their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prge.engine import FloatArray
from prge.errors import RewardError
from prge.formats.adapter import Adapter
from prge.formats.journal import Journal, Record
from prge.generation.loop import Completion, GenerationSettings, Generator, Request
from prge.generation.sampling import SamplingSettings
from prge.objectives.examples import Example
from prge.rewards.prompt_examples import PromptExample
from prge.rewards.reward import Reward
from prge.training.estimators.directions import philox
from prge.training.estimators.rollouts import Rollout, reward_facts

# Directions and row orders use other streams with the key (seed, step).
_SAMPLING_STREAM = 2**63


@dataclass(frozen=True)
class Rollouts:
    """Implements prge.training.estimators.rollouts.RolloutSource with a generator and a reward.

    Attributes:
        generator: generates the completions.
        reward: scores them.
        start: values of the adapter that the run starts from, f32 [size].
        max_length: maximum number of tokens of a completion.
        temperature: temperature of sampling.
        journal: the journal of the run; None: without a run.
    """

    generator: Generator
    reward: Reward
    start: FloatArray
    max_length: int
    temperature: float = 1.0
    journal: Journal | None = None

    def sample(
        self, adapters: Sequence[Adapter], prompts: Sequence[Example], count: int, *, seed: int, step: int
    ) -> list[list[list[Rollout]]]:
        """See RolloutSource."""
        streams = [_SAMPLING_STREAM + number for number in range(len(prompts) * count)]
        seeds = [int(philox(seed, step, stream, 1)[0]) for stream in streams]
        wanted = [
            (adapter, prompt) for adapter in adapters for prompt in _prompts(prompts) for _ in range(count)
        ]
        requests = [
            Request(
                prompt.encoded,
                adapter,
                GenerationSettings(
                    self.max_length,
                    sampling=SamplingSettings(temperature=self.temperature, min_p=0.0, seed=each),
                ),
            )
            for (adapter, prompt), each in zip(wanted, seeds * len(adapters), strict=True)
        ]
        rollouts = iter(self._rewarded([prompt for _, prompt in wanted], requests))
        return [[[next(rollouts) for _ in range(count)] for _ in prompts] for _ in adapters]

    def step(self, step: int) -> Record | None:
        """See RolloutSource."""
        return None if self.journal is None else self.journal.step(step)

    def evaluate(self, adapter: Adapter, prompts: Sequence[Example]) -> Record:
        """Return the record of an evaluation: the mean reward of the most likely completions, and more."""
        adapter = adapter.copy()
        requests = [
            Request(prompt.encoded, adapter, GenerationSettings(self.max_length))
            for prompt in _prompts(prompts)
        ]
        rollouts = self._rewarded(_prompts(prompts), requests)
        facts = reward_facts(rollouts)
        reward = facts["reward"]
        return {"loss": -reward, "examples": len(prompts), **facts, "value": reward}

    def _rewarded(self, prompts: Sequence[PromptExample], requests: Sequence[Request]) -> list[Rollout]:
        """Return the rollouts of requests, one for each."""
        completions = self.generator.generate(requests)
        # Nothing is shared with later steps: a resumed run generates with the same programs.
        self.generator.close()
        return [self._rollout(*pair) for pair in zip(prompts, completions, strict=True)]

    def _rollout(self, prompt: PromptExample, completion: Completion) -> Rollout:
        try:
            reward = self.reward(prompt.source, completion.text, prompt.fields)
        except RewardError as error:
            raise RewardError(
                f"Row {prompt.row}: {error.what}", remedy=error.remedy, code=error.code
            ) from None
        return Rollout(completion.all_tokens, reward)


def _prompts(examples: Sequence[Example]) -> list[PromptExample]:
    return [example for example in examples if isinstance(example, PromptExample)]
