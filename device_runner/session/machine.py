"""What the machine that trains is and can do, as the driver itself finds it there."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from device_runner.engines.native import runtime
from device_runner.session.sensors import Sensors
from prge.formats.run_folder import environment
from prge.system.memory import memory_info

_WIDTH, _SECONDS = 256, 0.2


def facts() -> dict[str, Any]:
    """Threads of the native engine, free memory in bytes (None: unknown), operations in float32 a second,
    readings of sensors, and the `meta` block of run.json; of JSON's types.

    Raises:
        EngineError: the native engine can't be had or doesn't load.
    """
    runtime.prepare()
    return {
        "threads": runtime.set_threads(None),
        "free_bytes": memory_info().get("MemAvailable"),
        "flops": flops(),
        "sensors": Sensors().record(),
        "where": environment(),
    }


def flops() -> float:
    """Operations a second of numpy's product of matrices in float32: a first idea of how fast training is."""
    matrix = np.ones((_WIDTH, _WIDTH), np.float32)
    product = matrix @ matrix
    begin, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - begin) < _SECONDS:
        np.matmul(matrix, matrix, out=product)
        count += 1
    return 2 * _WIDTH**3 * count / seconds
