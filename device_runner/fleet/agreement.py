"""What the devices of a fleet and its server agree on: how steps are taken, on which bundle, for which task.

A device takes part only in what it knows by hash: the bundle is its own, the task is its owner's, and the
plan is within its owner's policy. An agreement's hash is in every message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from device_runner.session.settings import RunSettings
from prge.errors import ConfigError
from prge.files.documents import parse_json
from prge.learning.estimators.table import ESTIMATORS, EstimatorName, having
from prge.learning.examples import LossNormalisation
from prge.learning.optimizers import OptimizerName, ScheduleName
from prge.rows.forms.task import Task
from prge.running.recipe import Recipe
from prge.running.training_flags import OptimizerFlags, RateFlags
from prge.verbs.bounds import bound_problems
from prge.verbs.kinds import Paths
from prge.verbs.settings import settings_of

MOST_AGREEMENT_BYTES = 1 << 16
HASH_BYTES = 16
# Whole numbers of the noise's grid fit their words, and what they stand for a float32.
_WITH_NOISE = {"noise": (1e-3, 1e6), "clip": (1e-6, 1e6)}


class FleetRecipe(Recipe):
    """The recipe of a plan's steps."""

    def learning_rates(self) -> Callable[[int], dict[str, float]]:
        """Learning rates of a step, rounded to float32 as messages carry them."""
        rates = super().learning_rates()
        return lambda step: {name: float(np.float32(rate)) for name, rate in rates(step).items()}


@dataclass(frozen=True)
class Plan(OptimizerFlags, RateFlags):
    """How a fleet learns."""

    rounds: int = 20
    """Rounds; in each the server asks some devices."""
    local_steps: int = 10
    """Steps that a device takes in a round before it answers."""
    examples: int = 4
    """Examples of a step on a device."""
    loss_normalisation: LossNormalisation = "example"
    """Of completions. example: the loss of a device's step is the mean of its examples' means over tokens;
    token: the mean over all target tokens of that step. Every device counts the same either way."""
    estimator: EstimatorName = "tangent"
    """tangent, antithetic, fzoo: devices send scalars. exact: they send the change of their adapter."""
    queries: int = 4
    """Random directions of a step; exact has none."""
    share_directions: bool = False
    """tangent: one direction a query for all examples of a step, so that a device sends --queries scalars a
    step instead of --queries for each of its --examples. Noise needs it."""
    epsilon: float = 1e-2
    """antithetic, fzoo: length of a perturbation."""

    clip: float = 0.0
    """Largest norm of an example's gradient: as tangents estimate it, or exact; of the step's with
    antithetic and fzoo. 0: no clipping; noise needs it."""
    noise: float = 0.0
    """Local differential privacy: every device adds discrete Gaussian noise to what it sends, of this
    deviation in units of how far one row, or all of them by --unit owner, can change it; 0: none."""
    unit: Literal["row", "owner"] = "row"
    """What noise hides: what one row of a device says, or what all of them say together; owner takes
    --examples times the noise."""
    delta: float = 1e-5
    """Of the (epsilon, delta) that noise amounts to."""
    most_privacy_epsilon: float = 0.0
    """A device stops where its privacy's epsilon would exceed this; 0: no bound but its owner's."""

    combine: Literal["mean", "trimmed", "median"] = "mean"
    """Of the devices' scalars or changes. trimmed: of changes, number by number, the mean without the
    smallest and the largest third; of scalars the mean of answers none of which is longer than the middle
    one. median: number by number. trimmed and median withstand devices that lie while they are less than a
    third."""
    outlier: float = 4.0
    """Shorten answers that are this many times longer than the median of a round's answers."""
    optimizer: OptimizerName = "adam"
    """sgd, momentum or adam."""
    beta2: float = 0.98
    """adam's second coefficient."""
    learning_rate: float = 1e-2
    schedule: ScheduleName = "constant"
    warmup: int = 0
    """Steps of linear warm-up."""

    seed: int = 42
    """Of directions, which all devices share, and of which devices a round asks."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if self.noise and not self.clip:
            problems.append("--noise needs --clip: the noise is in units of what clipping leaves")
        for name, (least, most) in _WITH_NOISE.items():
            if self.noise and not least <= (value := getattr(self, name)) <= most and value:
                problems.append(f"--{name} is {value:g}, with noise it must be from {least:g} to {most:g}")
        if self.noise and self.estimator == "tangent" and not self.share_directions:
            problems.append("--noise needs --share-directions: else there is noise for each example")
        if self.noise and self.estimator in having("epsilon") and self.examples != 1:
            problems.append(
                f"--noise with --estimator {self.estimator} needs --examples 1, it is {self.examples}: "
                "single examples are clipped by tangent and exact alone"
            )
        if self.loss_normalisation == "token" and (self.noise or self.clip):
            problems.append(
                "--loss-normalisation token takes neither --clip nor --noise: an example would count by what "
                "others hold"
            )
        if self.warmup > self.steps:
            problems.append(f"--warmup is {self.warmup}, there are only {self.steps} steps")
        if problems:
            raise ConfigError(
                "these settings can't be used:",
                problems,
                remedy="see `prge fleet serve --help`",
                code="settings-unusable",
            )

    @property
    def by_scalars(self) -> bool:
        """Whether devices send scalars; else the change of their adapter."""
        return ESTIMATORS[self.estimator].has_directions

    @property
    def steps(self) -> int:
        """Steps that a device takes if it takes part in every round."""
        return self.rounds * self.local_steps

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a step's scalars: [queries], or of tangents [queries, examples]."""
        if self.estimator != "tangent":
            return (self.queries,)
        return (self.queries, 1 if self.share_directions else self.examples)

    @property
    def recipe(self) -> FleetRecipe:
        """That of a run which takes the plan's steps."""
        exact = self.estimator == "exact"
        return FleetRecipe(
            estimator=self.estimator,
            queries=None if exact else self.queries,
            share_directions=self.estimator == "tangent" and self.share_directions,
            epsilon=Recipe.epsilon if self.estimator not in having("epsilon") else self.epsilon,
            clip=0.0 if exact else self.clip,
            clip_examples=self.clip if exact else 0.0,
            batch_size=self.examples,
            loss_normalisation=self.loss_normalisation,
            optimizer=self.optimizer,
            momentum=self.momentum,
            beta2=self.beta2,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
            warmup=self.warmup,
            steps=self.steps,
            seed=self.seed,
        )

    def run_settings(self, bundle: Path, train: Paths, out: Path) -> RunSettings:
        """The settings of `prge run` that take the plan's steps on a device's rows."""
        return RunSettings(bundle=bundle, train=train, out=out, **self.recipe.to_record())


