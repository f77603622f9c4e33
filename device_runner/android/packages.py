"""Packages that a runtime is made of: Debian's and Python's, by name, version and sha256 in a lock file.

They come through this machine's own pip and APT: `apt-get download` with a private configuration that knows
other architectures and releases, so that nothing of the system is touched.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prge.bundle import file_sha256
from prge.errors import ConfigError, PrgeError

Machine = Literal["arm64", "amd64"]
LOCK = Path(__file__).with_name("lock.json")
RELEASE = "trixie"
PYTHON = "3.13"
SECONDS = 1800
_WHEEL_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

DEBIAN = (
    "libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libuuid1 "
    "python3.13-minimal libpython3.13-minimal libpython3.13-stdlib"
).split()
WHEELS = "numpy tokenizers safetensors executorch PyYAML tqdm Jinja2 MarkupSafe".split()
# What a device of a fleet needs besides: of what flwr asks for, the packages that a SuperNode imports.
FLEET_DEBIAN = ("libssl3t64", "libzstd1")
FLEET_WHEELS = (
    "flwr alembic annotated-doc annotated-types anyio certifi cffi charset-normalizer click "
    "cryptography fastapi grpcio grpcio-health-checking h11 httpcore httpx idna iterators Mako "
    "packaging pathspec protobuf pycryptodome pydantic pydantic_core Pygments requests rich shellingham "
    "SQLAlchemy starlette tomli tomli_w typer typing-inspection typing_extensions urllib3 uvicorn "
    "watchfiles"
).split()


@dataclass(frozen=True)
class Package:
    """One package in one version; without a version, the newest."""

    name: str
    version: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Lock:
    """All packages of a runtime for one machine, or those that fleets add."""

    debian: Sequence[Package]
    wheels: Sequence[Package]

    def __add__(self, other: Lock) -> Lock:
        return Lock([*self.debian, *other.debian], [*self.wheels, *other.wheels])


def read_lock(path: Path, machine: Machine, fleet: bool = False) -> Lock:
    """The packages that a lock file names for a machine; with `fleet` those that fleets add.

    Raises:
        ConfigError: it is no lock file, or lacks the machine.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))[machine]
        content = content["fleet"] if fleet else content
        debian, wheels = (
            [Package(name, **content[kind][name]) for name in content[kind]] for kind in ("debian", "wheels")
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "the lock file can't be used:", [f"{path}: {error}"], remedy="make one with --update-lock"
        ) from None
    return Lock(debian, wheels)


def write_lock(path: Path, machine: Machine, lock: Lock, fleet: bool = False) -> None:
    """Put a machine's packages, or those that fleets add, into a lock file; all others stay."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    packages = {
        kind: {
            package.name: {"version": package.version, "sha256": package.sha256}
            for package in sorted(packages, key=lambda package: package.name)
        }
        for kind, packages in (("debian", lock.debian), ("wheels", lock.wheels))
    }
    of_machine = content.setdefault(machine, {})
    of_machine.update({"fleet": packages} if fleet else packages)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def newest(cache: Path, machine: Machine, archive: str | None, fleet: bool = False) -> Lock:
    """What a lock file would name now: Debian's newest packages, and the wheels that prge is tested with."""
    names, pythons = (FLEET_DEBIAN, FLEET_WHEELS) if fleet else (DEBIAN, WHEELS)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".newest-") as fresh:
        # Not from the cache, which may hold older ones.
        downloaded = download_debian([Package(name) for name in names], machine, Path(fresh), archive)
        kept = cache / "debian" / machine
        kept.mkdir(parents=True, exist_ok=True)
        debian = {name: path.rename(kept / path.name) for name, path in downloaded.items()}
    wanted = [_tested(name) for name in pythons]
    files = _pip_download(wanted, machine, cache / "newest" / machine)
    wheels = {}
    for path in files:
        name, version = path.name.split("-")[:2]
        wheels[name.lower().replace("_", "-")] = Package(name.replace("_", "-"), version, file_sha256(path))
    return Lock(
        [Package(name, _version_of(path), file_sha256(path)) for name, path in sorted(debian.items())],
        [wheels[name.lower().replace("_", "-")] for name in pythons],
    )


def download_wheels(packages: Sequence[Package], machine: Machine, cache: Path) -> dict[str, Path]:
    """The wheel of each package by name, from the cache or through pip.

    Raises:
        PrgeError: pip can't get one, or it is another file than the lock names.
    """
    folder = cache / "wheels"
    hashes = {path: file_sha256(path) for path in sorted(folder.glob("*.whl"))}
    by_hash = {hash_: path for path, hash_ in hashes.items()}
    lacking = [package for package in packages if package.sha256 not in by_hash]
    if lacking:
        for path in _pip_download([f"{item.name}=={item.version}" for item in lacking], machine, folder):
            by_hash[file_sha256(path)] = path
    for package in packages:
        if package.sha256 not in by_hash:
            raise PrgeError(
                f"pip brought another file for {package.name} {package.version} than the lock file names",
                remedy="use the index that the lock file was made with, or make another one: --update-lock",
            )
    return {package.name: by_hash[package.sha256] for package in packages}


