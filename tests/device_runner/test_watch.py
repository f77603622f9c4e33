"""`prge watch`: what it refuses before it listens, and when it opens a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_runner import watch
from prge.errors import ConfigError, RunError


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="shows the key to everybody"):
        watch.main([str(tmp_path), "--api-key=secret"])
    with pytest.raises(ConfigError, match="--port is 70000"):
        watch.main([str(tmp_path), "--port", "70000"])
    with pytest.raises(RunError, match="is no folder"):
        watch.main([str(tmp_path / "none"), "--no-open"])
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="is no folder"):
        watch.main([str(tmp_path / "file")])
    with pytest.raises(ConfigError, match="lets other machines ask, and there is no API key"):
        watch.main([str(tmp_path), "--host", "0.0.0.0", "--no-open"])


def test_a_browser_is_opened_where_it_has_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not watch._has_screen()
    monkeypatch.setenv("DISPLAY", ":0")
    assert watch._has_screen()
