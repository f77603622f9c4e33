"""What the owner of a device allows a fleet to do on it; stored on the device, in a YAML file.

    estimators: [tangent, antithetic]
    most_steps: 50
    least_noise: 0.8
    most_privacy_epsilon: 4
    only_charging: true
    hours: 22-6

A server can't change the policy: the device refuses a plan that exceeds it, and names the setting.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from device_runner.fleet.agreement import Plan
from device_runner.session.constraints import Constraint, Hours
from device_runner.session.settings import WaitFlags
from prge.cli.bounds import bound_problems
from prge.errors import ConfigError
from prge.training.estimators.table import EstimatorName, estimators_with_setting


@dataclass(frozen=True)
class Policy:
    """What the owner of a device allows."""

    estimators: list[EstimatorName] = field(default_factory=lambda: estimators_with_setting("queries"))
    """Allowed estimators. With exact, the device sends the change of its adapter, which reveals much more
    about its rows than projected gradients."""
    most_steps: int = 200
    """Most steps per round."""
    most_examples: int = 64
    """Most examples per step."""
    most_queries: int = 64
    """Most random directions per step."""
    most_seconds: float = 3600.0
    """Most seconds per round, including the replay of missed steps; then the round ends without a result."""
    most_rounds_a_day: int = 10_000
    """Most rounds that may begin within 24 hours, however they end."""
    hours: str = ""
    """Hours of the device's clock between which rounds may begin, such as 22-6; default: all."""
    most_rows: int | None = None
    """Use only the first so many rows of the training file; default: all."""
    least_noise: float = 0.0
    """Refuse plans with less --noise."""
    unit: Literal["row", "owner"] = "row"
    """owner: refuse plans whose noise protects only single rows, and compute epsilon for all rows
    together."""
    most_privacy_epsilon: float | None = None
    """Refuse a round after which epsilon of local differential privacy would be higher; needs noise. Counts
    all rounds of all fleets that the device ever began; a round without noise makes epsilon infinite."""
    most_delta: float = 1e-5
    """Refuse plans with noise and a larger delta, whose epsilon would mean little."""
    only_charging: bool = False
    """Wait while the battery is not charging."""
    pause_below_battery: float | None = None
    """Wait while the battery is below this many percent and not charging."""
    pause_above_celsius: float | None = None
    """Wait while the device is hotter than this."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if self.hours and Hours.parse(self.hours, "hours") is None:
            problems.append(f"--hours is {self.hours!r}, must be like 22-6")
        if problems:
            raise ConfigError(
                "The policy can't be used:",
                problems,
                remedy="Correct the policy file.",
                code="settings-unusable",
            )

    def objections(self, plan: Plan, now: float, rounds_today: int) -> list[str]:
        """Return why a device with this policy refuses a round of a plan; empty if it takes part.

        Args:
            plan: what the server asks for.
            now: seconds since the epoch.
            rounds_today: rounds begun in the last 24 hours.
        """
        checks = {
            "estimators": (plan.estimator, plan.estimator in self.estimators),
            "most_steps": (plan.local_steps, plan.local_steps <= self.most_steps),
            "most_examples": (plan.examples, plan.examples <= self.most_examples),
            "most_queries": (
                plan.queries,
                not plan.sends_projected_gradients or plan.queries <= self.most_queries,
            ),
            "least_noise": (plan.noise, plan.noise >= self.least_noise),
            "unit": (plan.unit, self.unit == "row" or not plan.noise or plan.unit == "owner"),
            "most_rounds_a_day": (rounds_today + 1, rounds_today < self.most_rounds_a_day),
            "most_delta": (plan.delta, not plan.noise or plan.delta <= self.most_delta),
            "most_privacy_epsilon": ("no noise", self.most_privacy_epsilon is None or plan.noise > 0),
        }
        objections = [
            f"the owner's policy has {name} {getattr(self, name)}, the plan asks for {value}"
            for name, (value, is_allowed) in checks.items()
            if not is_allowed
        ]
        local = time.localtime(now)
        hours = Hours.parse(self.hours, "hours")
        if hours is not None and not hours.has(local.tm_hour * 60 + local.tm_min):
            clock = time.strftime("%H:%M", local)
            objections.append(f"the owner's policy has hours {self.hours}, it is {clock}")
        return objections

    def constraints(self) -> list[Constraint]:
        """Return the conditions that a round waits for."""
        return WaitFlags(
            only_charging=self.only_charging,
            pause_below_battery=self.pause_below_battery,
            pause_above_celsius=self.pause_above_celsius,
        ).constraints()