def download_debian(
    packages: Sequence[Package], machine: str, cache: Path, archive: str | None = None
) -> dict[str, Path]:
    """The file of each Debian package by name, from the cache or through APT.

    Args:
        packages: those without a hash are downloaded in their newest version.
        machine: Debian's name of it.
        cache: folder to keep files in.
        archive: address of a Debian archive; default: the one that this machine's APT uses.

    Raises:
        PrgeError: there is no APT or no archive, it can't be reached, lacks a version, or a file's hash is
            another one than the lock names.
    """
    folder = cache / "debian" / machine
    folder.mkdir(parents=True, exist_ok=True)
    files = _debian_files(packages, folder)
    lacking = [package for package in packages if package.name not in files]
    if lacking:
        words = [f"{item.name}:{machine}" + (f"={item.version}" if item.version else "") for item in lacking]
        with tempfile.TemporaryDirectory(dir=cache, prefix=".apt-") as private:
            environment = _private_apt(Path(private), archive)
            _run(["apt-get", "update"], environment, Path(private))
            _run(["apt-get", "download", *words], environment, Path(private))
            # Renamed, so that no other process sees a part of a file.
            for path in sorted(Path(private).glob("*.deb")):
                path.rename(folder / path.name)
        files = _debian_files(packages, folder)
    lacking = [package for package in packages if package.name not in files]
    if lacking:
        raise PrgeError(
            f"the archive has another {lacking[0].name} {lacking[0].version} than the lock file names",
            remedy="use another archive (--debian-archive), or make another lock file (--update-lock)",
        )
    return files


def unpack_debian(files: Sequence[Path], folder: Path) -> None:
    """Unpack Debian packages into one tree."""
    for path in files:
        _run(["dpkg-deb", "-x", str(path), str(folder)], {}, folder)


def _debian_files(packages: Sequence[Package], folder: Path) -> dict[str, Path]:
    """Of each package the file with its hash, or the newest file where it has none."""
    newest_files = {}
    for package in packages:
        files = sorted(folder.glob(f"{package.name}_*.deb"), key=lambda path: path.stat().st_mtime_ns)
        if package.sha256:
            files = [path for path in files if file_sha256(path) == package.sha256]
        if files:
            newest_files[package.name] = files[-1]
    return newest_files


def _version_of(path: Path) -> str:
    return path.name.split("_")[1].replace("%3a", ":")


def _private_apt(folder: Path, archive: str | None) -> dict[str, str]:
    """Environment of an APT of its own: another release, all architectures, its lists in `folder`."""
    archive = archive or _configured_archive()
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    trust = f"[signed-by={_KEYRING}] " if Path(_KEYRING).is_file() else ""
    (folder / "sources.list").write_text(f"deb {trust}{archive} {RELEASE} main\n")
    (folder / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{folder}/sources.list";\nDir::Etc::SourceParts "/dev/null";\n'
        f'Dir::State::Lists "{folder}/lists";\nDir::Cache "{folder}/cache";\n'
        'APT::Architectures {"amd64";"arm64";};\n'
    )
    return {"APT_CONFIG": str(folder / "apt.conf")}


def _configured_archive() -> str:
    """Address of the Debian archive that this machine's APT is set up with."""
    words = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)"]
    told = _run([*words, "Created-By: Packages", "Origin: Debian", "Component: main"], {}, Path("/"))
    addresses = [line.split()[1] for line in told.splitlines() if "-" not in line.split()[0]]
    if not addresses:
        raise PrgeError(
            "this machine's APT has no Debian archive", remedy="name one with --debian-archive ADDRESS"
        )
    return addresses[0]


def _pip_download(wanted: Sequence[str], machine: Machine, folder: Path) -> list[Path]:
    """Download wheels for a machine with this Python's pip, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pip-") as place:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        words += ["--no-deps", "--only-binary", ":all:", "--dest", place]
        words += ["--implementation", "cp", "--python-version", PYTHON.replace(".", "")]
        for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none"):
            words += ["--abi", abi]
        for platform in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
            words += ["--platform", f"{platform}_{_WHEEL_MACHINES[machine]}"]
        _run([*words, *wanted], {}, Path(place))
        return [path.rename(folder / path.name) for path in sorted(Path(place).iterdir())]


def _tested(name: str) -> str:
    """A requirement for the version that is installed here, or else for one that prge asks for."""
    from prge.packages import requirement

    try:
        return f"{name}=={importlib.metadata.version(name).partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        return requirement(name)


def _run(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """What a command prints; raises PrgeError with its last words if it fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False, cwd=folder,
            env={**os.environ, **environment},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrgeError(
            f"{words[0]} can't be run: {error}",
            remedy="a runtime is built on Debian or a relative of it, with apt-get and dpkg-deb",
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("E:", "ERROR"))]
        said = (lines or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise PrgeError(
            f"{' '.join(words[:2])} failed: {said}",
            remedy="is the network there? A version that is no longer offered needs --update-lock",
        )
    return done.stdout


def digest(text: str) -> str:
    """Hexadecimal SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
