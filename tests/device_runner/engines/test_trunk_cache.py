"""Cached hidden states are returned unchanged, or computed again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from device_runner.engines.trunk_cache import TrunkCache
from prge.engine import FloatArray

SHAPE = (3, 4)
BYTES = 32 + 1 + 4 * 12


def values(seed: int = 0, scale: float = 1.0) -> FloatArray:
    return (np.random.default_rng(seed).normal(size=SHAPE) * scale).astype(np.float32)


def cached_states(
    cache: TrunkCache, row: int, computed: FloatArray | None = None, bundle: str = "bundle"
) -> FloatArray:
    """Return the cached states of a row, or else `computed`; without `computed` the row must be cached."""

    def compute() -> FloatArray:
        assert computed is not None, "it isn't kept"
        return computed

    return cache.states(bundle, [np.full(6, row)], SHAPE, compute)


@pytest.fixture
def cache(tmp_path: Path) -> TrunkCache:
    return TrunkCache(tmp_path / "cache", 1 << 20)


def test_cached_states_keep_their_bits(cache: TrunkCache) -> None:
    assert np.array_equal(cached_states(cache, 1, values()), values())
    assert np.array_equal(cached_states(cache, 1), values())
    assert (len(cache), cache.bytes_kept, cache.computed, cache.reused) == (1, BYTES, 1, 1)
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) == BYTES


def test_another_process_reads_the_cached_states(cache: TrunkCache) -> None:
    cached_states(cache, 1, values())
    assert np.array_equal(cached_states(TrunkCache(cache.folder, 1 << 20), 1), values())


def test_bundles_rows_and_precisions_are_distinguished(cache: TrunkCache) -> None:
    half = TrunkCache(cache.folder, 1 << 20, "float16")
    for number, (of, bundle, row) in enumerate(
        [(cache, "bundle", 1), (cache, "other", 1), (cache, "bundle", 2), (half, "bundle", 1)]
    ):
        cached_states(of, row, values(number), bundle)
    assert len(TrunkCache(cache.folder, 1 << 20)) == 4


def test_float16_takes_half_the_storage_and_always_returns_rounded_states(tmp_path: Path) -> None:
    """The values are rounded the first time too: training must not depend on what is cached."""
    cache = TrunkCache(tmp_path / "cache", 1 << 20, "float16")
    first, second = cached_states(cache, 1, values()), cached_states(cache, 1)
    assert first.dtype == second.dtype == np.float32
    assert np.array_equal(first, second) and not np.array_equal(first, values())
    assert cache.bytes_kept == 32 + 1 + 2 * 12


def test_states_beyond_float16_stay_as_they_are(tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 1 << 20, "float16")
    large = values(scale=1e6)
    assert np.array_equal(cached_states(cache, 1, large), large)
    assert np.array_equal(cached_states(cache, 1), large)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:50] + b"\x00\x01" + path.read_bytes()[52:]),
        lambda path: path.write_bytes(b"\x00" * path.stat().st_size),
        lambda path: path.unlink(),
    ],
    ids=["empty", "shorter", "longer", "another bit", "zeros", "gone"],
)
def test_a_damaged_file_is_removed_and_computed_again(
    cache: TrunkCache, damage: Callable[[Path], object]
) -> None:
    cached_states(cache, 1, values())
    (path,) = cache.folder.iterdir()
    damage(path)
    assert np.array_equal(cached_states(cache, 1, values(1)), values(1))
    assert np.array_equal(cached_states(cache, 1), values(1))
    assert len(cache) == 1


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.timeout(10)
def test_reading_the_cache_does_not_block_on_pipes_and_folders(
    cache: TrunkCache, make: Callable[[str], None]
) -> None:
    cached_states(cache, 1, values())
    (path,) = cache.folder.iterdir()
    path.unlink()
    make(str(path))
    make(str(path.with_name(f".{path.name}.partial")))
    again = TrunkCache(cache.folder, 1 << 20)
    assert np.array_equal(cached_states(again, 1, values()), values())
    assert len(again) <= 1


def test_a_file_under_another_name_is_rejected(cache: TrunkCache) -> None:
    cached_states(cache, 1, values(1))
    (first,) = cache.folder.iterdir()
    cached_states(cache, 2, values(2))
    (second,) = (path for path in cache.folder.iterdir() if path != first)
    os.replace(first, second)
    assert np.array_equal(cached_states(cache, 2, values(2)), values(2))
    assert cache.reused == 0


def test_a_full_cache_keeps_its_files(tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 2 * BYTES)
    for number in (0, 1, 2, 0, 1, 2):
        cached_states(cache, number, values(number))
    assert (cache.computed, cache.reused, cache.bytes_kept) == (4, 2, 2 * BYTES)


def test_files_are_removed_when_the_bound_is_lowered(tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 1 << 20)
    for number in range(4):
        cached_states(cache, number, values(number))
    (cache.folder / "note.txt").write_text("left alone")
    (cache.folder / ".abc.states.partial").write_bytes(b"left by a killed process")
    smaller = TrunkCache(cache.folder, 2 * BYTES + 1)
    assert smaller.bytes_kept == 2 * BYTES
    names = [path.name for path in cache.folder.iterdir()]
    assert sum(name.endswith(".states") for name in names) == 2
    assert "note.txt" in names and ".abc.states.partial" not in names


def test_a_cache_of_size_zero_stays_empty(tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 0)
    cached_states(cache, 1, values())
    assert len(cache) == 0


def test_a_storage_that_cannot_be_written_only_disables_the_cache(cache: TrunkCache) -> None:
    cached_states(cache, 1, values())
    (path,) = cache.folder.iterdir()
    path.unlink()
    path.with_name(f".{path.name}.partial").mkdir()
    assert np.array_equal(cached_states(cache, 1, values()), values())
    assert np.array_equal(cached_states(cache, 1, values()), values())
    assert cache.reused == 0
