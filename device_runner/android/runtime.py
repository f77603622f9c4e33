"""`prge android bundle`: the folder that a phone needs to run the driver, and nothing else.

    run.sh, job.sh   start Python through the loader below; job.sh leaves a process number and an exit code
    lib/             loader and C libraries, the engine's libraries, and prge's interface over them
    py/, site/       Python, its packages, the driver
    runtime.json     machine, packages with versions and hashes, sha256 of every other file; TREE is the hash
                     of all. It is a lock too, by which another build takes the same packages

Nothing of the phone's own user space is used but a shell: a glibc of its own comes along.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from device_runner.android.packages import (
    DEBIAN,
    FLEET_WHEELS,
    PYTHON,
    WHEELS,
    Archive,
    Machine,
    Package,
    digest,
    download_debian,
    download_wheels,
    read_lock,
    unpack_debian,
)
from device_runner.engines.native.build import LIBRARY, LINKED, build
from prge import __version__
from prge.errors import DeviceError, EngineError, PrgeError, RunError
from prge.files.bundle import file_sha256
from prge.files.documents import read_json
from prge.host.user_cache import user_cache
from prge.verbs.inputs import InputFile
from prge.verbs.outputs import OutputFolder

MANIFEST = "runtime.json"
TREE = "TREE"
HERE = Path(__file__).parent
MEGABYTE = 10**6

_TRIPLETS = {"arm64": "aarch64-linux-gnu", "amd64": "x86_64-linux-gnu"}
_LOADERS = {"arm64": "ld-linux-aarch64.so.1", "amd64": "ld-linux-x86-64.so.2"}
_LIBRARIES = (
    "libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libutil.so.1 libstdc++.so.6 libgcc_s.so.1 "
    "libz.so.1 libexpat.so.1 libffi.so.8 libbz2.so.1.0 liblzma.so.5 libuuid.so.1 "
    # The server's packages import ssl, which they don't use.
    "libssl.so.3 libcrypto.so.3 libzstd.so.1"
).split()
# Parts of Python that the driver never imports, or whose libraries stay at home.
_LEFT_OUT = frozenset(
    "test idlelib ensurepip pydoc_data lib2to3 tkinter turtledemo sqlite3 venv __pycache__ __phello__ "
    "unittest curses dbm xmlrpc wsgiref".split()
)
_LEFT_OUT_EXTENSIONS = ("_hashlib", "_sqlite3", "_curses", "_dbm", "_gdbm", "_tkinter", "readline",
                        "_test", "_xxtestfuzz", "xxlimited", "nis", "_crypt")  # fmt: skip
# Of encrypted connections; it brings a library of 5 MB into every process.
_FLEET_EXTENSIONS = ("_hashlib",)
_DRIVER_LEFT_OUT = ("android", "__pycache__")


@dataclass(frozen=True)
class BundleSettings:
    """Build the folder that a phone needs to run the driver."""

    out: OutputFolder
    """Folder to make."""
    machine: Machine = "arm64"
    """What it is for: arm64 for phones, amd64 for tests and emulators."""
    fleet: bool = False
    """Put in what `prge android fleet join` needs: Flower and its packages."""
    compiler: str | None = None
    """C++ compiler for the machine; default: aarch64-linux-gnu-g++ or x86_64-linux-gnu-g++."""
    lock: InputFile | None = None
    """runtime.json of another runtime: take its packages, by version and hash; default: the newest of
    Debian's release, and the wheels that prge is tested with."""
    debian_archive: str | None = None
    """Address of a Debian archive; default: the one that this machine's APT uses."""
    debian_keys: InputFile | None = None
    """File of the public keys that sign the archive; default: Debian's."""
    cache: OutputFolder | None = None
    """Folder of downloads; default: ~/.cache/prge/android."""


@dataclass(frozen=True)
class Runtime:
    """A built runtime folder."""

    folder: Path
    machine: Machine
    tree: str

    @property
    def megabytes(self) -> float:
        """Size of all its files."""
        return sum(path.stat().st_size for path in files_of(self.folder)) / MEGABYTE


