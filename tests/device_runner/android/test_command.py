"""What `prge android` sends, with a folder of this machine as the phone."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from device_runner.android.adb import Adb, AdbOutput
from device_runner.android.command import PushSettings, main
from device_runner.android.device import Phone
from device_runner.android.preflight import examine
from device_runner.android.push import send_bundle
from device_runner.android.remote import RemoteFlags
from prge.errors import BundleError, DeviceError
from prge.formats.bundle import MANIFEST, open_bundle
from prge.formats.documents import parse_yaml
from tests.bundles import make_bundle
from tests.refusals import raises


class LocalAdb(Adb):
    """Runs commands and copies files on this machine."""

    def __init__(self) -> None:
        self.serial = "here"

    def shell(self, script: str, seconds: float | None = None, stdin: str = "") -> AdbOutput:
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, input=stdin)
        return AdbOutput(done.returncode, done.stdout, done.stderr)

    def push(self, local: Path, remote: str) -> None:
        if local.is_dir():
            shutil.copytree(local, remote, dirs_exist_ok=True)
        else:
            shutil.copyfile(local, remote)

    def pull(self, remote: str, local: Path) -> None:
        shutil.copyfile(remote, local)


@pytest.fixture
def phone(tmp_path: Path) -> Phone:
    return Phone(LocalAdb(), str(tmp_path / "phone"))


@pytest.fixture
def dead_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Yield a port of adb's server at which another program listens, which sends nothing."""
    if shutil.which("adb") is None:
        pytest.skip("adb is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            try:
                while True:
                    listener.accept()[0].close()
            except OSError:
                pass

        threading.Thread(target=hang_up, daemon=True).start()
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(listener.getsockname()[1]))
        yield
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("serial", [None, "phone", "127.0.0.1:5555"])
def test_a_dead_adb_server_is_not_reported_as_a_missing_device(dead_server: None, serial: str | None) -> None:
    with raises(DeviceError, "adb-failed", containing="adb devices") as caught:
        Adb(serial)
    assert "adb kill-server" in caught.value.remedy


def test_a_failure_to_list_forwarded_ports_is_an_error(dead_server: None) -> None:
    adb = Adb.__new__(Adb)
    adb.executable, adb.serial, adb.quick_seconds = "adb", "phone", 60.0
    with raises(DeviceError, "adb-failed", containing="adb forward --list"):
        adb.forwards()


def folder_check(phone: Phone) -> tuple[str, str, str]:
    """Return state, finding and remedy of the doctor's check of prge's folder."""
    check = next(check for check in examine(phone) if check.name == "folder")
    return check.state, check.detail, check.remedy


def test_the_doctor_runs_a_file_of_the_folder(tmp_path: Path, phone: Phone) -> None:
    assert folder_check(phone) == ("ok", phone.folder, "")
    assert list(Path(phone.folder).iterdir()) == []
    (tmp_path / "file").write_text("")
    state, _, remedy = folder_check(Phone(LocalAdb(), str(tmp_path / "file" / "prge")))
    assert (state, remedy) == ("missing", "Give a folder that adb's shell can write to with --folder.")


class NoexecAdb(LocalAdb):
    """Runs commands with a folder that is a file system of its own, mounted noexec."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        mount = 'mount -t tmpfs -o noexec none "$1" && exec sh -c "$2"'
        self.prefix = ["unshare", *user, "--mount", "sh", "-c", mount, "sh", str(folder)]

    def shell(self, script: str, seconds: float | None = None, stdin: str = "") -> AdbOutput:
        done = subprocess.run(
            [*self.prefix, script], capture_output=True, text=True, check=False, input=stdin
        )
        return AdbOutput(done.returncode, done.stdout, done.stderr)


def test_the_doctor_detects_a_folder_that_is_mounted_noexec(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    adb = NoexecAdb(tmp_path)
    if (tried := adb.shell("true")).code:
        pytest.skip(f"no namespaces of mounts: {tried.last_line}")
    state, finding, remedy = folder_check(Phone(adb, str(tmp_path / "prge")))
    assert state == "missing" and finding.startswith("stores files but can't run them: ")
    assert "Permission denied" in finding and "noexec" in remedy


def test_files_of_a_bundles_manifest_are_sent(tmp_path: Path, phone: Phone) -> None:
    folder = make_bundle(tmp_path / "bundle")
    (folder / "notes.txt").write_text("mine")
    there = Path(send_bundle(phone, folder))
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert names == {MANIFEST, *open_bundle(folder).manifest["files"]}
    assert open_bundle(there).sha256 == open_bundle(folder).sha256


def test_damaged_weights_are_not_sent(tmp_path: Path, phone: Phone) -> None:
    folder = make_bundle(tmp_path / "bundle")
    weights = folder / "weights/000.ptd"
    weights.write_bytes(bytes(weights.stat().st_size))
    with raises(BundleError, "bundle-file-hash", containing="000.ptd"):
        send_bundle(phone, folder)
    assert not (tmp_path / "phone").exists()


def tuning_of(folder: Path) -> Path:
    """Make a folder like that of `prge tune`, with a placeholder of a bundle and an adapter."""
    make_bundle(folder / "bundle")
    (folder / "run/final").mkdir(parents=True)
    (folder / "run/final/adapter_config.json").write_text("{}")
    (folder / "tune.json").write_text("{}")
    (folder / "config.yaml").write_text("bundle: null\n")
    return folder


def test_a_tuning_becomes_a_run_on_the_phone_that_can_generate(
    tmp_path: Path, phone: Phone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushSettings, "phone", lambda self: phone)
    folder = tuning_of(tmp_path / "mine")
    assert main(["push", str(folder)]) == 0
    run = tmp_path / "phone/runs/mine"
    assert (run / "final/adapter_config.json").is_file()
    bundle = parse_yaml((run / "config.yaml").read_text())["bundle"]
    assert open_bundle(bundle).sha256 == open_bundle(folder / "bundle").sha256
    calls: list[Any] = []

    def attach(self: Phone, arguments: list[str], reads: bool) -> int:
        calls.append((arguments[2:4], reads, parse_yaml(Path(arguments[4]).read_text())))
        return 0

    monkeypatch.setattr(Phone, "attach", attach)
    monkeypatch.setattr(Phone, "require_this_driver", lambda self: None)
    monkeypatch.setattr(RemoteFlags, "phone", lambda self: phone)
    assert main(["chat", "mine", "--temperature", "0.5", "--folder", phone.folder]) == 0
    ((arguments, reads, settings),) = calls
    assert (arguments, reads) == (["chat", "--config"], True)
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
    with raises(DeviceError, "run-exists-on-device", containing="mine"):
        main(["push", str(tuning_of(tmp_path / "mine"))])
    assert [path.name for path in run.iterdir()] == ["journal.jsonl"]
