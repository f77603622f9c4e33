"""Packages that a runtime is made of: the newest of a Debian release, and wheels that prge is tested with.

They come through this machine's own pip and APT: `apt-get` with a private configuration that knows another
architecture and release, so that nothing of the system is touched. APT checks the archive's signature, and by
it the hash of every package. A lock names packages of an earlier runtime by version and hash instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prge.errors import ConfigError, PrgeError
from prge.files.bundle import file_sha256
from prge.files.documents import read_json
from prge.host.user_cache import private_folder

Machine = Literal["arm64", "amd64"]
RELEASE = "trixie"
PYTHON = "3.13"
SECONDS = 1800
_WHEEL_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_PIP = [
    *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
    *("--no-deps", "--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON),
    *("--abi", f"cp{PYTHON.replace('.', '')}", "--abi", "abi3", "--abi", "none"),
]
# What this machine's own settings may have loosened.
_STRICT = (
    "-o Acquire::AllowInsecureRepositories=false -o Acquire::AllowWeakRepositories=false "
    "-o APT::Get::AllowUnauthenticated=false"
).split()

DEBIAN = (
    "libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libuuid1 libssl3t64 libzstd1 "
    "python3.13-minimal libpython3.13-minimal libpython3.13-stdlib"
).split()
WHEELS = (
    "numpy==2.4.6 tokenizers==0.23.3 safetensors==0.8.0 executorch==1.5.1 PyYAML==6.0.3 tqdm==4.70.1 "
    "Jinja2==3.1.6 MarkupSafe==3.0.4 starlette==1.3.1 uvicorn==0.49.0 anyio==4.16.0 click==8.5.1 h11==0.16.0 "
    "idna==3.20"
).split()
# What a device of a fleet needs besides: of what flwr asks for, the packages that its client imports.
FLEET_WHEELS = (
    "flwr==1.41.0 annotated-doc==0.0.7 annotated-types==0.8.0 certifi==2026.10.18 "
    "cffi==2.1.1 charset-normalizer==3.5.2 cryptography==50.0.2 fastapi==0.138.2 "
    "grpcio==1.85.1 grpcio-health-checking==1.81.1 httpcore==1.0.9 httpx==0.28.1 "
    "iterators==0.0.2 packaging==25.0 protobuf==6.33.6 pycryptodome==3.24.1 "
    "pydantic==2.14.3 pydantic_core==2.50.4 Pygments==2.21.0 requests==2.34.2 rich==14.3.4 "
    "shellingham==1.5.4 typer==0.20.1 typing-inspection==0.4.5 "
    "typing_extensions==4.16.0 urllib3==2.8.0"
).split()


@dataclass(frozen=True)
class Package:
    """One package in one version, and the hash of its file."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Archive:
    """Where Debian's packages come from."""

    address: str | None = None
    """Default: the Debian archive that this machine's APT uses."""
    keys: Path | None = None
    """File of the public keys that sign it; default: Debian's own."""


@dataclass(frozen=True)
class Lock:
    """The packages that an earlier runtime was made of, by their names."""

    path: Path
    debian: Mapping[str, Package]
    wheels: Mapping[str, Package]

    def named(self, names: Sequence[str], source: Literal["debian", "wheels"]) -> list[Package]:
        """Its packages of these names; raises ConfigError where it lacks some."""
        packages: Mapping[str, Package] = getattr(self, source)
        if lacking := [name for name in names if name not in packages]:
            raise ConfigError(
                "the lock lacks packages:",
                [f"{self.path}: no {', '.join(lacking)}"],
                remedy="take runtime.json of a runtime with the same flags, or leave --lock out",
                code="lock-lacks-packages",
            )
        return [packages[name] for name in names]


def read_lock(path: Path, machine: Machine) -> Lock:
    """The packages that a runtime.json names.

    Raises:
        ConfigError: it names none, or they are for another machine.
    """
    try:
        content = read_json(path)
        made_for, sources = content["machine"], content["packages"]
        debian, wheels = (
            {
                name: Package(name, _text(facts["version"]), _text(facts["sha256"]))
                for name, facts in sources[source].items()
            }
            for source in ("debian", "wheels")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "the lock can't be used:",
            [f"{path}: {error if isinstance(error, OSError) else f'no packages of a runtime ({error})'}"],
            remedy="give the runtime.json of a runtime that prge android bundle has built",
            code="lock-unreadable",
        ) from None
    if made_for != machine:
        raise ConfigError(
            "the lock can't be used:",
            [f"{path} is for {made_for}, --machine is {machine}"],
            code="lock-of-other-machine",
        )
    return Lock(path, debian, wheels)


