"""A Debian archive on this machine: real packages with newer versions, signed by a key of its own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from device_runner.android.packages import RELEASE

LATER = "+later1"


@dataclass
class LocalArchive:
    """Its folder, the file of its public key, and how its index is signed."""

    folder: Path
    keys: Path
    gpg: list[str]

    @property
    def address(self) -> str:
        """As APT takes it."""
        return f"file://{self.folder}"

    @property
    def release(self) -> Path:
        """The folder of its signed index."""
        return self.folder / "dists" / RELEASE

    def add(self, packages: Iterable[Path]) -> None:
        """Put packages in under later versions, and sign."""
        pool = self.folder / "pool"
        pool.mkdir(parents=True)
        for path in packages:
            with tempfile.TemporaryDirectory() as place:
                _call("dpkg-deb", "--raw-extract", path, place)
                control = Path(place) / "DEBIAN" / "control"
                lines = control.read_text(encoding="utf-8").splitlines()
                told = [line + LATER if line.startswith("Version:") else line for line in lines]
                control.write_text("\n".join(told) + "\n", encoding="utf-8")
                _call("dpkg-deb", "--build", "-Znone", "--root-owner-group", place, pool / path.name)
        self.sign()

    def sign(self) -> None:
        """Write the index of what is in the pool, and its signature."""
        (self.release / "main" / "binary-amd64").mkdir(parents=True, exist_ok=True)
        index = self.release / "main" / "binary-amd64" / "Packages"
        index.write_text("\n".join(map(self._stanza, sorted(self.folder.glob("pool/*.deb")))))
        content = index.read_bytes()
        (self.release / "Release").write_text(
            f"Origin: Debian\nSuite: {RELEASE}\nCodename: {RELEASE}\nArchitectures: amd64\nComponents: main\n"
            "Date: Mon, 05 Jan 2026 00:00:00 UTC\n"
            f"SHA256:\n {hashlib.sha256(content).hexdigest()} {len(content)} main/binary-amd64/Packages\n"
        )
        signed = self.release / "InRelease"
        signed.unlink(missing_ok=True)
        _call(*self.gpg, "--clearsign", "--output", signed, self.release / "Release")

    def armored(self) -> str:
        """Its public key as text."""
        return _call(*self.gpg, "--armor", "--export")

    def _stanza(self, path: Path) -> str:
        told = _call("dpkg-deb", "--field", path)
        content = path.read_bytes()
        where = path.relative_to(self.folder)
        return (
            f"{told}Filename: {where}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"
        )


@contextmanager
def local_archive(folder: Path) -> Iterator[LocalArchive]:
    """An empty archive, with a key that is thrown away."""
    # Not in the test's folder: the agent's socket has a short name or none.
    home = tempfile.mkdtemp(prefix="prge-gpg-")
    gpg = ["gpg", "--homedir", home, "--batch", "--quiet"]
    try:
        _call(*gpg, "--passphrase", "", "--quick-generate-key", "prge test", "ed25519", "sign", "never")
        keys = folder / "its keys.gpg"
        folder.mkdir(parents=True)
        _call(*gpg, "--output", keys, "--export")
        yield LocalArchive(folder, keys, gpg)
    finally:
        subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=False, capture_output=True)
        shutil.rmtree(home, ignore_errors=True)


def _call(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout
