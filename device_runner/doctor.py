"""`prge doctor`: what this machine has, what is missing, and the command that mends it.

Works with nothing but Python.
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
from typing import Any

from device_runner.requirements import Check
from prge.host.memory import memory_info
from prge.host.packages import install, requirement
from prge.verbs.settings import parse_settings

MIB = 1 << 20
OLDEST_PYTHON, TOO_NEW_PYTHON = (3, 10), (3, 14)
ENOUGH_MEMORY = 512 * MIB
ENOUGH_DISK = 1024 * MIB

# What training needs; where the native engine is, it does without torch's.
NEEDED = ("python", "numpy", "safetensors", "tokenizers", "PyYAML", "tqdm", "torch", "executorch", "engine")
NOT_FOR_NATIVE = ("torch", "engine")
# What is there if it can be imported, and who needs it.
FURTHER = {
    "jinja2": "chats and reports",
    **dict.fromkeys(("torchao", "transformers", "peft"), "`prge tune` and `prge export`"),
    **dict.fromkeys(("starlette", "uvicorn"), "`prge serve`"),
    "flwr": "`prge fleet`",
}

# The engine in a process of its own: a broken build may end it with a signal.
ENGINE_PROBE = """
import json, torch
from executorch.extension.pybindings import _C
names = _C._get_registered_backend_names()
print(json.dumps({"backends": list(names), "threads": _C._threadpool_get_thread_count()}))
"""


@dataclass(frozen=True)
class DoctorSettings:
    """Check what this machine has and what is missing."""

    json: bool = False
    """Print one JSON object instead of text."""


def main(argv: Sequence[str]) -> int:
    """Entry of `prge doctor`; 0 if `prge run` has all that it needs, 1 if not."""
    settings = parse_settings(DoctorSettings, argv, "prge doctor")
    checks: list[Check] = []
    for check in examine():
        checks.append(check)
        if not settings.json:
            print(f"{len(checks):>2} {check.state:<8} {check.name:<13} {check.found}", flush=True)
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
    """All checks, one after the other; a check that fails in an unforeseen way is told as missing."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", _check_python),
        ("prge", _check_prge),
        *[(name, _importer(name)) for name in ("numpy", "safetensors", "tokenizers")],
        *[(name, _finder(name)) for name in ("PyYAML", "tqdm", "torch", "executorch")],
    ]
    for name, check in checks:
        yield _survived(name, check)
    engine, threads = _check_engine()
    yield engine
    yield threads
    checks = [
        ("native", _check_native),
        ("memory", _check_memory),
        ("disk", _check_disk),
        *[(name, _finder(name, purpose)) for name, purpose in FURTHER.items()],
    ]
    for name, check in checks:
        yield _survived(name, check)


def run_lacks(checks: Sequence[Check]) -> list[str]:
    """What training needs and these checks miss."""
    missing = {check.name for check in checks if check.state == "missing"}
    native = any(check.name == "native" and check.state == "ok" for check in checks)
    return [name for name in NEEDED if name in missing and not (native and name in NOT_FOR_NATIVE)]


def pip_command(names: Sequence[str]) -> str:
    """The command that installs these packages in the versions that prge asks for; empty if there is none."""
    wanted = [requirement(name) for name in names if name not in ("python", "engine")]
    if "engine" in names and not {"torch", "executorch"} & set(names):
        wanted += ["--force-reinstall", requirement("torch"), requirement("executorch")]
    return install(wanted) if wanted else ""


def _survived(name: str, check: Callable[[], Check]) -> Check:
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
    """Whether the package's own requirements, and so the versions that it is tested with, can be read."""
    root = Path(__file__).resolve().parents[1]
    try:
        return Check("prge", "ok", f"{importlib.metadata.version('prge')} in {root}")
    except importlib.metadata.PackageNotFoundError:
        where = f"in {root}, but not installed: the versions below aren't compared with what it asks for"
        return Check("prge", "warn", where, f"pip install --no-deps -e {shlex.quote(str(root))}")


def _finder(name: str, purpose: str = "") -> Callable[[], Check]:
    """A check that a package is installed, in the version that prge pins if it pins one.

    `purpose` says who needs it, where training doesn't.
    """

    def check() -> Check:
        wanted = requirement(name)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            needed = f"not installed; needed by {purpose}" if purpose else "not installed"
            return Check(name, "missing", needed, pip_command([name]))
        _, pinned, pin = wanted.partition("==")
        # A local suffix such as +cpu names a build, not another version.
        if pinned and version.partition("+")[0] != pin:
            return Check(name, "warn", f"{version}, tested with {pin}", install([wanted]))
        return Check(name, "ok", version)

    return check


def _importer(name: str) -> Callable[[], Check]:
    """A check that a small package is installed and can be imported."""

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
    """Whether ExecuTorch really loads and has XNNPACK, and the threads that it will use."""
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
    """Whether the engine without torch can be had; compiles it, as its first use would."""
    from device_runner.engines.native.build import library
    from prge.errors import EngineError

    try:
        return Check("native", "ok", f"the engine without torch: {library()}")
    except EngineError as error:
        return Check("native", "warn", error.what, error.remedy.replace("\n", " "))


def probe_engine() -> dict[str, Any] | str:
    """What a child process tells of the engine, or in words why it tells nothing."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", ENGINE_PROBE], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"can't be tried: {error}"
    if child.returncode < 0:
        return f"ends its process with signal {-child.returncode} while loading"
    if child.returncode:
        lines = child.stderr.strip().splitlines()
        return f"can't be loaded: {lines[-1] if lines else f'exit code {child.returncode}'}"
    answer: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return answer


def _check_memory() -> Check:
    memory = memory_info()
    if "MemTotal" not in memory:
        return Check("memory", "warn", "unknown: there is no /proc/meminfo")
    available = memory.get("MemAvailable", 0)
    size = f"{available // MIB} MiB available of {memory['MemTotal'] // MIB} MiB"
    if available < ENOUGH_MEMORY:
        return Check("memory", "warn", size, "close other programs; `prge inspect` tells what a bundle needs")
    return Check("memory", "ok", size)


def _check_disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    size = f"{free // MIB} MiB free in {Path.cwd()}"
    if free < ENOUGH_DISK:
        return Check("disk", "warn", size, "free some storage before exporting or training here")
    return Check("disk", "ok", size)
