"""Folders of the cache are private to their user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from prge.errors import EngineError
from prge.system.user_cache import NATIVE, user_cache
from tests.refusals import raises

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "prge"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def planted(folder: Path, folder_mode: int) -> Path:
    """Create a file in a folder of the cache with a given mode."""
    path = folder / NATIVE / "hash" / "library.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"code")
    (folder / NATIVE).chmod(folder_mode)
    return path


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_a_new_folder_is_private(cache: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        folder = user_cache(NATIVE)
    finally:
        os.umask(before)
    assert folder == cache / NATIVE
    assert mode(cache) == mode(folder) == 0o700


def test_a_folder_that_others_could_only_read_becomes_private_and_is_kept(cache: Path) -> None:
    path = planted(cache, 0o755)
    user_cache(NATIVE)
    assert mode(cache / NATIVE) == 0o700 and path.read_bytes() == b"code"


@pytest.mark.parametrize("open_mode", [0o775, 0o757, 0o777])
def test_untrusted_content_is_removed(cache: Path, open_mode: int) -> None:
    path = planted(cache, open_mode)
    user_cache(NATIVE)
    assert not path.exists() and mode(cache / NATIVE) == 0o700
    assert [entry.name for entry in cache.iterdir()] == [NATIVE]


@as_root
@pytest.mark.parametrize("which", [".", NATIVE])
def test_a_folder_of_another_user_is_refused(cache: Path, which: str) -> None:
    path = planted(cache, 0o755)
    os.chown(cache / which, 4711, 4711)
    with raises(EngineError, "cache-not-private", containing="4711") as caught:
        user_cache(NATIVE)
    assert "XDG_CACHE_HOME" in caught.value.remedy
    assert path.exists()


def test_a_folder_that_cannot_become_private_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This simulates a file system without modes."""
    path = planted(cache, 0o777)
    make = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda name, *_, **__: (make(name), os.chmod(name, 0o777)))
    with raises(EngineError, "cache-not-private", containing="777"):
        user_cache(NATIVE)
    assert not path.exists()


@as_root
def test_a_folder_of_root_is_used_unchanged(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container image may contain a filled cache."""
    path = planted(cache, 0o755)
    cache.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert user_cache(NATIVE) == path.parents[1] and mode(path.parents[1]) == 0o755


def test_an_uncreatable_folder_is_reported_by_its_user(cache: Path) -> None:
    cache.parent.joinpath("prge").write_text("a file")
    assert user_cache(NATIVE) == cache / NATIVE
