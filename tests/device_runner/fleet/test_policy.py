"""Tests of the hours and bounds of an owner's policy."""

from __future__ import annotations

import time

import pytest

from device_runner.fleet.agreement import Plan
from device_runner.fleet.policy import Policy
from prge.errors import ConfigError
from tests.refusals import raises

PLAN = Plan()


def _at(hour: int) -> float:
    return time.mktime((2026, 3, 4, hour, 30, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("22-6", [22, 23, 0, 5], [6, 12, 21]),
        ("8-20", [8, 19], [7, 20]),
        ("22:45-6:15", [23, 5], [22, 6]),
        ("", range(24), []),
        ("5-5", [5], []),
    ],
)
def test_hours(hours: str, inside: list[int], outside: list[int]) -> None:
    policy = Policy(hours=hours)
    assert not any(policy.objections(PLAN, _at(hour), 0) for hour in inside)
    for hour in outside:
        (objection,) = policy.objections(PLAN, _at(hour), 0)
        assert objection == f"the owner's policy has hours {hours}, it is {hour:02d}:30"


@pytest.mark.parametrize("hours", ["24-3", "a-b", "7", "7-25", "-3", "3-"])
def test_invalid_hours_are_refused(hours: str) -> None:
    with raises(ConfigError, "settings-unusable", containing="--hours"):
        Policy(hours=hours)


def test_the_default_policy_allows_the_default_plan_but_not_exact() -> None:
    assert Policy().objections(PLAN, _at(12), 0) == []
    assert Policy().objections(Plan(estimator="exact"), _at(12), 0)


def test_a_large_delta_is_refused() -> None:
    """With delta 0.9, any noise would look sufficient."""
    noisy = Plan(noise=1.0, max_grad_norm=1.0, share_directions=True, delta=0.9)
    (objection,) = Policy().objections(noisy, _at(12), 0)
    assert objection == "the owner's policy has most_delta 1e-05, the plan asks for 0.9"


def test_all_objections_are_reported_at_once() -> None:
    policy = Policy(most_steps=1, most_queries=1, most_examples=1, least_noise=1.0)
    assert len(policy.objections(PLAN, _at(12), 0)) == 4
