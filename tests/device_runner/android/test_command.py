"""What `prge android` brings, with a folder of this machine for the phone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from device_runner.android.adb import Adb, Answer
from device_runner.android.command import PushSettings, main
from device_runner.android.device import Phone
from device_runner.android.jobs import send_bundle
from device_runner.android.speaking import AndroidChatSettings, chat_on
from prge.errors import BundleError, DeviceError
from prge.files.bundle import MANIFEST, open_bundle
from prge.files.documents import parse_yaml
from tests.bundles import make_bundle


class LocalAdb(Adb):
    """Runs and copies on this machine."""

    def __init__(self) -> None:
        self.serial = "here"

    def shell(self, script: str, seconds: float | None = None) -> Answer:
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr)

    def push(self, local: Path, remote: str) -> None:
        if local.is_dir():
            shutil.copytree(local, remote, dirs_exist_ok=True)
        else:
            shutil.copyfile(local, remote)


@pytest.fixture
def phone(tmp_path: Path) -> Phone:
    return Phone(LocalAdb(), str(tmp_path / "phone"))


def test_a_bundle_goes_as_its_manifest_names_it(tmp_path: Path, phone: Phone) -> None:
    folder = make_bundle(tmp_path / "bundle")
    (folder / "notes.txt").write_text("mine")
    there = Path(send_bundle(phone, folder))
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert names == {MANIFEST, *open_bundle(folder).manifest["files"]}
    assert open_bundle(there).sha256 == open_bundle(folder).sha256


def test_damaged_weights_stay_here(tmp_path: Path, phone: Phone) -> None:
    folder = make_bundle(tmp_path / "bundle")
    weights = folder / "weights/000.ptd"
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(BundleError, match=r"000\.ptd is not the file"):
        send_bundle(phone, folder)
    assert not (tmp_path / "phone").exists()


def tuning_of(folder: Path) -> Path:
    """A folder as `prge tune` leaves it, of a bundle that isn't real, and an adapter."""
    make_bundle(folder / "bundle")
    (folder / "run/final").mkdir(parents=True)
    (folder / "run/final/adapter_config.json").write_text("{}")
    (folder / "tune.json").write_text("{}")
    (folder / "config.yaml").write_text("bundle: null\n")
    return folder


def test_a_tuning_is_a_run_there_that_can_speak(
    tmp_path: Path, phone: Phone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushSettings, "phone", lambda self: phone)
    folder = tuning_of(tmp_path / "mine")
    assert main(["push", str(folder)]) == 0
    run = tmp_path / "phone/runs/mine"
    assert (run / "final/adapter_config.json").is_file()
    bundle = parse_yaml((run / "config.yaml").read_text())["bundle"]
    assert open_bundle(bundle).sha256 == open_bundle(folder / "bundle").sha256
    told: list[Any] = []

    def attach(self: Phone, words: list[str], reads: bool) -> int:
        told.append((words[2:4], reads, parse_yaml(Path(words[4]).read_text())))
        return 0

    monkeypatch.setattr(Phone, "attach", attach)
    assert chat_on(phone, AndroidChatSettings(names=("mine",), temperature=0.5)) == 0
    ((words, reads, settings),) = told
    assert (words, reads) == (["chat", "--config"], True)
    assert (settings["bundle"], settings["adapter"]) == (bundle, [f"mine={run}"])
    assert settings["temperature"] == 0.5
    assert not [*(tmp_path / "phone/tmp").iterdir()]


def test_a_run_of_the_same_name_is_not_overwritten(
    tmp_path: Path, phone: Phone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushSettings, "phone", lambda self: phone)
    run = tmp_path / "phone/runs/mine"
    run.mkdir(parents=True)
    (run / "journal.jsonl").write_text("{}\n")
    with pytest.raises(DeviceError, match="has a run mine of its own"):
        main(["push", str(tuning_of(tmp_path / "mine"))])
    assert [path.name for path in run.iterdir()] == ["journal.jsonl"]
