"""The process of a round, with a small numpy model instead of the engine."""

from __future__ import annotations

from typing import Any

from device_runner.serving import round_process, rounds
from tests.device_runner.numpy_device import Device

if __name__ == "__main__":
    module: Any = rounds
    module.open_engine = Device(has_backward=True).open_engine
    round_process.main()
