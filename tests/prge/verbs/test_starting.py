"""Verbs as steps of one: what becomes of them when the process ends that started them."""

from __future__ import annotations

from pathlib import Path

import yaml

from prge.verbs.starting import configured, wait_until_free


def test_settings_go_into_a_file_that_the_verb_reads(tmp_path: Path) -> None:
    path = tmp_path / "settings" / "run.yaml"
    given = {"bundle": Path("b"), "columns": ("a=b", "c=--d"), "quiet": False, "threads": None}
    assert configured("android run", given, path) == ["android", "run", "--config", str(path)]
    assert yaml.safe_load(path.read_text()) == {"bundle": "b", "columns": ["a=b", "c=--d"], "quiet": False}


def test_a_folder_that_nobody_holds_is_free(tmp_path: Path) -> None:
    wait_until_free(tmp_path)
    (tmp_path / "run.lock").touch()
    wait_until_free(tmp_path)
