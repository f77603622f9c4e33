"""The summary of a run as it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prge.files.documents import read_json
from prge.files.run_folder import SUMMARY
from prge.running.training_flags import TrainingFlags
from prge.running.watching import Watcher


def test_it_tells_what_a_pause_waits_for_and_for_how_long(tmp_path: Path) -> None:
    def told() -> tuple[Any, Any, Any]:
        summary: Any = read_json(tmp_path / SUMMARY)
        return summary["run"]["status"], summary["run"]["waits_for"], summary["train"]["paused_seconds"]

    settings = TrainingFlags(bundle=tmp_path, train=tmp_path, out=tmp_path, steps=10, quiet=True)
    with Watcher(settings, 0, lambda step: step, lambda: ({}, {})) as watcher:
        assert told() == ("running", None, 0)
        watcher.on_wait("too hot: 40.0 degrees Celsius, the limit is 39")
        assert told() == ("running", "too hot: 40.0 degrees Celsius, the limit is 39", 0)
        watcher.on_wait("not charging: it waits for a charger")
        assert told()[1] == "not charging: it waits for a charger"
        watcher.on_pause(2.5)
        assert told() == ("running", None, 2.5)
        watcher.on_wait("not charging: it waits for a charger")
    assert told() == ("stopped early", None, 2.5)