def build_runtime(settings: BundleSettings) -> Runtime:
    """Build a runtime folder; it appears whole or not at all, and is the same for the same packages, driver.

    Raises:
        RunError: the folder exists.
        PrgeError: packages can't be had, or the compiler is missing or fails.
    """
    if settings.out.exists():
        raise RunError(
            f"{settings.out} exists", remedy="remove it, or give another folder", code="folder-exists"
        )
    compiler = settings.compiler or f"{_TRIPLETS[settings.machine]}-g++"
    if shutil.which((shlex.split(compiler) or [""])[0]) is None:
        raise EngineError(
            f"there is no compiler {compiler} for {settings.machine}",
            remedy=f"apt install g++-{_TRIPLETS[settings.machine].replace('_', '-')}, or give --compiler",
            code="compiler-missing",
        )
    # Absolute: programs that are called work in folders of their own.
    cache, out = (settings.cache or default_cache()).absolute(), settings.out.absolute()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    machine, fleet = settings.machine, settings.fleet
    lock = None if settings.lock is None else read_lock(settings.lock, machine)
    archive = Archive(settings.debian_archive, settings.debian_keys)
    debian = download_debian(DEBIAN, machine, cache, archive, lock)
    wheels = download_wheels(WHEELS + FLEET_WHEELS * fleet, machine, cache, lock)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".runtime-") as work:
        system, made = Path(work) / "system", Path(work) / "made"
        system.mkdir()
        unpack_debian(debian.values(), system)
        _take_libraries(system, made / "lib", machine)
        _take_python(system, made / "py", fleet)
        for package, wheel in wheels.items():
            if package.name == "executorch":
                _take_engine(wheel, Path(work) / "engine", made, compiler)
            else:
                _take_wheel(wheel, made / "site")
        _take_driver(made / "site")
        for name in ("run.sh", "job.sh"):
            shutil.copyfile(HERE / name, made / name)
        tree = _seal(made, machine, {"debian": debian, "wheels": wheels})
        made.rename(out)
    return Runtime(settings.out, machine, tree)


def open_runtime(folder: Path) -> Runtime:
    """A runtime folder whose files are what its manifest says.

    Raises:
        DeviceError: it is none, or was changed.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        machine, files = manifest["machine"], manifest["files"]
        tree = (folder / TREE).read_text().strip()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeviceError(
            f"{folder} is no runtime: {error}",
            remedy="build one: prge android bundle runtime",
            code="runtime-unreadable",
        ) from None
    if _hashes(folder) != files or digest((folder / MANIFEST).read_text(encoding="utf-8")) != tree:
        raise DeviceError(
            f"files of {folder} were changed",
            remedy="build it again: prge android bundle",
            code="runtime-changed",
        )
    return Runtime(folder, machine, tree)


def default_cache() -> Path:
    """Where downloads are kept."""
    return user_cache("android")


def files_of(folder: Path) -> Iterator[Path]:
    """Every file under a folder, in order of names."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _take_libraries(system: Path, target: Path, machine: Machine) -> None:
    target.mkdir(parents=True)
    for name in (*_LIBRARIES, _LOADERS[machine]):
        shutil.copyfile(_find(system, name, _TRIPLETS[machine]), target / name)
    shutil.copyfile(target / _LOADERS[machine], target / "ld.so")


def _find(system: Path, name: str, triplet: str) -> Path:
    for where in (f"usr/lib/{triplet}", f"lib/{triplet}", "usr/lib64", "usr/lib", "lib"):
        path = system / where / name
        if path.is_symlink() and os.readlink(path).startswith("/"):
            path = system / os.readlink(path).lstrip("/")
        if path.is_file():
            return path
    raise PrgeError(f"none of Debian's packages has {name}", code="library-missing")


