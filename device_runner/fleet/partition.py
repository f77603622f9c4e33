"""Partition rows among simulated devices: evenly, or by class as unevenly as real devices have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from device_runner.fleet.local_round import by_row
from prge.errors import ConfigError
from prge.objectives.examples import Example


def partition_examples(examples: Sequence[Example], devices: int, how: str, seed: int) -> list[list[Example]]:
    """Assign every example to one of the devices; each device gets at least one.

    Args:
        examples: all examples.
        devices: number of devices.
        how: `even`; or `dirichlet:A`, which splits each class by shares from a Dirichlet distribution with
            all parameters A: the smaller A, the fewer classes a device has (Hsu et al. 2019, arXiv
            1909.06335).
        seed: the seed of the shares and the order.

    Returns:
        The examples of each device.

    Raises:
        ConfigError: `how` is something else, there are fewer rows than devices, or the examples have no
            classes.
    """
    rows = by_row(examples)
    if len(rows) < devices:
        raise _error(
            "rows-too-few", f"there are only {len(rows)} rows for {devices} devices", "give fewer --devices"
        )
    generator = np.random.Generator(np.random.Philox(seed))
    order = generator.permutation(len(rows))
    if how == "even":
        return [[each for row in order[device::devices] for each in rows[row]] for device in range(devices)]
    name, _, value = how.partition(":")
    try:
        concentration = float(value)
        if name != "dirichlet" or not 0 < concentration < 1e6:
            raise ValueError
    except ValueError:
        raise _error("partition-unusable", f"--partition is {how!r}", "give even, or dirichlet:0.3") from None
    if any(example.label is None for example in examples):
        raise _error(
            "classes-missing",
            "--partition dirichlet needs rows with classes, but these have none",
            "give --partition even",
        )
    # A row with a class is exactly one example.
    parts_of_devices: list[list[Example]] = [[] for _ in range(devices)]
    for label in sorted({example.label for example in examples if example.label is not None}):
        class_rows = [row for row in order if examples[row].label == label]
        shares = generator.dirichlet(np.full(devices, concentration))
        ends = np.round(np.cumsum(shares) * len(class_rows)).astype(int)
        for device, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            parts_of_devices[device] += [examples[row] for row in class_rows[begin:end]]
    for part in parts_of_devices:
        if not part:
            part.append(max(parts_of_devices, key=len).pop())
    return parts_of_devices


def _error(code: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError("The rows can't be partitioned:", [problem], remedy=remedy, code=code)