@dataclass(frozen=True)
class Agreement:
    """A plan with what it is for: SHA-256 of the bundle, of the task (empty without one), of the start.

    `name`: of one fleet, so that another with the same plan is another one. `start`: of the adapter and head
    before the first step; empty where they are the bundle's own.
    """

    name: str
    plan: Plan
    bundle: str
    task: str = ""
    start: str = ""

    @cached_property
    def content(self) -> bytes:
        """The same bytes for the same agreement."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def sha256(self) -> bytes:
        """The beginning of the hash of its content, as messages carry it."""
        return hashlib.sha256(self.content).digest()[:HASH_BYTES]

    @classmethod
    def parse(cls, content: bytes) -> Agreement:
        """Inverse of `content`.

        Raises:
            ConfigError: it is none, or its settings can't be used.
        """
        try:
            if len(content) > MOST_AGREEMENT_BYTES:
                raise ValueError(f"it has {len(content)} bytes")
            fields = parse_json(content)
            plan = settings_of(Plan, fields.pop("plan"), "the server's plan")
            agreement = cls(plan=plan, **fields)
            if not all(isinstance(value, str) for value in fields.values()):
                raise ValueError("a hash is no text")
            return agreement
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                "what the server sent is no agreement:",
                [str(error)],
                remedy="use the same version of prge on both sides",
                code="agreement-unreadable",
            ) from None


def task_sha256(task: Task | None) -> str:
    """Of a task's content; empty without one."""
    if task is None:
        return ""
    return hashlib.sha256(json.dumps(asdict(task), sort_keys=True).encode()).hexdigest()