def _take_python(system: Path, target: Path, fleet: bool) -> None:
    (target / "bin").mkdir(parents=True)
    shutil.copyfile(system / f"usr/bin/python{PYTHON}", target / "bin" / "python3")
    extensions = tuple(name for name in _LEFT_OUT_EXTENSIONS if not (fleet and name in _FLEET_EXTENSIONS))
    source, library = system / f"usr/lib/python{PYTHON}", target / "lib" / f"python{PYTHON}"
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        left_out = _LEFT_OUT & set(relative.parts) or relative.parts[0].startswith("config-")
        extension = relative.parts[0] == "lib-dynload" and path.name.startswith(extensions)
        if path.is_file() and not path.is_symlink() and not left_out and not extension:
            _put(path, library / relative)


def _take_wheel(wheel: Path, site: Path) -> None:
    """Unpack a wheel, without tests, headers, and what only its index knows."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            path = PurePosixPath(name)
            if name.endswith(("/", ".pyi", ".h", ".a", ".pxd", ".c", ".cpp")) or "tests" in path.parts:
                continue
            if ".data/" in name or path.parts[0] in ("bin", "tests"):
                continue
            if ".dist-info/" in name and path.name != "METADATA":
                continue
            if ".." in path.parts or path.is_absolute():
                raise DeviceError(f"{wheel} is no wheel to unpack: it holds {name}", code="wheel-unusable")
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_bytes(archive.read(name))


def _take_engine(wheel: Path, work: Path, made: Path, compiler: str) -> None:
    """The stock libraries of the executorch wheel, and prge's own compiled over them."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(("executorch/include/", "executorch/lib/")) and not name.endswith("/"):
                archive.extract(name, work)
        metadata = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        for name in metadata:
            archive.extract(name, made / "site")
    package = work / "executorch"
    for name in LINKED:
        shutil.copyfile(package / "lib" / f"lib{name}.so", made / "lib" / f"lib{name}.so")
    # Headers write their own path into messages; folders' names must not make two builds differ.
    sources = HERE.parent / "native"
    paths = f"'-ffile-prefix-map={work}=.' '-ffile-prefix-map={sources}=.'"
    build(f"{compiler} {paths} -s", package, made / "lib" / LIBRARY, "$ORIGIN")


def driver_hash() -> str:
    """Hash of the driver that a runtime built now would have."""
    return digest("".join(f"{name} {file_sha256(path)}\n" for name, path in _driver().items()))


def _driver() -> dict[str, Path]:
    """Files of the driver by their names in a runtime."""
    root = HERE.parents[1]
    paths = [path for package in ("prge", "device_runner") for path in (root / package).rglob("*")]
    names = {str(path.relative_to(root)): path for path in paths if path.is_file() and path.suffix != ".cpp"}
    return {name: names[name] for name in sorted(names) if not set(_DRIVER_LEFT_OUT) & set(Path(name).parts)}


def _take_driver(site: Path) -> None:
    """The driver's own packages, and what tells their version."""
    for name, path in _driver().items():
        _put(path, site / name)
    about = site / f"prge-{__version__}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Metadata-Version: 2.1\nName: prge\nVersion: {__version__}\n")


def _put(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def _seal(folder: Path, machine: Machine, packages: Mapping[str, Iterable[Package]]) -> str:
    """Write manifest and tree hash, and return the hash."""
    manifest = {
        "machine": machine,
        "prge": __version__,
        "driver": driver_hash(),
        "packages": {
            source: {item.name: {"version": item.version, "sha256": item.sha256} for item in those}
            for source, those in packages.items()
        },
        "files": _hashes(folder),
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    (folder / TREE).write_text(digest(text) + "\n")
    for path in files_of(folder):
        executable = path.name in ("ld.so", "run.sh", "job.sh", "python3")
        path.chmod(0o755 if executable else 0o644)
        os.utime(path, (0, 0))
    return digest(text)


def _hashes(folder: Path, but: Sequence[str] = (MANIFEST, TREE)) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): file_sha256(path)
        for path in files_of(folder)
        if str(path.relative_to(folder)) not in but
    }
