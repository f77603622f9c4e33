"""What the owner of a device allows a fleet to ask of it; kept on the device, in a YAML file.

    estimators: [tangent, antithetic]
    most_steps: 50
    least_noise: 0.8
    most_privacy_epsilon: 4
    only_charging: true
    hours: 22-6

A server can't change it: what its plan asks beyond it is refused with the line of the policy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from device_runner.fleet.agreement import Plan
from device_runner.session.conditions import Condition, Hours
from device_runner.session.settings import WaitFlags
from prge.errors import ConfigError
from prge.learning.estimators.table import EstimatorName, having
from prge.verbs.bounds import bound_problems


@dataclass(frozen=True)
class Policy:
    """What the owner of a device allows."""

    estimators: list[EstimatorName] = field(default_factory=lambda: having("queries"))
    """How steps may get their gradient; with exact the device sends the change of its adapter, which says
    much more of its rows than scalars."""
    most_steps: int = 200
    """Steps of a round."""
    most_examples: int = 64
    """Examples of a step."""
    most_queries: int = 64
    """Random directions of a step."""
    most_seconds: float = 3600.0
    """Of a round, with the steps that the device missed; it ends without an answer then."""
    most_rounds_a_day: int = 10_000
    """Rounds that begin within 24 hours, however they end."""
    hours: str = ""
    """Hours of the device's clock between which rounds may begin, such as 22-6; default: all."""
    most_rows: int | None = None
    """Rows of the training file that a fleet may learn from: the first so many; default: all."""
    least_noise: float = 0.0
    """Refuse plans with less --noise."""
    unit: Literal["row", "owner"] = "row"
    """owner: refuse plans whose noise hides single rows alone, and count epsilon for all rows together."""
    most_privacy_epsilon: float | None = None
    """Take no part in a round after which epsilon of local differential privacy would be higher; needs noise.
    Counts all rounds of all fleets that the device ever began; after one without noise it is infinite."""
    most_delta: float = 1e-5
    """Refuse plans with noise whose epsilon is for a larger delta: it would say little."""
    only_charging: bool = False
    """Wait while the battery is not charged."""
    pause_below_battery: float | None = None
    """Wait while the battery holds less than this many percent and is not charged."""
    pause_above_celsius: float | None = None
    """Wait while the device is hotter than this."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if self.hours and Hours.parse(self.hours, "hours") is None:
            problems.append(f"--hours is {self.hours!r}, must be like 22-6")
        if problems:
            raise ConfigError(
                "the policy can't be used:", problems, remedy="mend the policy file", code="settings-unusable"
            )

    def objections(self, plan: Plan, now: float, rounds_today: int) -> list[str]:
        """Why a device with this policy takes no part in a round of a plan; empty if it does.

        Args:
            plan: what the server asks for.
            now: seconds since the epoch.
            rounds_today: rounds of the last 24 hours.
        """
        asked = {
            "estimators": (plan.estimator, plan.estimator in self.estimators),
            "most_steps": (plan.local_steps, plan.local_steps <= self.most_steps),
            "most_examples": (plan.examples, plan.examples <= self.most_examples),
            "most_queries": (plan.queries, not plan.by_scalars or plan.queries <= self.most_queries),
            "least_noise": (plan.noise, plan.noise >= self.least_noise),
            "unit": (plan.unit, self.unit == "row" or not plan.noise or plan.unit == "owner"),
            "most_rounds_a_day": (rounds_today + 1, rounds_today < self.most_rounds_a_day),
            "most_delta": (plan.delta, not plan.noise or plan.delta <= self.most_delta),
            "most_privacy_epsilon": ("no noise", self.most_privacy_epsilon is None or plan.noise > 0),
        }
        objections = [
            f"the owner's policy has {name} {getattr(self, name)}, the plan asks for {value}"
            for name, (value, allowed) in asked.items()
            if not allowed
        ]
        local = time.localtime(now)
        hours = Hours.parse(self.hours, "hours")
        if hours is not None and not hours.has(local.tm_hour * 60 + local.tm_min):
            clock = time.strftime("%H:%M", local)
            objections.append(f"the owner's policy has hours {self.hours}, it is {clock}")
        return objections

    def conditions(self) -> list[Condition]:
        """What a round waits for."""
        return WaitFlags(
            only_charging=self.only_charging,
            pause_below_battery=self.pause_below_battery,
            pause_above_celsius=self.pause_above_celsius,
        ).conditions()
