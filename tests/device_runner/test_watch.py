"""`prge watch`: refusals before the server listens, and when a browser is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from device_runner import watch
from prge.errors import ConfigError, RunError
from tests.refusals import raises


def test_unusable_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, "api-key-in-command", containing="--api-key"):
        watch.main([str(tmp_path), "--api-key=secret"])
    with raises(ConfigError, "settings-unusable", containing="70000"):
        watch.main([str(tmp_path), "--port", "70000"])
    with raises(RunError, "folder-missing", containing=str(tmp_path / "none")):
        watch.main([str(tmp_path / "none"), "--no-open"])
    (tmp_path / "file").touch()
    with raises(RunError, "folder-missing", containing=str(tmp_path / "file")):
        watch.main([str(tmp_path / "file")])
    with raises(ConfigError, "settings-unusable", containing="--host"):
        watch.main([str(tmp_path), "--host", "0.0.0.0", "--no-open"])


class Listening:
    """A server that starts and ends at once."""

    def __init__(self, app: object, worker: object, begun: Callable[[], None], ending: object) -> None:
        self.begun = begun

    def run(self, sockets: object) -> None:
        """Run the server."""
        self.begun()


def test_a_browser_is_opened_if_there_is_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("device_runner.serving.uvicorn_server.Server", Listening)
    watch.main([str(tmp_path)])
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    watch.main([str(tmp_path), "--no-open"])
    assert opened == []
    watch.main([str(tmp_path)])
    (url,) = opened
    assert url.startswith("http://127.0.0.1:") and url.endswith("/training")
