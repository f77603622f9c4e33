"""`prge doctor`: check what this machine has, what is missing, and which command fixes it.

It needs nothing but Python.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from device_runner.requirements import Check
from prge.cli.settings import parse_settings
from prge.system.memory import memory_info
from prge.system.packages import install, requirement

MIB = 1 << 20
OLDEST_PYTHON, TOO_NEW_PYTHON = (3, 10), (3, 14)
ENOUGH_MEMORY = 512 * MIB
ENOUGH_DISK = 1024 * MIB

# Requirements of training; it needs neither torch nor the torch engine if the native engine works.
REQUIRED = ("python", "numpy", "safetensors", "tokenizers", "PyYAML", "tqdm", "torch", "executorch", "engine")
NOT_NEEDED_BY_NATIVE = ("torch", "engine")
# Packages that are installed if they can be imported, and what needs them.
OPTIONAL_PACKAGES = {
    "jinja2": "chats and reports",
    **dict.fromkeys(("torchao", "transformers", "peft"), "`prge tune` and `prge export`"),
    **dict.fromkeys(("starlette", "uvicorn"), "`prge serve`"),
    "llguidance": "answers in a given format",
    "flwr": "`prge fleet`",
}

# The engine in a process of its own, because a broken build may end it with a signal.
ENGINE_PROBE = """
import json, torch
from executorch.extension.pybindings import _C
names = _C._get_registered_backend_names()
print(json.dumps({"backends": list(names), "threads": _C._threadpool_get_thread_count()}))
"""


@dataclass(frozen=True)
class DoctorSettings:
    """Check what this machine has and what is missing."""

    EXAMPLE: ClassVar = ""

    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; return 0 if `prge run` has all that it needs, otherwise 1."""
    settings = parse_settings(DoctorSettings, argv, "prge doctor")
    checks: list[Check] = []
    for check in examine():
        checks.append(check)
        if not settings.json:
            print(f"{len(checks):>2} {check.state:<8} {check.name:<13} {check.detail}", flush=True)
            if check.remedy:
                print(f"{'':<25}{check.remedy}", flush=True)
    lacking = run_lacks(checks)
    command = pip_command(lacking)
    if settings.json:
        run = {"missing": lacking, "remedy": command}
        print(json.dumps({"checks": [asdict(check) for check in checks], "run": run}, indent=2))
    elif lacking:
        print(f"\n`prge run` lacks {', '.join(lacking)}" + (f": {command}" if command else ""))
    else:
        print("\n`prge run` has all that it needs")
    return 1 if lacking else 0


def examine() -> Iterator[Check]:
    """Yield all checks in order; a check that raises an exception counts as missing."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", _check_python),
        ("prge", _check_prge),
        *[(name, _importer(name)) for name in ("numpy", "safetensors", "tokenizers")],
        *[(name, _finder(name)) for name in ("PyYAML", "tqdm", "torch", "executorch")],
    ]
    for name, check in checks:
        yield _run_check(name, check)
    engine, threads = _check_engine()
    yield engine
    yield threads
    checks = [
        ("native", _check_native),
        ("memory", _check_memory),
        ("disk", _check_disk),
        *[(name, _finder(name, purpose)) for name, purpose in OPTIONAL_PACKAGES.items()],
    ]
    for name, check in checks:
        yield _run_check(name, check)


def run_lacks(checks: Sequence[Check]) -> list[str]:
    """Return the requirements of training that these checks report as missing."""
    missing = {check.name for check in checks if check.state == "missing"}
    native = any(check.name == "native" and check.state == "ok" for check in checks)
    return [name for name in REQUIRED if name in missing and not (native and name in NOT_NEEDED_BY_NATIVE)]


def pip_command(names: Sequence[str]) -> str:
    """Return the command that installs packages in the versions that prge requires, or an empty string."""
    required = [requirement(name) for name in names if name not in ("python", "engine")]
    if "engine" in names and not {"torch", "executorch"} & set(names):
        required += ["--force-reinstall", requirement("torch"), requirement("executorch")]
    return install(required) if required else ""


def _run_check(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        return Check(name, "missing", f"the check failed: {type(error).__name__}: {error}")


def _check_python() -> Check:
    version, version_text = sys.version_info[:2], sys.version.split()[0]
    if OLDEST_PYTHON <= version < TOO_NEW_PYTHON:
        return Check("python", "ok", f"{version_text} at {sys.executable}")
    return Check(
        "python", "missing", f"{version_text} at {sys.executable}", "install Python 3.10, 3.11, 3.12 or 3.13"
    )


def _check_prge() -> Check:
    """Check that the package's own requirements, and so the tested versions, can be read."""
    root = Path(__file__).resolve().parents[1]
    try:
        return Check("prge", "ok", f"{importlib.metadata.version('prge')} in {root}")
    except importlib.metadata.PackageNotFoundError:
        detail = f"in {root}, but not installed: its requirements aren't checked"
        return Check("prge", "warn", detail, f"pip install --no-deps -e {shlex.quote(str(root))}")