def _text(value: object) -> str:
    """Of a version or a hash: they become words of a command line."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z.+:~_-]*", value):
        raise ValueError(f"{value!r} is no version or hash")
    return value


def download_wheels(
    pinned: Sequence[str], machine: Machine, cache: Path, lock: Lock | None = None
) -> dict[Package, Path]:
    """The wheel of each package, from the cache or through this Python's pip, which checks a lock's hashes.

    Args:
        pinned: names and versions, such as `numpy==2.4.6`; with a lock its versions count.
        machine: Debian's name of it.
        cache: folder to keep files in.
        lock: where versions and hashes come from.

    Raises:
        PrgeError: pip can't get one, or it is another file than the lock names.
    """
    folder = private_folder(cache / "wheels" / machine)
    lines, remedy = list(pinned), "is the package index there, and does it have these versions?"
    if lock is not None:
        named = lock.named([line.partition("==")[0] for line in pinned], "wheels")
        lines = [f"{item.name}=={item.version} --hash=sha256:{item.sha256}" for item in named]
        remedy += " Leave --lock out to take those that prge is tested with"
    if importlib.util.find_spec("pip") is None:
        remedy = "this Python has no pip: install it with `python -m ensurepip`"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pip-") as scratch:
        asked = Path(scratch, "wheels.txt")
        asked.write_text("\n".join(lines))
        words = [*_PIP, "--dest", scratch, "--find-links", str(folder), "--requirement", str(asked)]
        words += ["--require-hashes"] * (lock is not None)
        for platform in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
            words += ["--platform", f"{platform}_{_WHEEL_MACHINES[machine]}"]
        try:
            _run([*words, "--no-index"])
        except PrgeError:  # the cache lacks some
            _run(words, remedy=remedy)
        brought = {
            _plain(path.name): path.replace(folder / path.name) for path in Path(scratch).glob("*.whl")
        }
    wheels = {}
    for line in lines:
        name, _, version = line.partition(" ")[0].partition("==")
        path = next(path for wheel, path in brought.items() if wheel.startswith(_plain(f"{name}-{version}-")))
        wheels[Package(name, version, file_sha256(path))] = path
    return wheels


def download_debian(
    names: Sequence[str], machine: str, cache: Path, archive: Archive, lock: Lock | None = None
) -> dict[Package, Path]:
    """The file of each Debian package, checked by APT's signatures or by a lock's hash.

    Args:
        names: of the packages; their newest versions, unless there is a lock.
        machine: Debian's name of it.
        cache: folder to keep files in.
        archive: where they come from.
        lock: where versions and hashes come from; nothing is asked for what lies in the cache then.

    Raises:
        PrgeError: there is no APT or no archive, it can't be reached, its signature is wrong, or it lacks
            packages or the versions that the lock names.
    """
    folder = cache / "debian" / machine
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [] if lock is None else lock.named(names, "debian")
    files = _cached(wanted, folder)
    if wanted and len(files) == len(wanted):
        return files
    with tempfile.TemporaryDirectory(dir=cache, prefix=".apt-") as scratch:
        private = Path(scratch)
        environment = _private_apt(private, machine, archive, is_locked=lock is not None)
        _apt(["apt-get", *_STRICT, "update"], environment)
        offered = _offered(names, environment, every_version=lock is not None)
        wanted = wanted or [package for package in offered if package.name in names]
        lacking = [f"{item.name} {item.version}" for item in wanted if item not in offered]
        if lacking:
            raise PrgeError(
                "the archive doesn't have these packages of the lock: " + ", ".join(lacking),
                remedy="name a mirror that keeps old versions with --debian-archive, or leave --lock out for "
                "the newest",
                code="archive-lacks-versions",
            )
        if lacking := sorted(set(names) - {package.name for package in wanted}):
            raise PrgeError(
                f"the archive's {RELEASE} lacks packages: " + ", ".join(lacking),
                remedy="name another archive with --debian-archive",
                code="archive-lacks-packages",
            )
        files = _cached(wanted, folder)
        words = [f"{item.name}={item.version}" for item in wanted if item not in files]
        if words:
            _apt(["apt-get", *_STRICT, "download", *words], environment, private)
            for path in sorted(private.glob("*.deb")):
                # Copied first, for a local archive gives links: no other process sees a part of a file.
                whole = Path(shutil.copyfile(path, private / "whole"))
                whole.replace(folder / path.name)
    return _cached(wanted, folder)


def unpack_debian(files: Iterable[Path], folder: Path) -> None:
    """Unpack Debian packages into one tree."""
    for path in files:
        _run(["dpkg-deb", "-x", str(path), str(folder)])


def _cached(packages: Sequence[Package], folder: Path) -> dict[Package, Path]:
    """Of those packages that lie in a folder, the file with the hash."""
    return {
        package: path
        for package in packages
        for path in sorted(folder.glob(f"{package.name}_*.deb"))
        if file_sha256(path) == package.sha256
    }


def _offered(names: Sequence[str], environment: Mapping[str, str], every_version: bool) -> list[Package]:
    """What the archive has of packages; those that it doesn't know are left out."""
    words = ["apt-cache", *([] if every_version else ["--no-all-versions"]), "show", *names]
    packages = []
    for stanza in _apt(words, environment).split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|SHA256): *(\S+)$", stanza, re.MULTILINE))
        if len(fields) == 3:
            packages.append(Package(fields["Package"], fields["Version"], fields["SHA256"]))
    return packages


