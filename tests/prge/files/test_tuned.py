"""What is meant by a folder of `prge tune` where a bundle, an adapter or a run is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from prge.errors import AdapterError, BundleError, RunError
from prge.files.bundle import open_bundle
from prge.files.own_settings import write_settings
from prge.files.peft import find_adapter
from prge.files.tuned import bundle_at, run_at, tuning_at
from tests.refusals import raises


def tuning(folder: Path, *parts: str, config: str = "bundle: null\n") -> Path:
    folder.mkdir()
    (folder / "tune.json").write_text("{}")
    (folder / "config.yaml").write_text(config)
    for part in parts:
        (folder / part).mkdir(parents=True)
    return folder


def test_its_own_bundle_its_run_and_its_adapter(tmp_path: Path) -> None:
    folder = tuning(tmp_path / "mine", "bundle", "run/final")
    (folder / "run/final/adapter_config.json").write_text("{}")
    assert bundle_at(folder) == folder / "bundle" and run_at(folder) == folder / "run"
    assert find_adapter(folder) == folder / "run/final"
    found = tuning_at(folder)
    assert found is not None and found.name == "mine"


def test_a_bundle_that_it_was_given(tmp_path: Path) -> None:
    folder = tuning(tmp_path / "mine", config=f"bundle: {tmp_path / 'other'}\n")
    assert bundle_at(folder) == tmp_path / "other"
    with raises(BundleError, "not-a-bundle", saying="other"):
        open_bundle(folder)


def test_what_an_unfinished_one_lacks(tmp_path: Path) -> None:
    folder = tuning(tmp_path / "mine")
    finish = f"finish it with `prge tune --resume {folder}`"
    for ask, what in ((bundle_at, "bundle"), (open_bundle, "bundle"), (run_at, "run")):
        with raises(RunError, "tuning-unfinished", saying=what) as caught:
            ask(folder)
        assert caught.value.remedy == finish
    (folder / "run").mkdir()
    with raises(RunError, "tuning-unfinished", saying="adapter") as caught:
        find_adapter(folder)
    assert caught.value.remedy == finish


def test_damaged_settings_are_told(tmp_path: Path) -> None:
    folder = tuning(tmp_path / "mine", config="bundle: [")
    with raises(RunError, "settings-unreadable", saying="config.yaml"):
        bundle_at(folder)


def test_other_folders_are_what_they_are(tmp_path: Path) -> None:
    assert bundle_at(tmp_path) == run_at(tmp_path) == tmp_path and tuning_at(tmp_path) is None
    run = tuning(tmp_path / "run")
    (run / "journal.jsonl").write_text("{}\n")
    assert run_at(run) == run
    with pytest.raises(AdapterError):
        find_adapter(tmp_path)


def test_a_strangers_bundle_elsewhere_and_links_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    text = f"bundle: {other}\n"
    folder = tuning(tmp_path / "mine", config=text)
    with raises(RunError, "path-outside", saying=str(other)) as caught:
        bundle_at(folder)
    assert f"--bundle {other}" in caught.value.remedy
    write_settings(folder / "config.yaml", text)
    assert bundle_at(folder) == other
    for name, ask in (("run", run_at), ("bundle", bundle_at)):
        (folder / "config.yaml").write_text("bundle: null\n")
        (folder / name).symlink_to(other)
        with raises(RunError, "link-outside", saying=name):
            ask(folder)
