"""Facts about the machine that trains, measured on the machine itself."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from device_runner.engines.native import runtime
from device_runner.session.sensors import Sensors
from prge.formats.run_folder import environment
from prge.system.memory import memory_info

_WIDTH, _SECONDS = 256, 0.2


def describe_machine() -> dict[str, Any]:
    """Return facts about this machine as JSON values.

    These are the native engine's threads, available memory in bytes (None: unknown), float32 operations per
    second, readings of sensors, and the `meta` block of run.json.

    Raises:
        EngineError: the native engine can't be built or loaded.
    """
    runtime.prepare()
    return {
        "threads": runtime.set_threads(None),
        "free_bytes": memory_info().get("MemAvailable"),
        "flops": measure_flops(),
        "sensors": Sensors().record(),
        "where": environment(),
    }


def measure_flops() -> float:
    """Return the float32 operations per second of a numpy matrix product: an estimate of training speed."""
    matrix = np.ones((_WIDTH, _WIDTH), np.float32)
    product = matrix @ matrix
    begin, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - begin) < _SECONDS:
        np.matmul(matrix, matrix, out=product)
        count += 1
    return 2 * _WIDTH**3 * count / seconds
