"""The packages of a runtime: the newest ones of a signed archive, or those of a lock."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from device_runner.android.packages import (
    DEBIAN,
    FLEET_WHEELS,
    WHEELS,
    Archive,
    Lock,
    download_debian,
    read_lock,
)
from device_runner.android.runtime import BundleSettings, build_runtime, default_cache, open_runtime
from prge.errors import ConfigError, PrgeError
from tests.device_runner.android.archives import LATER, LocalArchive, local_archive
from tests.device_runner.android.conftest import need_packages
from tests.refusals import raises


@pytest.mark.parametrize("package", ["prge", "flwr"])
def test_the_pinned_wheels_meet_the_requirements_of_prge_and_flower(package: str) -> None:
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires(package) or []]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    pins = {_plain(line.partition("==")[0]): line.partition("==")[2] for line in WHEELS + FLEET_WHEELS}
    known = [item for item in requirements if _plain(item.name) in pins]
    assert len(known) >= 5
    for item in known:
        assert item.specifier.contains(pins[_plain(item.name)]), f"{package} asks for {item}"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


@pytest.fixture(scope="module")
def archive(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalArchive]:
    """Yield an archive of Debian's packages of the runtime, each with a later version."""
    if shutil.which("gpg") is None:
        pytest.skip("gpg is not installed")
    lock = read_lock(runtime / "runtime.json", "amd64")
    files = download_debian(DEBIAN, "amd64", default_cache(), Archive(), lock)
    with local_archive(tmp_path_factory.mktemp("archive") / "debian") as archive:
        archive.add(files.values())
        yield archive


def settings(folder: Path, archive: LocalArchive, **changes: Any) -> BundleSettings:
    return BundleSettings(
        **{
            "out": folder / "runtime",
            "machine": "amd64",
            "cache": folder / "cache",
            "debian_archive": archive.address,
            "debian_keys": archive.keys,
            **changes,
        }
    )


