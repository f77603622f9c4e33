"""The agreement between a fleet's server and its devices: how to take steps, on which bundle, for which task.

A device takes part only if it knows the hashes: the bundle is its own, the task is its owner's, and the plan
is within its owner's policy. Every message carries the agreement's hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from device_runner.session.settings import RunSettings
from prge.cli.bounds import bound_problems, flag
from prge.cli.field_types import Paths
from prge.cli.hints import current_name
from prge.cli.settings import settings_from_mapping
from prge.data.forms.task import Task
from prge.errors import ConfigError
from prge.formats.documents import mapping, parse_json
from prge.objectives.examples import LossNormalisation
from prge.training.estimators.table import ESTIMATORS, EstimatorName, estimators_with_setting
from prge.training.optimizers import OptimizerName, ScheduleName
from prge.training.recipe import Recipe
from prge.training.settings import LearningRateFlags, OptimizerFlags

MAX_AGREEMENT_BYTES = 1 << 16
HASH_BYTES = 16
# Within these bounds, grid values fit 64-bit integers and their products fit float32.
_WITH_NOISE = {"noise": (1e-3, 1e6), "max_grad_norm": (1e-6, 1e6)}


class FleetRecipe(Recipe):
    """The recipe of a plan's steps, with learning rates rounded to float32."""

    def learning_rates(self) -> Callable[[int], dict[str, float]]:
        """Return a function from a step to its learning rates, rounded to float32 as messages carry them."""
        rates = super().learning_rates()
        return lambda step: {name: float(np.float32(rate)) for name, rate in rates(step).items()}


@dataclass(frozen=True)
class Plan(OptimizerFlags, LearningRateFlags):
    """How a fleet trains."""

    rounds: int = 20
    """Rounds; in each the server asks some devices."""
    local_steps: int = 10
    """Steps that a device takes per round."""
    examples: int = 4
    """Examples per step on a device."""
    loss_normalisation: LossNormalisation = "example"
    """How the loss of completions is averaged. example: the mean over a device's examples of each example's
    mean over its tokens; token: the mean over all target tokens of the step. Every device has the same
    weight."""
    estimator: EstimatorName = "tangent"
    """tangent, antithetic, fzoo: devices send projected gradients. exact: devices send the change of their
    adapter."""
    queries: int = 4
    """Random directions per step; exact has none."""
    share_directions: bool = False
    """tangent: all examples of a step share one direction per query, so that a device sends --queries
    projected gradients per step instead of --queries per example. Required by --noise."""
    epsilon: float = 0.05
    """antithetic, fzoo: length of a perturbation."""

    max_grad_norm: float = 0.0
    """Largest norm of an example's gradient (estimated by tangent, or exact), or of the step's gradient with
    antithetic and fzoo. 0: no clipping. Required by --noise."""
    noise: float = 0.0
    """Local differential privacy: standard deviation of the discrete Gaussian noise that every device adds to
    what it sends, relative to the sensitivity (how far one row can change it, or all rows with --unit owner).
    0: no noise."""
    unit: Literal["row", "owner"] = "row"
    """What the noise protects: one row of a device, or all rows of its owner together. owner needs --examples
    times the noise."""
    delta: float = 1e-5
    """The delta of (epsilon, delta) differential privacy."""
    most_privacy_epsilon: float = 0.0
    """A device stops before its epsilon exceeds this; 0: only the owner's bound applies."""

    combine: Literal["mean", "trimmed", "median"] = "mean"
    """How to aggregate the devices' results. mean; median: of each value; trimmed: for adapter changes, the
    mean of each value without the smallest and the largest third; for projected gradients, the mean of
    results clipped to the median length. trimmed and median withstand malicious devices if they are less than
    a third."""
    outlier: float = 4.0
    """Scale down results that are this many times longer than the round's median."""
    optimizer: OptimizerName = "adam"
    """sgd, momentum or adam."""
    adam_beta2: float = 0.98
    """Second coefficient of adam."""
    learning_rate: float = 1e-2
    lr_scheduler_type: ScheduleName = "constant"
    warmup_steps: int = 0
    """Steps of linear warm-up."""

    seed: int = 42
    """Seed of the directions, which all devices share, and of the choice of devices per round."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if self.noise and not self.max_grad_norm:
            problems.append("--noise needs --max-grad-norm: the noise is relative to the clipping norm")
        for name, (least, most) in _WITH_NOISE.items():
            if self.noise and not least <= (value := getattr(self, name)) <= most and value:
                problems.append(
                    f"{flag(name)} is {value:g}, with noise it must be from {least:g} to {most:g}"
                )
        if self.noise and self.estimator == "tangent" and not self.share_directions:
            problems.append("--noise needs --share-directions: otherwise each example has noise of its own")
        if self.noise and self.estimator in estimators_with_setting("epsilon") and self.examples != 1:
            problems.append(
                f"--noise with --estimator {self.estimator} needs --examples 1, but it is {self.examples}: "
                "only tangent and exact clip each example"
            )
        if self.loss_normalisation == "token" and (self.noise or self.max_grad_norm):
            problems.append(
                "--loss-normalisation token allows neither --max-grad-norm nor --noise: an example's "
                "weight would depend on other examples"
            )
        if self.warmup_steps > self.steps:
            problems.append(f"--warmup-steps is {self.warmup_steps}, but there are only {self.steps} steps")
        if problems:
            raise ConfigError(
                "These settings can't be used:",
                problems,
                remedy="See `prge fleet serve --help`.",
                code="settings-unusable",
            )

    @property
    def sends_projected_gradients(self) -> bool:
        """Whether devices send projected gradients; otherwise they send the change of their adapter."""
        return ESTIMATORS[self.estimator].has_directions

    @property
    def steps(self) -> int:
        """Number of steps of a device that takes part in every round."""
        return self.rounds * self.local_steps

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a step's projected gradients: [queries], or [queries, examples] with tangent."""
        if self.estimator != "tangent":
            return (self.queries,)
        return (self.queries, 1 if self.share_directions else self.examples)

    @property
    def recipe(self) -> FleetRecipe:
        """The recipe of a run that takes the plan's steps."""
        exact = self.estimator == "exact"
        return FleetRecipe(
            estimator=self.estimator,
            queries=None if exact else self.queries,
            share_directions=self.estimator == "tangent" and self.share_directions,
            epsilon=Recipe.epsilon
            if self.estimator not in estimators_with_setting("epsilon")
            else self.epsilon,
            max_grad_norm=0.0 if exact else self.max_grad_norm,
            max_example_grad_norm=self.max_grad_norm if exact else 0.0,
            batch_size=self.examples,
            loss_normalisation=self.loss_normalisation,
            optimizer=self.optimizer,
            momentum=self.momentum,
            adam_beta2=self.adam_beta2,
            learning_rate=self.learning_rate,
            lr_scheduler_type=self.lr_scheduler_type,
            warmup_steps=self.warmup_steps,
            steps=self.steps,
            seed=self.seed,
        )

    def run_settings(self, bundle: Path, train: Paths, out: Path) -> RunSettings:
        """Return the settings of a `prge run` that takes the plan's steps on a device's rows."""
        return RunSettings(bundle=bundle, train=train, out=out, **self.recipe.to_record())


