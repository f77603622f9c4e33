"""What a trunk made of rows comes back as it went in, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from device_runner.engines.trunk_cache import TrunkCache
from prge.contract import TensorSpec

SPECS = (TensorSpec("trunk.0", "float32", (2, 3, 4)), TensorSpec("trunk.1", "float32", (2, 5)))
BYTES = 32 + 1 + 4 * (12 + 5)


def values(seed: int = 0, scale: float = 1.0) -> list[np.ndarray]:  # type: ignore[type-arg]
    random = np.random.default_rng(seed)
    return [(random.normal(size=spec.shape[1:]) * scale).astype(np.float32) for spec in SPECS]


def row(number: int) -> list[np.ndarray]:  # type: ignore[type-arg]
    return [np.full(6, number)]


def same(left: object, right: object) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))  # type: ignore[call-overload]


@pytest.fixture
def cache(tmp_path: Path) -> TrunkCache:
    return TrunkCache(tmp_path / "cache", 1 << 20)


def test_values_come_back_with_the_same_bits(cache: TrunkCache) -> None:
    key = cache.key("program", row(1))
    assert cache.get(key, SPECS) is None
    cache.put(key, values())
    found = cache.get(key, SPECS)
    assert found is not None and same(found, values())
    assert (len(cache), cache.bytes_kept) == (1, BYTES)
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) == BYTES


def test_another_process_finds_them(cache: TrunkCache) -> None:
    key = cache.key("program", row(1))
    cache.put(key, values())
    again = TrunkCache(cache.folder, 1 << 20)
    found = again.get(again.key("program", row(1)), SPECS)
    assert found is not None and same(found, values())


def test_keys_tell_programs_rows_and_precisions_apart(cache: TrunkCache, tmp_path: Path) -> None:
    half = TrunkCache(tmp_path / "half", 1 << 20, "float16")
    mask = [*row(1), np.ones(6, np.int64)]
    keys = [
        cache.key("program", row(1)),
        cache.key("other", row(1)),
        cache.key("program", row(2)),
        cache.key("program", mask),
        half.key("program", row(1)),
    ]
    assert len(set(keys)) == len(keys)


def test_float16_takes_half_the_room_and_gives_what_it_says(tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 1 << 20, "float16")
    key = cache.key("program", row(1))
    cache.put(key, values())
    found = cache.get(key, SPECS)
    assert found is not None and same(found, cache.rounded(values()))
    assert all(value.dtype == np.float32 for value in found)
    assert not same(found, values())
    assert cache.bytes_kept == 32 + 1 + 2 * 17


def test_values_beyond_float16_stay_as_they_are(tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 1 << 20, "float16")
    large = values(scale=1e6)
    key = cache.key("program", row(1))
    cache.put(key, large)
    found = cache.get(key, SPECS)
    assert found is not None and same(found, large)
    assert same(cache.rounded(large), large)


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
def test_a_damaged_file_is_forgotten_and_made_again(cache: TrunkCache, damage: object) -> None:
    key = cache.key("program", row(1))
    cache.put(key, values())
    (path,) = cache.folder.iterdir()
    damage(path)  # type: ignore[operator]
    assert cache.get(key, SPECS) is None
    assert (len(cache), list(cache.folder.iterdir())) == (0, [])
    cache.put(key, values())
    assert cache.get(key, SPECS) is not None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.timeout(10)
def test_what_is_no_file_is_not_waited_for(cache: TrunkCache, make: Callable[[str], None]) -> None:
    key = cache.key("program", row(1))
    make(str(cache.folder / f"{key}.states"))
    make(str(cache.folder / f".{key}.states.partial"))
    again = TrunkCache(cache.folder, 1 << 20)
    assert again.get(key, SPECS) is None
    again.put(key, values())
    assert len(again) <= 1


def test_a_file_under_another_name_is_not_believed(cache: TrunkCache) -> None:
    first, second = (cache.key("program", row(number)) for number in (1, 2))
    cache.put(first, values(1))
    cache.put(second, values(2))
    os.replace(cache.folder / f"{first}.states", cache.folder / f"{second}.states")
    assert cache.get(second, SPECS) is None


def test_values_of_another_cut_are_not_believed(cache: TrunkCache) -> None:
    key = cache.key("program", row(1))
    cache.put(key, values())
    assert cache.get(key, SPECS[:1]) is None


def test_a_full_cache_keeps_what_it_holds(tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 2 * BYTES)
    keys = [cache.key("program", row(number)) for number in range(3)]
    for number, key in enumerate(keys):
        cache.put(key, values(number))
    assert [cache.get(key, SPECS) is not None for key in keys] == [True, True, False]
    assert cache.bytes_kept == 2 * BYTES


def test_files_leave_when_the_bound_is_lowered(tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 1 << 20)
    for number in range(4):
        cache.put(cache.key("program", row(number)), values(number))
    (cache.folder / "note.txt").write_text("left alone")
    (cache.folder / ".abc.states.partial").write_bytes(b"left by a killed process")
    smaller = TrunkCache(cache.folder, 2 * BYTES + 1)
    assert smaller.bytes_kept == 2 * BYTES
    names = [path.name for path in cache.folder.iterdir()]
    assert sum(name.endswith(".states") for name in names) == 2
    assert "note.txt" in names and ".abc.states.partial" not in names


def test_without_room_nothing_is_kept(tmp_path: Path) -> None:
    cache = TrunkCache(tmp_path / "cache", 0)
    cache.put(cache.key("program", row(1)), values())
    assert len(cache) == 0


def test_a_storage_that_refuses_only_costs_the_cache(cache: TrunkCache) -> None:
    key = cache.key("program", row(1))
    (cache.folder / f".{key}.states.partial").mkdir()
    cache.put(key, values())
    assert cache.get(key, SPECS) is None
