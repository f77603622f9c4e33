"""Verbs as steps of one: what becomes of them when the process ends that started them."""

from __future__ import annotations

from pathlib import Path

from server_export.verbs import wait_until_free


def test_a_folder_that_nobody_holds_is_free(tmp_path: Path) -> None:
    wait_until_free(tmp_path)
    (tmp_path / "run.lock").touch()
    wait_until_free(tmp_path)
