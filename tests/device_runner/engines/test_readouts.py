"""The padded length of a sequence follows from its targets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from device_runner.engines.readouts import LogProbabilities, PooledStates
from prge.engine import Target, TokenSequence
from prge.formats.chain import MASKED, Bounds

TARGETS = (Target(18, 1, 1.0, 0), Target(8, 1, 1.0, 0))
SEQUENCES = [TokenSequence((1,) * 90, TARGETS), TokenSequence((1,) * 90), TokenSequence((1,) * 120)]


@pytest.fixture
def blocks() -> Any:
    chain = SimpleNamespace(bounds=Bounds(tokens=300, context=300, chunk=100), blocks=[], head_start=0)
    return SimpleNamespace(chain=chain)


def test_a_decoders_sequence_is_as_long_as_its_last_target_needs(blocks: Any) -> None:
    assert LogProbabilities(blocks, SEQUENCES).lengths.tolist() == [24, 8, 8]


def test_an_encoders_sequence_is_as_long_as_its_tokens_and_its_padding_is_masked(blocks: Any) -> None:
    readout = PooledStates(blocks, SEQUENCES)
    assert readout.lengths.tolist() == [96, 96, 120]
    (mask,) = readout.masks(np.array([[0, 1]]), 96).values()
    assert mask.shape == (1, 2, 1, 1, 96)
    assert not mask[..., :90].any() and (mask[..., 90:] == MASKED).all()
