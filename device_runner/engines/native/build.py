"""Compiling `engine.cpp` against the libraries and headers that the executorch package brings.

    ~/.cache/prge/native/<source, executorch, folder>-<compiler>/libprge_native.so

XDG_CACHE_HOME moves the cache; PRGE_NATIVE_LIBRARY names a library that was built elsewhere; CXX a compiler.
As a command it builds for another machine:

    python -m device_runner.engines.native.build --compiler aarch64-linux-gnu-g++ \\
        --package unpacked-wheel/executorch --run-path '$ORIGIN' libprge_native.so
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prge.errors import EngineError, PrgeError
from prge.host.user_cache import NATIVE, user_cache

SOURCE = Path(__file__).with_name("engine.cpp")
LIBRARY = "libprge_native.so"
COMPILERS = ("g++", "c++", "clang++")
# Kernels and backend register themselves when they are loaded; nothing refers to them.
LINKED = ("executorch", "executorch_kernels_optimized", "executorch_backend_xnnpack", "executorch_threadpool")
BUILD_SECONDS = 600
_ANOTHER_ENGINE = "or use the other engine: --engine torch"


def library() -> Path:
    """The interface's library, compiled now unless it is in the cache.

    Raises:
        EngineError: executorch is not installed or has no libraries to link, there is no compiler, it fails,
            or the cache can't be written.
    """
    given = os.environ.get("PRGE_NATIVE_LIBRARY")
    if given:
        if not Path(given).is_file():
            raise EngineError(
                f"PRGE_NATIVE_LIBRARY names {given}, which is no file",
                remedy="correct it, or unset it",
                code="native-library-missing",
            )
        return Path(given)
    package = stock_package()
    needs = _digest(SOURCE.read_bytes(), _version(package), str(package), platform.machine())
    compiler = find_compiler()
    if compiler is None:
        built = sorted(user_cache(NATIVE).glob(f"{needs}-*/{LIBRARY}"))
        if built:
            return built[0]
        raise EngineError(
            "the native engine has to be compiled once, and there is no compiler: looked for "
            + ", ".join(_compiler_names()),
            remedy="install one (Debian: apt install g++), " + _ANOTHER_ENGINE,
            code="compiler-missing",
        )
    status = compiler.stat()
    path = (
        user_cache(NATIVE) / f"{needs}-{_digest(str(compiler), status.st_size, status.st_mtime_ns)}" / LIBRARY
    )
    if not path.is_file():
        build(str(compiler), package, path, str(package / "lib"))
    return path


def build(compiler: str, package: Path, output: Path, run_path: str) -> None:
    """Compile the interface; `output` appears whole or not at all.

    Args:
        compiler: command of a C++17 compiler.
        package: folder of the executorch package for the machine that the library is for.
        output: file to write.
        run_path: where the library will look for the stock ones; `$ORIGIN` is its own folder.

    Raises:
        EngineError: the package lacks a library, the compiler fails, or the file can't be written.
    """
    lacking = [name for name in LINKED if not (package / "lib" / f"lib{name}.so").is_file()]
    if lacking or not (package / "include").is_dir():
        raise EngineError(
            f"{package} has no libraries to link: lib{(lacking or LINKED)[0]}.so or its headers are missing",
            remedy="install executorch 1.5.1 for Linux, " + _ANOTHER_ENGINE,
            code="libraries-missing",
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as folder:
            made = Path(folder) / LIBRARY
            command = compile_command(compiler, package, made, run_path)
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=BUILD_SECONDS, check=False
            )
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
                said = (lines or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
                raise EngineError(
                    f"the native engine can't be compiled: {said.strip()}",
                    remedy=f"the command was: {shlex.join(command)}\n  correct the compiler, "
                    + _ANOTHER_ENGINE,
                    code="compiler-failed",
                )
            made.replace(output)
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"the compiler {compiler} did not end within {BUILD_SECONDS} seconds",
            remedy=_ANOTHER_ENGINE,
            code="compiler-failed",
        ) from None
    except OSError as error:
        raise EngineError(
            f"the native engine can't be compiled into {output.parent}: {error.strerror or error}",
            remedy="let XDG_CACHE_HOME name a folder that can be written, " + _ANOTHER_ENGINE,
            code="cache-not-writable",
        ) from None


def compile_command(compiler: str, package: Path, output: Path, run_path: str) -> list[str]:
    """The compiler call that `build` makes."""
    headers = package / "include"
    portable = headers / "executorch" / "runtime" / "core" / "portable_type" / "c10"
    return [
        *shlex.split(compiler),
        *"-std=c++17 -O2 -fPIC -shared -pthread -fvisibility=hidden".split(),
        # What the stock libraries were compiled with: it changes types that cross the border.
        *"-DC10_USING_CUSTOM_GENERATED_MACROS -DET_EVENT_TRACER_ENABLED".split(),
        "-isystem",
        str(headers),
        "-isystem",
        str(portable),
        str(SOURCE),
        "-o",
        str(output),
        f"-L{package / 'lib'}",
        "-Wl,--no-as-needed",
        *(f"-l{name}" for name in LINKED),
        "-Wl,--enable-new-dtags",
        f"-Wl,-rpath,{run_path}",
    ]


def stock_package() -> Path:
    """Folder of the installed executorch package; nothing of it is imported.

    Raises:
        EngineError: it is not installed.
    """
    spec = importlib.util.find_spec("executorch")
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (Path(place) / "lib").is_dir():
            return Path(place).resolve()
    raise EngineError(
        "executorch is not installed, or its package has no libraries"
        if spec
        else "executorch is not installed",
        remedy="pip install executorch==1.5.1",
        code="package-missing",
    )


def find_compiler() -> Path | None:
    """The compiler of CXX, or the first one that is installed."""
    for name in _compiler_names():
        path = shutil.which(name)
        if path is not None:
            return Path(path).resolve()
    return None


def _compiler_names() -> Sequence[str]:
    given = os.environ.get("CXX")
    return (given,) if given else COMPILERS


def _version(package: Path) -> str:
    """The package's version file, which names the commit too; its libraries' sizes tell copies apart."""
    version = package / "version.py"
    libraries = (package / "lib" / f"lib{name}.so" for name in LINKED)
    sizes = [library.stat().st_size for library in libraries if library.is_file()]
    return (version.read_text(encoding="utf-8") if version.is_file() else "") + str(sizes)


def _digest(*parts: object) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


def main(argv: Sequence[str]) -> int:
    """Build for this or another machine; see --help."""
    parser = argparse.ArgumentParser(
        "python -m device_runner.engines.native.build", description="Build the native engine."
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--compiler", default=str(find_compiler() or COMPILERS[0]))
    parser.add_argument(
        "--package", type=Path, help="folder of the executorch package; default: the installed"
    )
    parser.add_argument("--run-path", default="$ORIGIN")
    arguments = parser.parse_args(argv)
    try:
        package = arguments.package or stock_package()
        build(arguments.compiler, package, arguments.output.resolve(), arguments.run_path)
    except PrgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
