"""Tests that every row is on one device, and every device has a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_runner.fleet.partition import partition_examples
from prge.engine import TokenSequence
from prge.errors import ConfigError
from prge.objectives.examples import Example
from tests.refusals import raises


def _examples(count: int, classes: int) -> list[Example]:
    sequence = TokenSequence((1, 2), ())
    return [Example(row, (sequence,), classes, row % classes) for row in range(count)]


@given(
    st.integers(1, 60),
    st.integers(1, 6),
    st.data(),
    st.sampled_from(["even", "dirichlet:0.05", "dirichlet:0.3", "dirichlet:100"]),
    st.integers(0, 2**32),
)
def test_every_row_is_on_one_device_and_every_device_has_one(
    rows: int, classes: int, data: st.DataObject, partition: str, seed: int
) -> None:
    devices = data.draw(st.integers(1, rows))
    dealt = partition_examples(_examples(rows, classes), devices, partition, seed)
    assert len(dealt) == devices and all(dealt)
    assert sorted(example.row for own in dealt for example in own) == list(range(rows))


def test_a_small_parameter_gives_devices_few_classes() -> None:
    def classes(partition: str) -> float:
        dealt = partition_examples(_examples(6000, 6), 20, partition, 0)
        return float(np.mean([len({example.label for example in own}) for own in dealt]))

    assert classes("dirichlet:0.05") < 3 < classes("dirichlet:0.3") < classes("dirichlet:100") == 6
    assert classes("even") == 6


@pytest.mark.parametrize(
    "partition", ["", "dirichlet", "dirichlet:", "dirichlet:0", "dirichlet:nan", "other:1"]
)
def test_unknown_partitions_are_refused(partition: str) -> None:
    with raises(ConfigError, "partition-unusable", containing=repr(partition)):
        partition_examples(_examples(10, 2), 2, partition, 0)


def test_fewer_rows_than_devices_are_refused() -> None:
    with raises(ConfigError, "rows-too-few", containing="3"):
        partition_examples(_examples(3, 2), 4, "even", 0)
