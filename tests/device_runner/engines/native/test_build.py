"""The native engine is compiled once and cached; without a compiler the error has remedies."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from device_runner.engines.native import build
from prge.errors import EngineError
from tests.compilers import needs_compiler
from tests.refusals import raises

CROSS = "aarch64-linux-gnu-g++"

pytestmark = needs_compiler


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PRGE_NATIVE_LIBRARY", raising=False)
    return tmp_path / "cache" / "prge" / "native"


def compiler(folder: Path, script: str) -> str:
    """Write a program that takes the place of the compiler."""
    folder.mkdir(exist_ok=True)
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_library_is_compiled_once_and_needs_no_torch(cache: Path) -> None:
    first = build.library()
    written = first.stat().st_mtime_ns
    assert first.parent.parent == cache and [path.name for path in first.parent.iterdir()] == [build.LIBRARY]
    assert build.library() == first and first.stat().st_mtime_ns == written
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).prge_threads; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, first], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_library_outlives_its_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.library()
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    assert build.library() == first


def test_without_a_compiler_the_remedies_are_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CXX", raising=False)
    with raises(EngineError, "compiler-missing", containing="g++, c++, clang++"):
        build.library()


def test_a_failing_compiler_is_quoted_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "echo 'engine.cpp:1: fatal error: no such header' >&2; exit 1"
    monkeypatch.setenv("CXX", compiler(tmp_path / "tools", script))
    with raises(
        EngineError, "compiler-failed", containing="engine.cpp:1: fatal error: no such header"
    ) as caught:
        build.library()
    assert "-lexecutorch_backend_xnnpack" in str(caught.value) and "--engine torch" in str(caught.value)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_compiler_that_is_killed_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'while [ "$1" != -o ]; do shift; done; echo half > "$2"; kill -9 $$'
    monkeypatch.setenv("CXX", compiler(tmp_path / "tools", script))
    with raises(EngineError, "compiler-failed"):
        build.library()
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_cache_that_cant_be_written_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with raises(EngineError, "cache-not-writable", containing="XDG_CACHE_HOME"):
        build.library()


def test_a_user_without_a_home_is_reported(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Android the shell's user has no entry."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    with raises(EngineError, "cache-without-folder", containing="XDG_CACHE_HOME"):
        build.library()


def test_a_package_without_libraries_is_reported(tmp_path: Path) -> None:
    with raises(EngineError, "libraries-missing", containing="libexecutorch.so"):
        build.build("g++", tmp_path, tmp_path / "out.so", "$ORIGIN")
    assert not (tmp_path / "out.so").exists()


def test_a_library_built_elsewhere_is_accepted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "given.so"
    monkeypatch.setenv("PRGE_NATIVE_LIBRARY", str(library))
    with raises(EngineError, "native-library-missing", containing=str(library)):
        build.library()
    library.write_bytes(b"")
    assert build.library() == library and not cache.exists()


def test_the_command_builds_a_library_that_finds_its_neighbours(cache: Path, tmp_path: Path) -> None:
    """The library finds the libraries that are in its own folder."""
    libraries = build.stock_package() / "lib"
    for name in build.LINKED:
        shutil.copy(libraries / f"lib{name}.so", tmp_path)
    assert build.main([str(tmp_path / build.LIBRARY)]) == 0
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1]);"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libexecutorch' in line})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / build.LIBRARY], capture_output=True, text=True, check=True
    )
    assert done.stdout and all(Path(path).parent == tmp_path for path in done.stdout.split())


def test_any_compiler_and_package_can_be_named() -> None:
    command = build.compile_command(f"{CROSS} -march=armv8.2-a", Path("/arm"), Path("out.so"), "$ORIGIN")
    assert command[:2] == [CROSS, "-march=armv8.2-a"]
    assert "-L/arm/lib" in command and "-Wl,-rpath,$ORIGIN" in command and "/arm/include" in command


def test_a_check_of_the_runtime_that_fails_ends_the_call_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check runs in the calling thread, where the runtime would abort."""
    source = tmp_path / "failing.cpp"
    source.write_text(f"""
        #include "{build.SOURCE}"
        extern "C" __attribute__((visibility("default"))) int fail(int where, char* text, size_t capacity) {{
          return Call(text, capacity).run([&] {{
            if (where == 0) ET_CHECK_MSG(false, "no such place");
            if (where == 1) (void)et::EValue(static_cast<int64_t>(1)).toTensor();
            throw 1;
            return et::Error::Ok;
          }});
        }}
    """)
    monkeypatch.setattr(build, "SOURCE", source)
    package = build.stock_package()
    build.build(str(build.find_compiler()), package, tmp_path / "failing.so", str(package / "lib"))
    code = """
        import ctypes, sys
        fail = ctypes.CDLL(sys.argv[1]).fail
        for where in range(3):
            text = ctypes.create_string_buffer(1000)
            print(fail(where, text, ctypes.c_size_t(1000)), text.value.decode().replace("\\n", "|"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path / "failing.so"],
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, third = done.stdout.splitlines()
    assert first.startswith("-1 [failing.cpp:") and "no such place" in first
    assert second.startswith("-1 [") and "ensor" in second
    assert all("would end the process" in line for line in (first, second))
    assert third == "-1 an exception left the engine|"
    assert done.stderr == ""
