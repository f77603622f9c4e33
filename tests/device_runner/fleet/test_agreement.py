"""Tests of agreements: the hash covers everything, and contradictory plans are refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from device_runner.fleet.agreement import Agreement, Plan
from prge.errors import ConfigError
from tests.refusals import raises

AGREEMENT = Agreement("films", Plan(), "b" * 64, "t" * 64, "")


def test_an_agreement_survives_encoding() -> None:
    assert Agreement.parse(AGREEMENT.content) == AGREEMENT
    assert Agreement.parse(AGREEMENT.content).sha256 == AGREEMENT.sha256


@pytest.mark.parametrize("item", fields(Plan), ids=lambda item: item.name)
def test_every_setting_of_a_plan_is_in_the_hash(item: Any) -> None:
    others: dict[str, Any] = {
        "estimator": "antithetic",
        "combine": "median",
        "optimizer": "sgd",
        "lr_scheduler_type": "linear",
        "share_directions": True,
        "noise": 1.0,
        "unit": "owner",
        "loss_normalisation": "token",
    }
    needed = {"max_grad_norm": 1.0, "share_directions": True} if item.name == "noise" else {}
    value = others.get(item.name) or (getattr(Plan, item.name) or 1) / 2
    if isinstance(getattr(Plan, item.name), int) and item.name not in others:
        value = getattr(Plan, item.name) + 1
    other = replace(AGREEMENT, plan=Plan(**{item.name: value}, **needed))
    assert other.sha256 != replace(AGREEMENT, plan=Plan(**needed)).sha256


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"surprise": 1},
        {"plan": {"surprise": 1}},
        {"plan": {"rounds": "many"}},
        {"plan": {"rounds": 0}},
        {"plan": {"estimator": "magic"}},
        {"plan": None},
    ],
)
def test_invalid_agreements_are_reported(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Agreement.parse(json.dumps({**json.loads(AGREEMENT.content), **change}).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"{}", b" " * 70_000])
def test_invalid_bytes_are_refused(content: bytes) -> None:
    with raises(ConfigError, "agreement-unreadable"):
        Agreement.parse(content)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"noise": 1.0, "share_directions": True}, "--max-grad-norm"),
        ({"noise": 1.0, "max_grad_norm": 1.0}, "--share-directions"),
        ({"noise": 1.0, "max_grad_norm": 1.0, "estimator": "antithetic"}, "--examples"),
        ({"warmup_steps": 500}, "--warmup-steps"),
        ({"rounds": 0}, "--rounds"),
        ({"loss_normalisation": "token", "max_grad_norm": 1.0}, "--loss-normalisation"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
    ],
)
def test_contradictory_plans_are_refused(settings: dict[str, Any], value: str) -> None:
    with raises(ConfigError, "settings-unusable", containing=value):
        Plan(**settings)