def _finder(name: str, purpose: str = "") -> Callable[[], Check]:
    """Return a check that a package is installed, in the version that prge pins if it pins one.

    `purpose` names what needs the package, if training doesn't need it.
    """

    def check() -> Check:
        required = requirement(name)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            needed = f"not installed; needed by {purpose}" if purpose else "not installed"
            return Check(name, "missing", needed, pip_command([name]))
        _, pinned, pin = required.partition("==")
        # A local suffix such as +cpu names a build, not another version.
        if pinned and version.partition("+")[0] != pin:
            return Check(name, "warn", f"{version}, tested with {pin}", install([required]))
        return Check(name, "ok", version)

    return check


def _importer(name: str) -> Callable[[], Check]:
    """Return a check that a small package is installed and can be imported."""

    def check() -> Check:
        installed = _finder(name)()
        if installed.state != "missing":
            try:
                importlib.import_module(name)
            except Exception as error:
                remedy = install(["--force-reinstall", requirement(name)])
                return Check(name, "missing", f"can't be imported: {error}", remedy)
        return installed

    return check


def _check_engine() -> tuple[Check, Check]:
    """Check that ExecuTorch loads and has XNNPACK, and how many threads it will use."""
    unknown = Check("threads", "warn", "unknown without the engine")
    answer = probe_engine()
    if isinstance(answer, str):
        return Check("engine", "missing", answer, pip_command(["engine"])), unknown
    backends = answer["backends"]
    cores = f"{answer['threads']} performance cores of {os.cpu_count()}"
    threads = Check("threads", "ok", cores)
    if "XnnpackBackend" not in backends:
        loads = f"loads, but without XnnpackBackend: it has {', '.join(backends) or 'none'}"
        return Check("engine", "missing", loads, pip_command(["engine"])), threads
    return Check("engine", "ok", f"loads, with {', '.join(sorted(backends))}"), threads


def _check_native() -> Check:
    """Check that the engine without torch is available; compiles it on first use."""
    from device_runner.engines.native.build import library
    from prge.errors import EngineError, as_clause

    try:
        return Check("native", "ok", f"the engine without torch: {library()}")
    except EngineError as error:
        return Check("native", "warn", as_clause(error.what), error.remedy.replace("\n", " "))


def probe_engine() -> dict[str, Any] | str:
    """Return the report of a child process on the engine, or an error message."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", ENGINE_PROBE], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"can't be run: {error}"
    if child.returncode < 0:
        return f"crashes with signal {-child.returncode} while loading"
    if child.returncode:
        lines = child.stderr.strip().splitlines()
        return f"can't be loaded: {lines[-1] if lines else f'exit code {child.returncode}'}"
    report: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return report


def _check_memory() -> Check:
    memory = memory_info()
    if "MemTotal" not in memory:
        return Check("memory", "warn", "unknown: there is no /proc/meminfo")
    available = memory.get("MemAvailable", 0)
    size = f"{available // MIB} MiB available of {memory['MemTotal'] // MIB} MiB"
    if available < ENOUGH_MEMORY:
        return Check("memory", "warn", size, "close other programs; `prge inspect` shows what a bundle needs")
    return Check("memory", "ok", size)


def _check_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    size = f"{free // MIB} MiB free in {Path.cwd()}"
    if free < ENOUGH_DISK:
        return Check("disk", "warn", size, "free some storage before exporting or training here")
    return Check("disk", "ok", size)
