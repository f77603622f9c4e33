"""Compiles `engine.cpp` against the libraries and headers of the executorch package.

    ~/.cache/prge/native/<source, executorch, folder>-<compiler>/libprge_native.so

XDG_CACHE_HOME moves the cache; PRGE_NATIVE_LIBRARY names a library that was built elsewhere; CXX names a
compiler. As a command, the module builds for another machine:

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
from prge.system.user_cache import NATIVE, user_cache

SOURCE = Path(__file__).with_name("engine.cpp")
LIBRARY = "libprge_native.so"
COMPILERS = ("g++", "c++", "clang++")
# Kernels and backend register themselves when they are loaded; no symbol refers to them.
LINKED = ("executorch", "executorch_kernels_optimized", "executorch_backend_xnnpack", "executorch_threadpool")
BUILD_SECONDS = 600
_ANOTHER_ENGINE = "or use the other engine: --engine torch."


def library() -> Path:
    """Return the path of the interface's library, after compiling it unless it is cached.

    Raises:
        EngineError: executorch is not installed or has no libraries to link, the compiler is missing or
            fails, or the cache can't be written.
    """
    configured = os.environ.get("PRGE_NATIVE_LIBRARY")
    if configured:
        if not Path(configured).is_file():
            raise EngineError(
                f"PRGE_NATIVE_LIBRARY is {configured}, which is not a file.",
                remedy="Set it to a library, or unset it.",
                code="native-library-missing",
            )
        return Path(configured)
    package = stock_package()
    key = _digest(SOURCE.read_bytes(), _version(package), str(package), platform.machine())
    compiler = find_compiler()
    if compiler is None:
        built = sorted(user_cache(NATIVE).glob(f"{key}-*/{LIBRARY}"))
        if built:
            return built[0]
        raise EngineError(
            "The native engine must be compiled once, and no compiler was found: looked for "
            + ", ".join(_compiler_names())
            + ".",
            remedy="Install one (Debian: apt install g++), " + _ANOTHER_ENGINE,
            code="compiler-missing",
        )
    status = compiler.stat()
    path = (
        user_cache(NATIVE) / f"{key}-{_digest(str(compiler), status.st_size, status.st_mtime_ns)}" / LIBRARY
    )
    if not path.is_file():
        build(str(compiler), package, path, str(package / "lib"))
    return path


def build(compiler: str, package: Path, output: Path, run_path: str) -> None:
    """Compile the interface; `output` appears complete or not at all.

    Args:
        compiler: command of a C++17 compiler.
        package: folder of the executorch package for the target machine.
        output: library to write.
        run_path: where the library looks for the stock libraries; `$ORIGIN` is its own folder.

    Raises:
        EngineError: the package lacks a library, the compiler fails, or the file can't be written.
    """
    missing = [name for name in LINKED if not (package / "lib" / f"lib{name}.so").is_file()]
    if missing or not (package / "include").is_dir():
        raise EngineError(
            f"{package} has no libraries to link: lib{(missing or LINKED)[0]}.so or its headers are missing.",
            remedy="Install executorch 1.5.1 for Linux, " + _ANOTHER_ENGINE,
            code="libraries-missing",
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as folder:
            library_path = Path(folder) / LIBRARY
            command = compile_command(compiler, package, library_path, run_path)
            process = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=BUILD_SECONDS, check=False
            )
            if process.returncode:
                lines = [line for line in process.stderr.splitlines() if "error" in line.lower()]
                reason = (
                    lines or process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
                )[0]
                raise EngineError(
                    f"The native engine can't be compiled: {reason.strip()}",
                    remedy=f"The command was: {shlex.join(command)}\n  Fix the compiler, " + _ANOTHER_ENGINE,
                    code="compiler-failed",
                )
            library_path.replace(output)
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"The compiler {compiler} did not finish within {BUILD_SECONDS} seconds.",
            remedy="Use the other engine: --engine torch.",
            code="compiler-failed",
        ) from None
    except OSError as error:
        raise EngineError(
            f"The native engine can't be compiled into {output.parent}: {error.strerror or error}",
            remedy="Set XDG_CACHE_HOME to a writable folder, " + _ANOTHER_ENGINE,
            code="cache-not-writable",
        ) from None


def compile_command(compiler: str, package: Path, output: Path, run_path: str) -> list[str]:
    """Return the compiler command of `build`."""
    headers = package / "include"
    portable = headers / "executorch" / "runtime" / "core" / "portable_type" / "c10"
    return [
        *shlex.split(compiler),
        *"-std=c++17 -O2 -fPIC -shared -pthread -fvisibility=hidden".split(),
        # The defines of the stock libraries, which change types that both sides share.
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
    """Return the folder of the installed executorch package without importing it.

    Raises:
        EngineError: the package is not installed or has no libraries.
    """
    spec = importlib.util.find_spec("executorch")
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / "lib").is_dir():
            return Path(location).resolve()
    raise EngineError(
        "executorch is not installed, or its package has no libraries."
        if spec
        else "executorch is not installed.",
        remedy="pip install executorch==1.5.1",
        code="package-missing",
    )


def find_compiler() -> Path | None:
    """Return the compiler that CXX names, or the first one that is installed."""
    for name in _compiler_names():
        path = shutil.which(name)
        if path is not None:
            return Path(path).resolve()
    return None


def _compiler_names() -> Sequence[str]:
    configured = os.environ.get("CXX")
    return (configured,) if configured else COMPILERS


def _version(package: Path) -> str:
    """Return the package's version file, with its commit, and the sizes of its libraries."""
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
    """Build the library for this or another machine; see --help."""
    parser = argparse.ArgumentParser(
        "python -m device_runner.engines.native.build", description="Build the native engine."
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--compiler", default=str(find_compiler() or COMPILERS[0]))
    parser.add_argument(
        "--package", type=Path, help="folder of the executorch package; default: the installed one"
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
