"""What a machine reports about itself, as a phone does."""

from __future__ import annotations

import json

from device_runner.session.machine import describe_machine
from prge.system.memory import memory_info


def test_facts_are_of_jsons_types_and_of_this_machine() -> None:
    result = describe_machine()
    assert json.loads(json.dumps(result)) == result
    assert result["threads"] >= 1 and result["flops"] > 1e6
    assert 0 < result["free_bytes"] <= memory_info()["MemTotal"]
    assert {"temperature_celsius", "battery_percent"} <= result["sensors"].keys()
