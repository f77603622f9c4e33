"""What `prge android` brings, with a folder of this machine for the phone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from device_runner.android.adb import Adb, Answer
from device_runner.android.command import _send_bundle
from device_runner.android.device import Phone
from prge.bundle import MANIFEST, open_bundle
from prge.errors import BundleError
from tests.bundles import make_bundle


class LocalAdb(Adb):
    """Runs and copies on this machine."""

    def __init__(self) -> None:
        self.serial = "here"

    def shell(self, script: str, seconds: float | None = None) -> Answer:
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr)

    def push(self, local: Path, remote: str) -> None:
        shutil.copytree(local, remote, dirs_exist_ok=True)


@pytest.fixture
def phone(tmp_path: Path) -> Phone:
    return Phone(LocalAdb(), str(tmp_path / "phone"))


def test_a_bundle_goes_as_its_manifest_names_it(tmp_path: Path, phone: Phone) -> None:
    folder = make_bundle(tmp_path / "bundle")
    (folder / "notes.txt").write_text("mine")
    there = Path(_send_bundle(phone, folder))
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert names == {MANIFEST, *open_bundle(folder).manifest["files"]}
    assert open_bundle(there).sha256 == open_bundle(folder).sha256


def test_damaged_weights_stay_here(tmp_path: Path, phone: Phone) -> None:
    folder = make_bundle(tmp_path / "bundle")
    weights = folder / "weights/000.ptd"
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(BundleError, match=r"000\.ptd is not the file"):
        _send_bundle(phone, folder)
    assert not (tmp_path / "phone").exists()
