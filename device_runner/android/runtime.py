"""`prge android bundle`: build the folder that a phone needs to run the driver.

    run.sh, job.sh   start Python through the loader below; job.sh records a process number and an exit code
    lib/             loader and C libraries, the engine's libraries, and prge's interface to them
    py/, site/       Python, its packages, the driver
    runtime.json     machine, packages with versions and hashes, SHA-256 of every other file; TREE is the hash
                     of all. Another build can use it as a lock, for the same packages

The runtime needs nothing of the phone's own user space except a shell: it has its own glibc.
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
from typing import ClassVar

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
from prge.cli.inputs import InputFile
from prge.cli.outputs import OutputFolder
from prge.errors import DeviceError, EngineError, PrgeError, RunError
from prge.formats.bundle import file_sha256
from prge.formats.documents import read_json
from prge.system.user_cache import user_cache

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
# Parts of Python that the driver never imports, or whose libraries the runtime lacks.
_LEFT_OUT = frozenset(
    "test idlelib ensurepip pydoc_data lib2to3 tkinter turtledemo sqlite3 venv __pycache__ __phello__ "
    "unittest curses dbm xmlrpc wsgiref".split()
)
_LEFT_OUT_EXTENSIONS = ("_hashlib", "_sqlite3", "_curses", "_dbm", "_gdbm", "_tkinter", "readline",
                        "_test", "_xxtestfuzz", "xxlimited", "nis", "_crypt")  # fmt: skip
# Needed for encrypted connections; loads a library of 5 MB into every process.
_FLEET_EXTENSIONS = ("_hashlib",)
_DRIVER_LEFT_OUT = ("android", "__pycache__")


@dataclass(frozen=True)
class BundleSettings:
    """Build the folder that a phone needs to run the driver."""

    EXAMPLE: ClassVar = "runtime"

    out: OutputFolder
    """Folder to create."""
    machine: Machine = "arm64"
    """Architecture: arm64 for phones, amd64 for tests and emulators."""
    fleet: bool = False
    """Include Flower and its packages, which `prge android fleet join` needs."""
    compiler: str | None = None
    """C++ compiler for the machine; default: aarch64-linux-gnu-g++ or x86_64-linux-gnu-g++."""
    lock: InputFile | None = None
    """runtime.json of another runtime, whose packages to use, by version and hash; default: the newest
    packages of Debian's release, and the wheels that prge is tested with."""
    debian_archive: str | None = None
    """Address of a Debian archive; default: the archive that this machine's APT uses."""
    debian_keys: InputFile | None = None
    """File of the public keys that sign the archive; default: Debian's."""
    cache: OutputFolder | None = None
    """Folder for downloads; default: ~/.cache/prge/android."""


@dataclass(frozen=True)
class Runtime:
    """A built runtime folder."""

    folder: Path
    machine: Machine
    tree: str

    @property
    def megabytes(self) -> float:
        """Size of all files, in units of 10^6 bytes."""
        return sum(path.stat().st_size for path in files_of(self.folder)) / MEGABYTE


def build_runtime(settings: BundleSettings) -> Runtime:
    """Build a runtime folder, whole or not at all.

    Equal packages and an equal driver give equal bytes.

    Raises:
        RunError: the folder exists.
        PrgeError: packages can't be downloaded, or the compiler is missing or fails.
    """
    if settings.out.exists():
        raise RunError(
            f"{settings.out} already exists.",
            remedy="Remove it, or give another folder.",
            code="folder-exists",
        )
    triplet = _TRIPLETS[settings.machine]
    compiler = settings.compiler or f"{triplet}-g++"
    if shutil.which((shlex.split(compiler) or [""])[0]) is None:
        raise EngineError(
            f"There is no compiler {compiler} for {settings.machine}.",
            remedy=f"Install one (Debian: apt install g++-{triplet.replace('_', '-')}), or give --compiler.",
            code="compiler-missing",
        )
    # Absolute paths, since the programs that are called have other working folders.
    cache, out = (settings.cache or default_cache()).absolute(), settings.out.absolute()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    machine, fleet = settings.machine, settings.fleet
    lock = None if settings.lock is None else read_lock(settings.lock, machine)
    archive = Archive(settings.debian_archive, settings.debian_keys)
    debian = download_debian(DEBIAN, machine, cache, archive, lock)
    wheels = download_wheels(WHEELS + FLEET_WHEELS * fleet, machine, cache, lock)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".runtime-") as work:
        system, folder = Path(work) / "system", Path(work) / "made"
        system.mkdir()
        unpack_debian(debian.values(), system)
        _copy_libraries(system, folder / "lib", machine)
        _copy_python(system, folder / "py", fleet)
        for package, wheel in wheels.items():
            if package.name == "executorch":
                _add_engine(wheel, Path(work) / "engine", folder, compiler)
            else:
                _unpack_wheel(wheel, folder / "site")
        _copy_driver(folder / "site")
        for name in ("run.sh", "job.sh"):
            shutil.copyfile(HERE / name, folder / name)
        tree = _seal(folder, machine, {"debian": debian, "wheels": wheels})
        folder.rename(out)
    return Runtime(settings.out, machine, tree)