def _private_apt(folder: Path, machine: str, archive: Archive, is_locked: bool) -> dict[str, str]:
    """Environment of an APT of its own: another release and architecture, its lists in `folder`."""
    keys = archive.keys or _KEYS
    if not keys.is_file():
        raise PrgeError(
            f"there is no file {keys} with the keys that sign the archive",
            remedy="apt install debian-archive-keyring, or name a file with --debian-keys",
            code="archive-keys-missing",
        )
    address = archive.address or configured_archive()
    for name in ("lists/partial", "cache/archives/partial", "keys"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    # By a folder, since an option of a source takes no path with a space; the name tells the format.
    content = keys.read_bytes()
    (folder / "keys" / ("keys.asc" if content.startswith(b"-----") else "keys.gpg")).write_bytes(content)
    # A lock's hashes tell what is right, whatever the age of an archive that stands still.
    options = "[check-valid-until=no] " if is_locked else ""
    (folder / "sources.list").write_text(f"deb {options}{address} {RELEASE} main\n")
    (folder / "apt.conf").write_text(
        f'Dir::Etc::SourceList "{folder}/sources.list";\nDir::Etc::SourceParts "/dev/null";\n'
        f'Dir::Etc::Trusted "/dev/null";\nDir::Etc::TrustedParts "{folder}/keys";\n'
        f'Dir::State::Lists "{folder}/lists";\nDir::State::status "{folder}/status";\n'
        f'Dir::Cache "{folder}/cache";\nAPT::Architecture "{machine}";\n'
        f'APT::Architectures {{"{machine}";}};\nAcquire::Languages "none";\nAPT::Update::Error-Mode "any";\n'
    )
    return {"APT_CONFIG": str(folder / "apt.conf")}


def configured_archive() -> str:
    """Address of the Debian archive that this machine's APT is set up with."""
    words = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)"]
    told = _apt([*words, "Created-By: Packages", "Origin: Debian", "Component: main"], {})
    addresses = [line.split()[1] for line in told.splitlines() if "-" not in line.split()[0]]
    if not addresses:
        raise PrgeError(
            "this machine's APT has no Debian archive",
            remedy="name one with --debian-archive ADDRESS",
            code="archive-not-configured",
        )
    return addresses[0]


def _plain(name: str) -> str:
    """A name that packages, and wheels' files, spell in several ways."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _apt(words: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> str:
    """What APT prints; raises PrgeError, with a remedy that fits what is wrong with an archive."""
    try:
        return _run(words, environment, folder)
    except PrgeError as error:
        remedy = error.remedy or "is the network there? --debian-archive names another archive"
        if re.search("sign|GPG", error.what):
            remedy = (
                "nothing of it is used: take a Debian archive, or name the keys that sign yours with "
                "--debian-keys FILE"
            )
        raise PrgeError(error.what, remedy=remedy, code=error.code) from None


def _run(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    remedy: str = "",
) -> str:
    """What a command prints; raises PrgeError with its error if it fails.

    Args:
        words: the command; its paths are absolute where `folder` is given.
        environment: variables besides this process's own.
        folder: where it works.
        remedy: of a failure.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False, cwd=folder,
            env={**os.environ, **(environment or {}), "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
    except OSError as error:
        raise PrgeError(
            f"{words[0]} can't be started: {error.strerror or error}",
            remedy="a runtime is built on Debian or a relative of it, with apt-get and dpkg-deb",
            code="program-not-started",
        ) from None
    except subprocess.TimeoutExpired:
        raise PrgeError(
            f"{words[0]} did not end within {SECONDS} seconds", remedy=remedy, code="program-too-slow"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        told = [line for line in lines if line.startswith(("E:", "ERROR", "W: GPG"))] or lines
        verbs = {"pip", "update", "download", "show", "indextargets", "-x"}
        called = " ".join([Path(words[0]).name, *(word for word in words[1:] if word in verbs)])
        raise PrgeError(
            f"{called} failed: {told[0] if told else f'exit code {done.returncode}'}",
            remedy=remedy,
            code="program-failed",
        )
    return done.stdout


def digest(text: str) -> str:
    """Hexadecimal SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
