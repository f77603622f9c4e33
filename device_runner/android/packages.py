"""The packages of a runtime: the newest of a Debian release, and wheels that prge is tested with.

This machine's own pip and APT download them. `apt-get` gets a private configuration for the other
architecture and release, so that the system stays unchanged. APT checks the archive's signature, and with it
the hash of every package. A lock file names the packages of an earlier runtime by version and hash instead.
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
from prge.formats.bundle import file_sha256
from prge.formats.documents import read_json
from prge.system.user_cache import private_folder

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
# This machine's own settings may be less strict.
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
    "idna==3.20 llguidance==1.6.1"
).split()
# More packages for a device of a fleet: of flwr's requirements, those that its client imports.
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
    """A package in one version, and the SHA-256 of its file."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Archive:
    """A Debian archive."""

    address: str | None = None
    """URL of the archive; None: the archive that this machine's APT uses."""
    keys: Path | None = None
    """File of the public keys that sign the archive; None: Debian's own."""


@dataclass(frozen=True)
class Lock:
    """The packages of an earlier runtime, by their names."""

    path: Path
    debian: Mapping[str, Package]
    wheels: Mapping[str, Package]

    def named(self, names: Sequence[str], source: Literal["debian", "wheels"]) -> list[Package]:
        """Return the packages of these names; raises ConfigError if the lock lacks some."""
        packages: Mapping[str, Package] = getattr(self, source)
        if lacking := [name for name in names if name not in packages]:
            raise ConfigError(
                "The lock lacks packages:",
                [f"{self.path}: no {', '.join(lacking)}"],
                remedy="Give the runtime.json of a runtime with the same flags, or leave --lock out.",
                code="lock-lacks-packages",
            )
        return [packages[name] for name in names]


def read_lock(path: Path, machine: Machine) -> Lock:
    """Read the packages that a runtime.json names.

    Raises:
        ConfigError: the file names no packages, or they are for another machine.
    """
    try:
        content = read_json(path)
        built_for, sources = content["machine"], content["packages"]
        debian, wheels = (
            {
                name: Package(name, _safe_word(facts["version"]), _safe_word(facts["sha256"]))
                for name, facts in sources[source].items()
            }
            for source in ("debian", "wheels")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "Cannot use the lock:",
            [f"{path}: {error if isinstance(error, OSError) else f'no packages of a runtime ({error})'}"],
            remedy="Give the runtime.json of a runtime that prge android bundle has built.",
            code="lock-unreadable",
        ) from None
    if built_for != machine:
        raise ConfigError(
            "Cannot use the lock:",
            [f"{path} is for {built_for}, --machine is {machine}"],
            code="lock-of-other-machine",
        )
    return Lock(path, debian, wheels)


def _safe_word(value: object) -> str:
    """Check a version or a hash, which becomes a word of a command line; raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z.+:~_-]*", value):
        raise ValueError(f"{value!r} is not a version or a hash")
    return value


def download_wheels(
    pinned: Sequence[str], machine: Machine, cache: Path, lock: Lock | None = None
) -> dict[Package, Path]:
    """Return the wheel of each package, from the cache or downloaded by this Python's pip.

    Args:
        pinned: names and versions, such as `numpy==2.4.6`; a lock overrides the versions.
        machine: Debian's name of the architecture.
        cache: folder to keep files in.
        lock: versions and hashes, which pip checks; None: the pinned versions.

    Raises:
        PrgeError: pip can't download a wheel, or the file differs from the one that the lock names.
    """
    folder = private_folder(cache / "wheels" / machine)
    lines = list(pinned)
    remedy = "Check that the package index can be reached and has these versions."
    if lock is not None:
        locked = lock.named([line.partition("==")[0] for line in pinned], "wheels")
        lines = [f"{item.name}=={item.version} --hash=sha256:{item.sha256}" for item in locked]
        remedy += " Leave --lock out to use the versions that prge is tested with."
    if importlib.util.find_spec("pip") is None:
        remedy = "This Python has no pip. Install it with `python -m ensurepip`."
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pip-") as scratch:
        requirements = Path(scratch, "wheels.txt")
        requirements.write_text("\n".join(lines))
        words = [*_PIP, "--dest", scratch, "--find-links", str(folder), "--requirement", str(requirements)]
        words += ["--require-hashes"] * (lock is not None)
        for platform in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
            words += ["--platform", f"{platform}_{_WHEEL_MACHINES[machine]}"]
        try:
            _run([*words, "--no-index"])
        except PrgeError:  # the cache lacks some
            _run(words, remedy=remedy)
        downloaded = {
            _normalized(path.name): path.replace(folder / path.name) for path in Path(scratch).glob("*.whl")
        }
    wheels = {}
    for line in lines:
        name, _, version = line.partition(" ")[0].partition("==")
        prefix = _normalized(f"{name}-{version}-")
        path = next(path for wheel, path in downloaded.items() if wheel.startswith(prefix))
        wheels[Package(name, version, file_sha256(path))] = path
    return wheels


def download_debian(
    names: Sequence[str], machine: str, cache: Path, archive: Archive, lock: Lock | None = None
) -> dict[Package, Path]:
    """Return the file of each Debian package, checked by APT's signatures or by the hash of a lock.

    Args:
        names: names of the packages; without a lock, the newest versions are taken.
        machine: Debian's name of the architecture.
        cache: folder to keep files in.
        archive: the Debian archive.
        lock: versions and hashes; the archive isn't contacted for locked packages in the cache.

    Raises:
        PrgeError: this machine has no APT or no archive, the archive can't be reached, its signature is
            wrong, or it lacks packages or the versions that the lock names.
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
                "The archive lacks these packages of the lock: " + ", ".join(lacking),
                remedy="Name a mirror that keeps old versions with --debian-archive, or leave --lock out to "
                "use the newest versions.",
                code="archive-lacks-versions",
            )
        if lacking := sorted(set(names) - {package.name for package in wanted}):
            raise PrgeError(
                f"The release {RELEASE} of the archive lacks packages: " + ", ".join(lacking),
                remedy="Name another archive with --debian-archive.",
                code="archive-lacks-packages",
            )
        files = _cached(wanted, folder)
        words = [f"{item.name}={item.version}" for item in wanted if item not in files]
        if words:
            _apt(["apt-get", *_STRICT, "download", *words], environment, private)
            for path in sorted(private.glob("*.deb")):
                # APT links to files of a local archive. A copy that is moved is never seen half-written.
                copy = Path(shutil.copyfile(path, private / "whole"))
                copy.replace(folder / path.name)
    return _cached(wanted, folder)


