"""The scripts that users start: their working directory, the arguments they pass on, and their errors."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts need bash")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout in a path with a space, whose fake environment prints the arguments of programs."""
    root = tmp_path / "a check out"
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("*.py"))
    (root / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    programs = root / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "prge", "ruff", "mypy", "lint-imports"):
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s|" {name} "$PWD" "$@"; echo\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    stamp = subprocess.run(
        "cksum <pyproject.toml", shell=True, cwd=root, capture_output=True, text=True, check=True
    )
    (root / ".venv" / ".prge-installed").write_text(f"{stamp.stdout.strip()} {root}\n", encoding="utf-8")
    return root


def start(
    checkout: Path, name: str, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(cwd), **environment},
    )


def test_the_demo_passes_its_arguments_on_in_the_callers_folder(checkout: Path, tmp_path: Path) -> None:
    child = start(checkout, "demo.sh", "--out", "my demo", cwd=tmp_path)
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout == f"python|{tmp_path}|{checkout}/scripts/demo.py|--out|my demo|\n"


def test_test_runs_style_types_and_tests_in_the_repository(checkout: Path, tmp_path: Path) -> None:
    child = start(checkout, "test.sh", "-k", "a b", cwd=tmp_path)
    assert (child.returncode, child.stderr) == (0, "")
    lines = child.stdout.splitlines()
    assert [line.split("|")[0] for line in lines] == ["ruff", "ruff", "mypy", "lint-imports", "python"]
    assert all(line.split("|")[1] == str(checkout) for line in lines)
    assert lines[-1].endswith("|-k|a b|")


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], ["-m", "not whole"]),
        (["-x"], ["-m", "not whole", "-x"]),
        (["--all"], []),
        (["--all", "-x"], ["-x"]),
        (["-k", "whole"], ["-k", "whole"]),
        (["tests/test_a.py::test_b"], ["tests/test_a.py::test_b"]),
    ],
)
def test_a_first_tier_runs_unless_all_or_some_are_named(
    checkout: Path, tmp_path: Path, arguments: list[str], passed: list[str]
) -> None:
    last = start(checkout, "test.sh", *arguments, cwd=tmp_path).stdout.splitlines()[-1]
    assert last.partition("--quiet|")[2].split("|")[:-1] == passed


@pytest.mark.parametrize("program", ["ruff", "mypy", "python"])
def test_failure_of_any_part_is_the_failure_of_the_script(
    checkout: Path, tmp_path: Path, program: str
) -> None:
    (checkout / ".venv" / "bin" / program).write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    assert start(checkout, "test.sh", cwd=tmp_path).returncode != 0


@pytest.mark.parametrize("environment", ["elsewhere", "{tmp_path}/elsewhere"])
def test_another_environment_folder(checkout: Path, tmp_path: Path, environment: str) -> None:
    (checkout / ".venv").rename(tmp_path / "elsewhere")
    child = start(checkout, "demo.sh", cwd=tmp_path, PRGE_VENV=environment.format(tmp_path=tmp_path))
    assert child.stdout == f"python|{tmp_path}|{checkout}/scripts/demo.py|\n"


def test_a_changed_pyproject_is_installed_again(checkout: Path, tmp_path: Path) -> None:
    (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    for installs in (1, 0):
        child = start(checkout, "demo.sh", cwd=tmp_path)
        # The fake environment's python prints pip's arguments, which must not mix with the demo's output.
        assert child.stdout == f"python|{tmp_path}|{checkout}/scripts/demo.py|\n"
        assert child.stderr.count("|-m|pip|install|") == installs


def test_a_failed_installation_is_reported_and_tried_again(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".venv" / ".prge-installed").unlink()
    python = '#!/bin/sh\nif [ "$2" = pip ]; then exit 1; fi\n'
    (checkout / ".venv" / "bin" / "python").write_text(python, encoding="utf-8")
    for _ in range(2):
        child = start(checkout, "demo.sh", cwd=tmp_path)
        assert (child.returncode, child.stdout) == (2, "")
        assert "the packages can't be installed" in child.stderr


def test_a_missing_python_is_reported(checkout: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    child = start(checkout, "demo.sh", cwd=tmp_path, PRGE_PYTHON="/bin/false")
    assert child.returncode == 2
    assert child.stderr == "demo.sh: error: PRGE_PYTHON=/bin/false is no Python 3.10 to 3.13\n"
    assert not (checkout / ".venv").exists()


def test_ci_reports_which_tests_a_missing_tool_skips(checkout: Path, tmp_path: Path) -> None:
    """Without permission to install it, a missing tool is no failure."""
    shutil.copytree(SCRIPTS.parent / ".ci", checkout / ".ci")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "basename", "cat", "cksum", "dirname", "env", "g++", "sh"):
        (programs / name).symlink_to(shutil.which(name) or "/bin/true")
    (programs / "id").write_text("#!/bin/sh\necho 1000\n")
    (programs / "id").chmod(0o755)
    environment = {"PATH": str(programs), "HOME": str(tmp_path)}
    child = subprocess.run([checkout / ".ci" / "run"], capture_output=True, text=True, env=environment)
    assert child.returncode == 0, child.stderr
    assert child.stderr.splitlines() == [
        "some tests are skipped: there is no adb aarch64-linux-gnu-g++ qemu-aarch64-static update-binfmts "
        "patchelf ip unshare gpg chromium",
        "no run under emulation: it takes root",
    ]
    assert [line.split("|")[0] for line in child.stdout.splitlines()][-1] == "python"
    (checkout / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    failed = subprocess.run([checkout / ".ci" / "run"], capture_output=True, text=True, env=environment)
    assert failed.returncode == 1 and "emulation" not in failed.stderr


def test_android_refuses_other_flags(checkout: Path, tmp_path: Path) -> None:
    child = start(checkout, "test_android.sh", "--jsn", "x", cwd=tmp_path)
    assert child.returncode == 2 and "usage: scripts/test_android.sh [--emulated]" in child.stderr