@pytest.mark.whole
def test_the_newest_packages_are_used_and_a_lock_selects_them_again(
    archive: LocalArchive, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths and paths with spaces work, although the called programs have other working folders."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(archive.keys, "its keys.gpg")
    here = settings(Path(), archive, debian_keys=Path("its keys.gpg"))
    built = build_runtime(here)
    manifest = json.loads((tmp_path / "runtime" / "runtime.json").read_text())
    packages = manifest["packages"]
    assert {name for name in packages["debian"]} == set(DEBIAN)
    assert all(facts["version"].endswith(LATER) for facts in packages["debian"].values())
    assert all(len(facts["sha256"]) == 64 for group in packages.values() for facts in group.values())
    assert {f"{name}=={facts['version']}" for name, facts in packages["wheels"].items()} == set(WHEELS)
    assert "://" not in json.dumps(packages)
    process = subprocess.run(
        ["sh", "runtime/run.sh", "-c", "import numpy, tokenizers, device_runner.run; print('it runs')"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.stdout == "it runs\n", process.stderr
    # With an empty cache, the lock's packages are downloaded again, and compared by their hashes.
    Path("my-lock.json").write_bytes(Path("runtime/runtime.json").read_bytes())
    again = build_runtime(
        settings(Path("else where"), archive, lock=Path("my-lock.json"), debian_keys=Path("its keys.gpg"))
    )
    assert again.tree == built.tree == open_runtime(tmp_path / "else where" / "runtime").tree


@pytest.mark.whole
def test_a_lock_with_versions_that_the_archive_no_longer_has_is_refused(
    archive: LocalArchive, runtime: Path, tmp_path: Path
) -> None:
    with raises(PrgeError, "archive-lacks-versions", containing="libc6 2.") as caught:
        build_runtime(settings(tmp_path, archive, lock=runtime / "runtime.json"))
    assert all(f"{name} " in caught.value.what for name in DEBIAN)
    assert "--debian-archive" in caught.value.remedy and "--lock" in caught.value.remedy
    assert not (tmp_path / "runtime").exists()


@pytest.mark.whole
def test_a_lock_needs_no_archive_for_packages_in_the_cache(runtime: Path, tmp_path: Path) -> None:
    lock = read_lock(runtime / "runtime.json", "amd64")
    files = download_debian(DEBIAN, "amd64", default_cache(), Archive("file:///nowhere"), lock)
    assert {package.name for package in files} == set(DEBIAN)


@pytest.mark.whole
def test_unsigned_or_changed_content_is_refused(archive: LocalArchive, tmp_path: Path) -> None:
    """A changed index, a foreign key, a missing signature and a changed package are refused."""
    copy = LocalArchive(tmp_path / "copy", archive.keys, archive.gpg)
    shutil.copytree(archive.folder, copy.folder)
    signed = copy.release / "InRelease"
    whole = signed.read_text()

    def refusal(keys: Path | None = archive.keys) -> PrgeError:
        with raises(PrgeError, "program-failed") as caught:
            download_debian(["libc6"], "amd64", tmp_path / "cache", Archive(copy.address, keys))
        assert not list(tmp_path.glob("cache/**/*.deb"))
        return caught.value

    signed.write_text(whole.replace("Components: main", "Components: main free"))
    error = refusal()
    assert "apt-get update" in error.what and "signature" in error.what
    assert "--debian-keys" in error.remedy
    signed.write_text(whole)
    assert "public key is not available" in refusal(keys=None).what
    signed.unlink()
    assert "is not signed" in refusal().what
    signed.write_text(whole)
    armored = tmp_path / "keys without an ending"
    armored.write_text(archive.armored())
    assert download_debian(["zlib1g"], "amd64", tmp_path / "else", Archive(copy.address, armored))
    package = next(copy.folder.glob("pool/libc6_*.deb"))
    content = bytearray(package.read_bytes())
    content[-1] ^= 1
    package.write_bytes(content)
    assert "apt-get download" in refusal().what and "Hash Sum mismatch" in refusal().what


@pytest.mark.whole
def test_an_archive_that_lacks_packages_or_does_not_exist_is_reported(
    archive: LocalArchive, tmp_path: Path
) -> None:
    with raises(PrgeError, "archive-lacks-packages", containing="a-name, b-name"):
        names = ["libc6", "b-name", "a-name"]
        download_debian(names, "amd64", tmp_path, Archive(archive.address, archive.keys))
    with raises(PrgeError, "program-failed", containing="--debian-archive"):
        download_debian(["libc6"], "amd64", tmp_path, Archive("http://127.0.0.1:9/none", archive.keys))
    with raises(PrgeError, "archive-keys-missing", containing=str(tmp_path / "nothing")):
        download_debian(["libc6"], "amd64", tmp_path, Archive(archive.address, tmp_path / "nothing"))


@pytest.mark.whole
def test_a_wheel_that_differs_from_the_lock_is_refused(runtime: Path, tmp_path: Path) -> None:
    content = json.loads((runtime / "runtime.json").read_text())
    content["packages"]["wheels"]["tqdm"]["sha256"] = "0" * 64
    (tmp_path / "lock.json").write_text(json.dumps(content))
    with raises(PrgeError, "program-failed", containing="pip download") as caught:
        build_runtime(BundleSettings(out=tmp_path / "out", machine="amd64", lock=tmp_path / "lock.json"))
    assert "HASHES" in caught.value.what and "--lock" in caught.value.remedy


@pytest.mark.parametrize(
    ("content", "code", "value"),
    [
        ("", "lock-unreadable", "lock.json"),
        ("[]", "lock-unreadable", "lock.json"),
        ('{"machine": "amd64"}', "lock-unreadable", "'packages'"),
        ('{"machine": "amd64", "packages": {"debian": {"a": {"version": "-x", "sha256": "0"}}}}',
         "lock-unreadable", "'-x'"),
        ('{"machine": "arm64", "packages": {"debian": {}, "wheels": {}}}', "lock-of-other-machine", "arm64"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_lock_is_refused(tmp_path: Path, content: str, code: str, value: str) -> None:
    path = tmp_path / "lock.json"
    path.write_text(content)
    with raises(ConfigError, code, containing=value):
        read_lock(path, "amd64")


def test_a_lock_of_a_runtime_without_fleets_lacks_their_packages() -> None:
    with raises(ConfigError, "lock-lacks-packages", containing="flwr"):
        Lock(Path("lock"), {}, {}).named(["flwr"], "wheels")


def test_a_missing_lock_is_reported(tmp_path: Path) -> None:
    need_packages()
    with raises(ConfigError, "lock-unreadable", containing="no.json"):
        build_runtime(BundleSettings(out=tmp_path / "out", machine="amd64", lock=tmp_path / "no.json"))
