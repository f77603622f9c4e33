"""The content of a runtime, and the detection of changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from device_runner.android.device import check_name
from device_runner.android.runtime import BundleSettings, Runtime, build_runtime, driver_hash, open_runtime
from prge.errors import DeviceError, EngineError, RunError
from tests.refusals import raises

MAX_MEGABYTES, MAX_FLEET_MEGABYTES = 140, 220


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    with raises(RunError, "folder-exists", containing=str(tmp_path)):
        build_runtime(BundleSettings(out=tmp_path))


def test_a_missing_compiler_is_reported(tmp_path: Path) -> None:
    with raises(EngineError, "compiler-missing", containing="nothing++"):
        build_runtime(BundleSettings(out=tmp_path / "runtime", compiler="nothing++"))


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "-flag", "line\nbreak", "back\\slash"])
def test_invalid_names_of_runs_are_refused(name: str) -> None:
    with raises(DeviceError, "name-unusable", containing=ascii(name)):
        check_name(name)


@pytest.mark.whole
def test_a_runtime_is_small_and_a_changed_one_is_refused(runtime: Path, tmp_path: Path) -> None:
    manifest = json.loads((runtime / "runtime.json").read_text())
    opened = open_runtime(runtime)
    assert opened.machine == "amd64" and manifest["driver"] == driver_hash()
    assert opened.megabytes <= MAX_MEGABYTES
    assert not [path for path in runtime.rglob("*") if path.is_symlink() or path.name == "__pycache__"]
    copy = Runtime(tmp_path / "copy", opened.machine, opened.tree)
    shutil.copytree(runtime, copy.folder)
    (copy.folder / "site" / "prge" / "training.py").write_text("pass\n")
    with raises(DeviceError, "runtime-changed", containing=str(copy.folder)):
        open_runtime(copy.folder)
    with raises(DeviceError, "runtime-unreadable", containing=str(tmp_path)):
        open_runtime(tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize(("offset", "seconds"), [("+0530", 19800), ("-0330", -12600), ("+0000", 0), ("?", 0)])
def test_the_time_is_that_of_the_phones_own_clock(
    runtime: Path, tmp_path: Path, offset: str, seconds: int
) -> None:
    (tmp_path / "date").write_text(f"#!/bin/sh\necho '{offset}'\n")
    (tmp_path / "date").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    code = "import time; print(time.localtime().tm_gmtoff)"
    command = ["sh", runtime / "run.sh", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == seconds


@pytest.mark.whole
def test_a_runtime_for_fleets_runs_flower(runtime: Path, tmp_path: Path) -> None:
    """The fixture `runtime` skips this test if no runtime can be built."""
    fleet_runtime = build_runtime(BundleSettings(out=tmp_path / "fleet", machine="amd64", fleet=True))
    assert open_runtime(runtime).megabytes < fleet_runtime.megabytes <= MAX_FLEET_MEGABYTES
    process = subprocess.run(
        [
            "sh",
            fleet_runtime.folder / "run.sh",
            "-c",
            "import device_runner.fleet.network.client; print('it runs')",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stdout) == (0, "it runs\n"), process.stderr
    # This machine has libraries that a phone lacks, so running programs here proves nothing.
    assert _needed(fleet_runtime.folder) <= {path.name for path in fleet_runtime.folder.rglob("*.so*")}


def _needed(folder: Path) -> set[str]:
    """Return the names of the libraries that the native code in a folder is linked to."""
    names = set()
    for path in folder.rglob("*.so*"):
        process = subprocess.run(["readelf", "--dynamic", path], capture_output=True, text=True, check=True)
        names |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", process.stdout))
    return names
