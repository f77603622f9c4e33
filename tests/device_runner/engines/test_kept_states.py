"""States between blocks are kept as they are, in memory or in a file, until the way back takes them."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from device_runner.engines.kept_states import KeptStates
from prge.errors import RunError

STATES = [np.random.default_rng(n).standard_normal((1, 2, 5, 3)).astype(np.float32) for n in range(6)]
NUMBERS = sum(state.size for state in STATES)


def kept(checkpoints: KeptStates) -> list[np.ndarray]:
    checkpoints.begin(len(STATES), NUMBERS)
    return [checkpoints.keep(state) for state in STATES]


@pytest.mark.parametrize("most", [None, 0, 10**6], ids=["no bound", "in a file", "below the bound"])
def test_states_are_kept_to_the_bit(tmp_path: Path, most: int | None) -> None:
    checkpoints = KeptStates("float32", tmp_path, most)
    for _ in range(2):
        for found, state in zip(kept(checkpoints), STATES, strict=True):
            assert found.dtype == np.float32 and found.ctypes.data % 4 == 0
            assert np.array_equal(found, state)
    assert os.listdir(tmp_path) == []


def test_a_state_may_change_once_it_is_kept() -> None:
    checkpoints, state = KeptStates(), STATES[0].copy()
    checkpoints.begin(1, state.size)
    found = checkpoints.keep(state)
    state[:] = 0
    assert np.array_equal(found, STATES[0])


def test_half_the_room_rounds() -> None:
    for found, state in zip(kept(KeptStates("float16")), STATES, strict=True):
        assert found.dtype == np.float16
        np.testing.assert_allclose(found.astype(np.float32), state, rtol=1e-3, atol=1e-7)


def test_a_state_beyond_the_range_of_float16_is_kept_in_float32() -> None:
    checkpoints = KeptStates("float16")
    state = np.array([[[[1e5, -1.0]]]], np.float32)
    checkpoints.begin(1, 2)
    assert np.array_equal(checkpoints.keep(state), state)


@pytest.mark.parametrize("most", [None, 0], ids=["in memory", "in a file"])
def test_memory_is_given_back_after_a_call_and_a_file_is_kept(tmp_path: Path, most: int | None) -> None:
    checkpoints = KeptStates("float32", tmp_path, most)
    room = weakref.ref(kept(checkpoints)[0].base)
    checkpoints.forget()
    assert (room() is None) == (most is None)
    assert all(np.array_equal(f, s) for f, s in zip(kept(checkpoints), STATES, strict=True))


def test_a_larger_call_follows_a_smaller_one(tmp_path: Path) -> None:
    checkpoints = KeptStates("float32", tmp_path, 0)
    checkpoints.begin(1, 2)
    checkpoints.keep(np.zeros((1, 1, 1, 2), np.float32))
    assert all(np.array_equal(f, s) for f, s in zip(kept(checkpoints), STATES, strict=True))


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match="No space left on device") as caught:
        kept(KeptStates("float32", tmp_path, 0))
    assert "free some storage" in str(caught.value.remedy)
    assert os.listdir(tmp_path) == []
