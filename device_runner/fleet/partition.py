"""Rows dealt out to simulated devices: evenly, or by classes as unevenly as real devices have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from device_runner.fleet.local import by_row
from prge.errors import ConfigError
from prge.learning.examples import Example


def parts(examples: Sequence[Example], devices: int, how: str, seed: int) -> list[list[Example]]:
    """Every example on one of the devices, each of which has one at least.

    Args:
        examples: all there are.
        devices: how many.
        how: `even`; or `dirichlet:A`, which deals out each class by shares from a Dirichlet distribution with
            all parameters A: the smaller, the fewer classes a device has (Hsu et al. 2019, arXiv 1909.06335).
        seed: of the shares and the order.

    Raises:
        ConfigError: another word, fewer examples than devices, or examples without classes.
    """
    rows = by_row(examples)
    if len(rows) < devices:
        raise _error(
            "rows-too-few", f"there are {len(rows)} rows for {devices} devices", "give fewer --devices"
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
            "--partition dirichlet deals out classes, the rows have none",
            "give --partition even",
        )
    # A row with a class is one example.
    dealt: list[list[Example]] = [[] for _ in range(devices)]
    for label in sorted({example.label for example in examples if example.label is not None}):
        of_class = [row for row in order if examples[row].label == label]
        shares = generator.dirichlet(np.full(devices, concentration))
        ends = np.round(np.cumsum(shares) * len(of_class)).astype(int)
        for device, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            dealt[device] += [examples[row] for row in of_class[begin:end]]
    for own in dealt:
        if not own:
            own.append(max(dealt, key=len).pop())
    return dealt


def _error(code: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError("the rows can't be dealt out:", [problem], remedy=remedy, code=code)
