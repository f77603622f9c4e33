"""What a machine reports about itself, as a phone does."""

from __future__ import annotations

import json

from device_runner.session.machine import facts
from prge.system.memory import memory_info


def test_facts_are_of_jsons_types_and_of_this_machine() -> None:
    found = facts()
    assert json.loads(json.dumps(found)) == found
    assert found["threads"] >= 1 and found["flops"] > 1e6
    assert 0 < found["free_bytes"] <= memory_info()["MemTotal"]
    assert {"temperature_celsius", "battery_percent"} <= found["sensors"].keys()
