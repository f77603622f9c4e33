"""Where packages of a runtime come from: the newest that an archive signs."""

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
    download_debian,
)
from device_runner.android.runtime import BundleSettings, build_runtime, default_cache, open_runtime
from prge.errors import PrgeError
from tests.device_runner.android.archives import LATER, LocalArchive, local_archive


@pytest.mark.parametrize("who", ["prge", "flwr"])
def test_the_pinned_wheels_are_what_prge_and_flower_ask_for(who: str) -> None:
    try:
        asked = [Requirement(line) for line in importlib.metadata.requires(who) or []]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{who} is not installed")
    pins = {_plain(line.partition("==")[0]): line.partition("==")[2] for line in WHEELS + FLEET_WHEELS}
    known = [item for item in asked if _plain(item.name) in pins]
    assert len(known) >= 5
    for item in known:
        assert item.specifier.contains(pins[_plain(item.name)]), f"{who} asks for {item}"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


@pytest.fixture(scope="module")
def archive(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalArchive]:
    """Debian's packages of the runtime, each with a later version."""
    if shutil.which("gpg") is None:
        pytest.skip("gpg is not installed")
    files = download_debian(DEBIAN, "amd64", default_cache(), Archive())
    with local_archive(tmp_path_factory.mktemp("archive") / "debian") as made:
        made.add(files.values())
        yield made


def settings(place: Path, archive: LocalArchive, **changes: Any) -> BundleSettings:
    return BundleSettings(
        **{
            "out": place / "runtime",
            "machine": "amd64",
            "cache": place / "cache",
            "debian_archive": archive.address,
            "debian_keys": archive.keys,
            **changes,
        }
    )


@pytest.mark.whole
def test_the_newest_packages_are_taken(
    archive: LocalArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With paths of all kinds: what is called on the way works in folders of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(archive.keys, "its keys.gpg")
    here = settings(Path(), archive, debian_keys=Path("its keys.gpg"))
    built = build_runtime(here)
    manifest = json.loads((tmp_path / "runtime" / "runtime.json").read_text())
    packages = manifest["packages"]
    assert {name for name in packages["debian"]} == set(DEBIAN)
    assert all(facts["version"].endswith(LATER) for facts in packages["debian"].values())
    assert all(len(facts["sha256"]) == 64 for kind in packages.values() for facts in kind.values())
    assert {f"{name}=={facts['version']}" for name, facts in packages["wheels"].items()} == set(WHEELS)
    assert "://" not in json.dumps(packages)
    told = subprocess.run(
        ["sh", "runtime/run.sh", "-c", "import numpy, tokenizers, device_runner.run; print('it runs')"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.stdout == "it runs\n", told.stderr
    # From another cache it is the same.
    again = build_runtime(settings(Path("else where"), archive, debian_keys=Path("its keys.gpg")))
    assert again.tree == built.tree == open_runtime(tmp_path / "else where" / "runtime").tree


@pytest.mark.whole
def test_what_a_signature_does_not_vouch_for_is_refused(archive: LocalArchive, tmp_path: Path) -> None:
    """A changed index, a foreign key, no signature, a changed package: nothing of them is used."""
    copy = LocalArchive(tmp_path / "copy", archive.keys, archive._gpg)
    shutil.copytree(archive.folder, copy.folder)
    signed = copy.release / "InRelease"
    whole = signed.read_text()

    def refusal(keys: Path | None = archive.keys) -> PrgeError:
        with pytest.raises(PrgeError) as caught:
            download_debian(["libc6"], "amd64", tmp_path / "cache", Archive(copy.address, keys))
        assert not list(tmp_path.glob("cache/**/*.deb"))
        return caught.value

    signed.write_text(whole.replace("Components: main", "Components: main free"))
    error = refusal()
    assert error.what.startswith("apt-get update failed") and "signature" in error.what
    assert "name the keys that sign yours with --debian-keys" in error.remedy
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
    assert refusal().what.startswith("apt-get download failed") and "Hash Sum mismatch" in refusal().what


@pytest.mark.whole
def test_an_archive_that_lacks_packages_or_is_not_there(archive: LocalArchive, tmp_path: Path) -> None:
    with pytest.raises(PrgeError, match="lacks packages: a-name, b-name"):
        names = ["libc6", "b-name", "a-name"]
        download_debian(names, "amd64", tmp_path, Archive(archive.address, archive.keys))
    with pytest.raises(PrgeError, match="is the network there"):
        download_debian(["libc6"], "amd64", tmp_path, Archive("http://127.0.0.1:9/none", archive.keys))
    with pytest.raises(PrgeError, match="there is no file"):
        download_debian(["libc6"], "amd64", tmp_path, Archive(archive.address, tmp_path / "nothing"))