@dataclass(frozen=True)
class Agreement:
    """A plan and what it applies to.

    Attributes:
        name: the name, which identifies the fleet among others with the same plan.
        plan: how the fleet trains.
        bundle: SHA-256 of the bundle.
        task: SHA-256 of the task; empty without one.
        start: SHA-256 of the adapter and head before the first step; empty if they are the bundle's own.
    """

    name: str
    plan: Plan
    bundle: str
    task: str = ""
    start: str = ""

    @cached_property
    def content(self) -> bytes:
        """The agreement as canonical JSON bytes: equal agreements have equal bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def sha256(self) -> bytes:
        """The first bytes of the SHA-256 of `content`, as messages carry them."""
        return hashlib.sha256(self.content).digest()[:HASH_BYTES]

    @classmethod
    def parse(cls, content: bytes) -> Agreement:
        """Parse the bytes of `content`.

        Raises:
            ConfigError: the bytes are not an agreement, or its settings can't be used.
        """
        try:
            if len(content) > MAX_AGREEMENT_BYTES:
                raise ValueError(f"it has {len(content)} bytes")
            values = parse_json(content)
            plan = _parse_plan(values.pop("plan"))
            agreement = cls(plan=plan, **values)
            if not all(isinstance(value, str) for value in values.values()):
                raise ValueError("a hash is not a string")
            return agreement
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                "The server sent an invalid agreement:",
                [str(error)],
                remedy="Use the same version of prge on both sides.",
                code="agreement-unreadable",
            ) from None


def _parse_plan(content: Any) -> Plan:
    """Parse a plan; raises ConfigError, also for names of the previous version, which give other bytes."""
    names = {item.name for item in fields(Plan)}
    if old_names := sorted(name for name in mapping(content) if current_name(name, names) != name):
        raise ConfigError(
            "The fleet's plan is from another version of prge:",
            [f"this version has no setting {', '.join(old_names)}"],
            remedy="Use the same version of prge on the server and all devices, or start a new fleet in "
            "another folder.",
            code="settings-of-other-version",
        )
    return settings_from_mapping(Plan, content, "the server's plan")


def task_sha256(task: Task | None) -> str:
    """Return the SHA-256 of a task's content; empty without a task."""
    if task is None:
        return ""
    return hashlib.sha256(json.dumps(asdict(task), sort_keys=True).encode()).hexdigest()
