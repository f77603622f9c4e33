from __future__ import annotations

from pathlib import Path

import pytest

from tests.device_runner.fleet.fleets import Fleet
from tests.device_runner.numpy_device import Device


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Return a fleet whose devices allow every estimator."""
    policy = "estimators: [tangent, antithetic, fzoo, exact]\n"
    return Fleet(
        tmp_path, Device(getattr(request, "param", "") == "encoder", has_backward=True), monkeypatch, policy
    )
