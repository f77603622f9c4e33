"""`prge doctor`: its checks here, and on machines that lack something."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from device_runner import doctor
from device_runner.doctor import REQUIRED, main, pip_command, run_lacks
from device_runner.requirements import Check
from prge.system.packages import install, requirement

GOOD_ENGINE = {"backends": ["XnnpackBackend"], "threads": 2}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_engine", lambda: GOOD_ENGINE)


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Make these packages appear as not installed."""
    version = importlib.metadata.version

    def look(name: str) -> str:
        if name in missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", look)


def report(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return checks by name and what `prge run` lacks, from the output of `--json`."""
    content = json.loads(capsys.readouterr().out)
    return {check["name"]: check for check in content["checks"]}, content["run"]


def check_of(name: str) -> Check:
    """Return one check, without running later ones."""
    return next(check for check in doctor.examine() if check.name == name)


def test_engine_really_loads_here() -> None:
    answer = doctor.probe_engine()
    assert isinstance(answer, dict), answer
    assert "XnnpackBackend" in answer["backends"]
    assert answer["threads"] >= 1


@pytest.mark.usefixtures("engine")
def test_a_complete_machine_passes_all_checks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: requirement(name).partition("==")[2] or "9"
    )
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = [int(line[:2]) for line in lines[: lines.index("")]]
    assert numbers == list(range(1, len(numbers) + 1))
    assert lines[-1] == "`prge run` has all that it needs"


@pytest.mark.usefixtures("engine")
def test_missing_packages_are_all_reported_with_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "transformers", "jinja2")
    assert main(["--json"]) == 0
    checks, run = report(capsys)
    assert checks["jinja2"]["detail"] == "not installed; needed by chats and reports"
    assert checks["transformers"]["state"] == "missing"
    assert checks["transformers"]["remedy"] == install([requirement("transformers")])
    assert run == {"missing": [], "remedy": ""}


@pytest.mark.usefixtures("engine")
def test_code_1_if_run_lacks_something_and_the_rest_is_still_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "executorch")
    assert main(["--json"]) == 1
    checks, run = report(capsys)
    command = f"pip install {requirement('executorch')}"
    assert checks["executorch"]["remedy"] == command
    assert "flwr" in checks
    assert run == {"missing": ["executorch"], "remedy": command}


@pytest.mark.parametrize(
    ("answer", "state", "message"),
    [
        ("can't be loaded: ImportError: libtorch.so", "missing", "libtorch.so"),
        ({"backends": ["QnnBackend"], "threads": 4}, "missing", "without XnnpackBackend: it has QnnBackend"),
        ({"backends": [], "threads": 4}, "missing", "it has none"),
        (GOOD_ENGINE, "ok", "loads, with XnnpackBackend"),
    ],
)
def test_the_state_of_the_engine_is_reported(
    answer: Any, state: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_engine", lambda: answer)
    engine, threads = check_of("engine"), check_of("threads")
    assert (engine.state, message in engine.detail) == (state, True)
    assert bool(engine.remedy) == (state == "missing")
    assert threads.state == ("warn" if isinstance(answer, str) else "ok")


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("raise ImportError('no such symbol')", "can't be loaded: ImportError: no such symbol"),
        ("import sys; sys.exit(3)", "can't be loaded: exit code 3"),
    ],
)
def test_an_engine_that_ends_its_process_is_reported(
    code: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ENGINE_PROBE", code)
    answer = doctor.probe_engine()
    assert isinstance(answer, str)
    assert output in answer


def test_other_version_than_the_pinned_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.99.0")
    monkeypatch.setattr(doctor, "requirement", lambda name: f"{name}==2.13.0")
    assert check_of("torch") == Check(
        "torch", "warn", "2.99.0, tested with 2.13.0", "pip install torch==2.13.0"
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert check_of("torch").state == "ok"


def test_a_package_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    check = check_of("safetensors")
    assert check.state == "missing"
    assert "--force-reinstall" in check.remedy


@pytest.mark.usefixtures("engine")
def test_a_failing_check_is_reported_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(doctor, "memory_info", fail)
    checks = {check.name: check for check in doctor.examine()}
    assert checks["memory"] == Check("memory", "missing", "the check failed: RuntimeError: unforeseen")
    assert "flwr" in checks


@pytest.mark.parametrize(
    ("version", "state"), [((3, 9), "missing"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 14), "missing")]
)
def test_python_version(version: tuple[int, int], state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    assert check_of("python").state == state


@pytest.mark.usefixtures("engine")
def test_little_memory_and_disk_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_info", lambda: {"MemTotal": 4 << 30, "MemAvailable": 100 << 20})
    assert check_of("memory") == Check(
        "memory",
        "warn",
        "100 MiB available of 4096 MiB",
        "close other programs; `prge inspect` shows what a bundle needs",
    )
    monkeypatch.setattr(doctor, "memory_info", dict)
    assert check_of("memory").state == "warn"
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 20))
    assert check_of("disk").state == "warn"


def test_pip_command() -> None:
    assert pip_command([]) == ""
    assert pip_command(["python"]) == ""
    assert (
        pip_command(["no-such-package", "engine", "torch"])
        == f"pip install no-such-package {requirement('torch')}"
    )
    assert pip_command(["engine"]).startswith("pip install --force-reinstall ")


def test_all_that_training_needs_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_engine", lambda: GOOD_ENGINE)
    names = {check.name for check in doctor.examine()}
    assert run_lacks([Check(name, "missing", "") for name in names]) == list(REQUIRED)


def test_torch_is_not_needed_to_run_where_the_native_engine_is() -> None:
    checks = [Check("torch", "missing", ""), Check("engine", "missing", ""), Check("native", "ok", "")]
    assert run_lacks(checks) == []
    assert run_lacks(checks[:2]) == ["torch", "engine"]


def test_works_without_any_package(tmp_path: Path) -> None:
    """An isolated Python with only this repository's code prints a report."""
    repository = Path(__file__).resolve().parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(repository)!r})\n"
        "from device_runner import doctor; doctor.ENGINE_PROBE = 'import no_such_package'\n"
        "from prge.cli.main import main; sys.exit(main(['doctor']))"
    )
    child = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
    )
    assert (child.returncode, child.stderr) == (1, "")
    assert "`prge run` lacks numpy, safetensors" in child.stdout
    assert f"pip install --no-deps -e {shlex.quote(str(repository))}" in child.stdout
