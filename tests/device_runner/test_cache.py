"""`prge cache`: the size of packed weights and exported programs, and how they are removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prge.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache's folder, which doesn't exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "prge" / "packed"


def fill(folder: Path) -> None:
    """Write two files of 3000 bytes and the lock file."""
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(bytes(2990))
    (folder / "a.checksum").write_bytes(bytes(10))
    (folder / "lock").touch()


def test_files_and_bytes_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(folder)
    programs = folder.with_name("programs")
    fill(programs)
    assert main(["cache"]) == 0
    output = "".join(f"{each}: 2 files, 2.9 KiB (3000 bytes)\n" for each in (folder, programs))
    assert capsys.readouterr().out == output
    assert (folder / "a").is_file()


def test_clearing_reports_what_was_freed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = folder.with_name("programs")
    fill(folder)
    fill(programs)
    assert main(["cache", "--clear"]) == 0
    assert "5.9 KiB (6000 bytes) freed\n" in capsys.readouterr().out
    for each in (folder, programs):
        assert not (each / "a").exists() and not (each / "a.checksum").exists()


def test_json_has_files_and_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(folder)
    for arguments, files, size, freed in (([], 2, 3000, None), (["--clear"], 0, 0, 3000)):
        assert main(["cache", "--json", *arguments]) == 0
        report = json.loads(capsys.readouterr().out)
        empty = {"folder": str(folder.with_name("programs")), "files": 0, "bytes": 0}
        packed = {"folder": str(folder), "files": files, "bytes": size}
        assert report == {"folders": [packed, empty], "freed_bytes": freed}


def test_a_missing_cache_is_not_created(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--clear"]) == 0
    assert "0 bytes freed" in capsys.readouterr().out
    assert not folder.exists()


def test_a_missing_home_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert main(["cache"]) == 2
    assert "Set XDG_CACHE_HOME to a folder" in capsys.readouterr().err


def test_neither_torch_nor_an_engine_is_needed(folder: Path) -> None:
    code = (
        "import sys; sys.modules.update(torch=None, executorch=None); "
        "from prge.cli.main import main; sys.exit(main(['cache']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (
        0,
        f"{folder}: 0 files, 0 bytes\n{folder.with_name('programs')}: 0 files, 0 bytes\n",
    ), done.stderr