def open_runtime(folder: Path) -> Runtime:
    """Open a runtime folder, and compare its files with the hashes of its manifest.

    Raises:
        DeviceError: the folder is not a runtime, or was changed.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        machine, files = manifest["machine"], manifest["files"]
        tree = (folder / TREE).read_text().strip()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeviceError(
            f"{folder} is not a runtime: {error}",
            remedy="Build one: prge android bundle runtime.",
            code="runtime-unreadable",
        ) from None
    if _hashes(folder) != files or digest((folder / MANIFEST).read_text(encoding="utf-8")) != tree:
        raise DeviceError(
            f"Files of {folder} were changed.",
            remedy="Build it again: prge android bundle.",
            code="runtime-changed",
        )
    return Runtime(folder, machine, tree)


def default_cache() -> Path:
    """Return the default folder of downloads."""
    return user_cache("android")


def files_of(folder: Path) -> Iterator[Path]:
    """Iterate over all files below a folder, sorted by path."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _copy_libraries(system: Path, target: Path, machine: Machine) -> None:
    """Copy the C libraries and the loader of Debian's packages."""
    target.mkdir(parents=True)
    for name in (*_LIBRARIES, _LOADERS[machine]):
        shutil.copyfile(_find(system, name, _TRIPLETS[machine]), target / name)
    shutil.copyfile(target / _LOADERS[machine], target / "ld.so")


def _find(system: Path, name: str, triplet: str) -> Path:
    """Return the file of a library in Debian's unpacked packages; raises PrgeError."""
    for where in (f"usr/lib/{triplet}", f"lib/{triplet}", "usr/lib64", "usr/lib", "lib"):
        path = system / where / name
        if path.is_symlink() and os.readlink(path).startswith("/"):
            path = system / os.readlink(path).lstrip("/")
        if path.is_file():
            return path
    raise PrgeError(f"None of Debian's packages has the library {name}.", code="library-missing")


def _copy_python(system: Path, target: Path, fleet: bool) -> None:
    """Copy Python and its standard library, without the parts that the driver doesn't need."""
    (target / "bin").mkdir(parents=True)
    shutil.copyfile(system / f"usr/bin/python{PYTHON}", target / "bin" / "python3")
    extensions = tuple(name for name in _LEFT_OUT_EXTENSIONS if not (fleet and name in _FLEET_EXTENSIONS))
    source, library = system / f"usr/lib/python{PYTHON}", target / "lib" / f"python{PYTHON}"
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        left_out = _LEFT_OUT & set(relative.parts) or relative.parts[0].startswith("config-")
        extension = relative.parts[0] == "lib-dynload" and path.name.startswith(extensions)
        if path.is_file() and not path.is_symlink() and not left_out and not extension:
            _copy_file(path, library / relative)


def _unpack_wheel(wheel: Path, site: Path) -> None:
    """Unpack a wheel, without tests, headers, scripts and most metadata."""
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
                raise DeviceError(f"{wheel} has the path {name}, which is unsafe.", code="wheel-unusable")
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_bytes(archive.read(name))


def _add_engine(wheel: Path, work: Path, folder: Path, compiler: str) -> None:
    """Add the stock libraries of the executorch wheel, and compile prge's own library against them."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(("executorch/include/", "executorch/lib/")) and not name.endswith("/"):
                archive.extract(name, work)
        metadata = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        for name in metadata:
            archive.extract(name, folder / "site")
    package = work / "executorch"
    for name in LINKED:
        shutil.copyfile(package / "lib" / f"lib{name}.so", folder / "lib" / f"lib{name}.so")
    # Headers compile their own path into messages, which would make builds in other folders differ.
    sources = HERE.parent / "native"
    paths = f"'-ffile-prefix-map={work}=.' '-ffile-prefix-map={sources}=.'"
    build(f"{compiler} {paths} -s", package, folder / "lib" / LIBRARY, "$ORIGIN")


def driver_hash() -> str:
    """Return the hash of the driver that is installed on this computer."""
    return digest("".join(f"{name} {file_sha256(path)}\n" for name, path in _driver().items()))


def _driver() -> dict[str, Path]:
    """Return the files of the driver by their paths in a runtime."""
    root = HERE.parents[1]
    paths = [path for package in ("prge", "device_runner") for path in (root / package).rglob("*")]
    names = {str(path.relative_to(root)): path for path in paths if path.is_file() and path.suffix != ".cpp"}
    return {name: names[name] for name in sorted(names) if not set(_DRIVER_LEFT_OUT) & set(Path(name).parts)}


def _copy_driver(site: Path) -> None:
    """Copy the driver's packages, and write the metadata with their version."""
    for name, path in _driver().items():
        _copy_file(path, site / name)
    about = site / f"prge-{__version__}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Metadata-Version: 2.1\nName: prge\nVersion: {__version__}\n")


def _copy_file(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def _seal(folder: Path, machine: Machine, packages: Mapping[str, Iterable[Package]]) -> str:
    """Write the manifest and the tree hash, set modes and times, and return the hash."""
    manifest = {
        "machine": machine,
        "prge": __version__,
        "driver": driver_hash(),
        "packages": {
            source: {item.name: {"version": item.version, "sha256": item.sha256} for item in items}
            for source, items in packages.items()
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


def _hashes(folder: Path, excluded: Sequence[str] = (MANIFEST, TREE)) -> dict[str, str]:
    """Return the SHA-256 of the files in a folder, by relative path."""
    return {
        str(path.relative_to(folder)): file_sha256(path)
        for path in files_of(folder)
        if str(path.relative_to(folder)) not in excluded
    }
