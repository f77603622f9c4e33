"""`prge watch`: what it refuses before it listens, and when it opens a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_runner import watch
from prge.errors import ConfigError, RunError
from tests.refusals import raises


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, "api-key-in-command", saying="--api-key"):
        watch.main([str(tmp_path), "--api-key=secret"])
    with raises(ConfigError, "settings-unusable", saying="70000"):
        watch.main([str(tmp_path), "--port", "70000"])
    with raises(RunError, "folder-missing", saying=str(tmp_path / "none")):
        watch.main([str(tmp_path / "none"), "--no-open"])
    (tmp_path / "file").touch()
    with raises(RunError, "folder-missing", saying=str(tmp_path / "file")):
        watch.main([str(tmp_path / "file")])
    with raises(ConfigError, "settings-unusable", saying="--host"):
        watch.main([str(tmp_path), "--host", "0.0.0.0", "--no-open"])


def test_a_browser_is_opened_where_it_has_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not watch._has_screen()
    monkeypatch.setenv("DISPLAY", ":0")
    assert watch._has_screen()
