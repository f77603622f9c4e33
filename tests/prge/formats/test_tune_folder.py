"""Folders of `prge tune` given in place of a bundle, an adapter or a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from prge.errors import AdapterError, BundleError, RunError
from prge.formats.bundle import open_bundle
from prge.formats.peft import find_adapter
from prge.formats.stored_settings import write_settings
from prge.formats.tune_folder import find_tuning, resolve_bundle, resolve_run
from tests.refusals import raises


def tuning(folder: Path, *parts: str, config: str = "bundle: null\n") -> Path:
    folder.mkdir()
    (folder / "tune.json").write_text("{}")
    (folder / "config.yaml").write_text(config)
    for part in parts:
        (folder / part).mkdir(parents=True)
    return folder


def test_a_tuning_has_a_bundle_a_run_and_an_adapter(tmp_path: Path) -> None:
    folder = tuning(tmp_path / "mine", "bundle", "run/final")
    (folder / "run/final/adapter_config.json").write_text("{}")
    assert resolve_bundle(folder) == folder / "bundle" and resolve_run(folder) == folder / "run"
    assert find_adapter(folder) == folder / "run/final"
    result = find_tuning(folder)
    assert result is not None and result.name == "mine"


def test_a_tuning_of_an_existing_bundle(tmp_path: Path) -> None:
    folder = tuning(tmp_path / "mine", config=f"bundle: {tmp_path / 'other'}\n")
    assert resolve_bundle(folder) == tmp_path / "other"
    with raises(BundleError, "not-a-bundle", containing="other"):
        open_bundle(folder)


def test_the_missing_part_of_an_unfinished_tuning_is_named(tmp_path: Path) -> None:
    folder = tuning(tmp_path / "mine")
    finish = f"Finish it with `prge tune --resume {folder}`."
    for read, part in ((resolve_bundle, "bundle"), (open_bundle, "bundle"), (resolve_run, "run")):
        with raises(RunError, "tuning-unfinished", containing=part) as caught:
            read(folder)
        assert caught.value.remedy == finish
    (folder / "run").mkdir()
    with raises(RunError, "tuning-unfinished", containing="adapter") as caught:
        find_adapter(folder)
    assert caught.value.remedy == finish


def test_damaged_settings_are_reported(tmp_path: Path) -> None:
    folder = tuning(tmp_path / "mine", config="bundle: [")
    with raises(RunError, "settings-unreadable", containing="config.yaml"):
        resolve_bundle(folder)


def test_other_folders_are_not_tunings(tmp_path: Path) -> None:
    assert resolve_bundle(tmp_path) == resolve_run(tmp_path) == tmp_path and find_tuning(tmp_path) is None
    run = tuning(tmp_path / "run")
    (run / "journal.jsonl").write_text("{}\n")
    assert resolve_run(run) == run
    with pytest.raises(AdapterError):
        find_adapter(tmp_path)


def test_paths_outside_of_a_foreign_tuning_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    text = f"bundle: {other}\n"
    folder = tuning(tmp_path / "mine", config=text)
    with raises(RunError, "path-outside", containing=str(other)) as caught:
        resolve_bundle(folder)
    assert f"--bundle {other}" in caught.value.remedy
    write_settings(folder / "config.yaml", text)
    assert resolve_bundle(folder) == other
    for name, read in (("run", resolve_run), ("bundle", resolve_bundle)):
        (folder / "config.yaml").write_text("bundle: null\n")
        (folder / name).symlink_to(other)
        with raises(RunError, "link-outside", containing=name):
            read(folder)