def unpack_debian(files: Iterable[Path], folder: Path) -> None:
    """Unpack Debian packages into one folder."""
    for path in files:
        _run(["dpkg-deb", "-x", str(path), str(folder)])


def _cached(packages: Sequence[Package], folder: Path) -> dict[Package, Path]:
    """Return the files of the packages that a folder has with the right hash."""
    return {
        package: path
        for package in packages
        for path in sorted(folder.glob(f"{package.name}_*.deb"))
        if file_sha256(path) == package.sha256
    }


def _offered(names: Sequence[str], environment: Mapping[str, str], every_version: bool) -> list[Package]:
    """Return the versions of packages in the archive, the newest or all; unknown packages are left out."""
    words = ["apt-cache", *([] if every_version else ["--no-all-versions"]), "show", *names]
    packages = []
    for stanza in _apt(words, environment).split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|SHA256): *(\S+)$", stanza, re.MULTILINE))
        if len(fields) == 3:
            packages.append(Package(fields["Package"], fields["Version"], fields["SHA256"]))
    return packages


def _private_apt(folder: Path, machine: str, archive: Archive, is_locked: bool) -> dict[str, str]:
    """Configure APT for another release and architecture, with its lists in `folder`.

    Returns:
        The environment variables that make APT use this configuration.
    """
    keys = archive.keys or _KEYS
    if not keys.is_file():
        raise PrgeError(
            f"There is no file {keys} with the keys that sign the archive.",
            remedy="Run `apt install debian-archive-keyring`, or name a file with --debian-keys.",
            code="archive-keys-missing",
        )
    address = archive.address or configured_archive()
    for name in ("lists/partial", "cache/archives/partial", "keys"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    # A folder, since APT's options of a source allow no spaces in paths. APT takes the format from the name.
    content = keys.read_bytes()
    (folder / "keys" / ("keys.asc" if content.startswith(b"-----") else "keys.gpg")).write_bytes(content)
    # With a lock, hashes are checked, so an archive that is no longer updated is fine.
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
    """Return the address of the Debian archive that this machine's APT uses; raises PrgeError."""
    words = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)"]
    output = _apt([*words, "Created-By: Packages", "Origin: Debian", "Component: main"], {})
    addresses = [line.split()[1] for line in output.splitlines() if "-" not in line.split()[0]]
    if not addresses:
        raise PrgeError(
            "The APT of this machine has no Debian archive.",
            remedy="Name one with --debian-archive ADDRESS.",
            code="archive-not-configured",
        )
    return addresses[0]


def _normalized(name: str) -> str:
    """Return the name of a package or wheel with one spelling of case and separators."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _apt(words: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> str:
    """Run APT and return its output; raises PrgeError, whose remedy depends on the problem of the archive."""
    try:
        return _run(words, environment, folder)
    except PrgeError as error:
        remedy = error.remedy or "Check the network, or name another archive with --debian-archive."
        if re.search("sign|GPG", error.what):
            remedy = (
                "Nothing of the archive is used. Name a Debian archive, or the keys that sign yours with "
                "--debian-keys FILE."
            )
        raise PrgeError(error.what, remedy=remedy, code=error.code) from None


def _run(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    remedy: str = "",
) -> str:
    """Run a command and return its output; raises PrgeError with the command's error if it fails.

    Args:
        words: the command; its paths are absolute if `folder` is given.
        environment: variables in addition to this process's own.
        folder: working folder; None: this process's.
        remedy: remedy of the error.
    """
    try:
        process = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False, cwd=folder,
            env={**os.environ, **(environment or {}), "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
    except OSError as error:
        raise PrgeError(
            f"Cannot start {words[0]}: {error.strerror or error}",
            remedy="Build the runtime on Debian, or a system based on it, with apt-get and dpkg-deb.",
            code="program-not-started",
        ) from None
    except subprocess.TimeoutExpired:
        raise PrgeError(
            f"{words[0]} did not end within {SECONDS} seconds.", remedy=remedy, code="program-too-slow"
        ) from None
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        errors = [line for line in lines if line.startswith(("E:", "ERROR", "W: GPG"))] or lines
        verbs = {"pip", "update", "download", "show", "indextargets", "-x"}
        command = " ".join([Path(words[0]).name, *(word for word in words[1:] if word in verbs)])
        raise PrgeError(
            f"{command} failed: {errors[0] if errors else f'exit code {process.returncode}'}",
            remedy=remedy,
            code="program-failed",
        )
    return process.stdout


def digest(text: str) -> str:
    """Return the hexadecimal SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
