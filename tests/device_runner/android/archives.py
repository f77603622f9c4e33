"""A Debian archive on this machine, with real packages under newer versions, signed by its own key."""

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
    """A Debian archive.

    Attributes:
        folder: folder of the archive.
        keys: file of its public key.
        gpg: command that signs.
    """

    folder: Path
    keys: Path
    gpg: list[str]

    @property
    def address(self) -> str:
        """URL of the archive for APT."""
        return f"file://{self.folder}"

    @property
    def release(self) -> Path:
        """Folder of the signed index."""
        return self.folder / "dists" / RELEASE

    def add(self, packages: Iterable[Path]) -> None:
        """Add packages under later versions, and sign the index."""
        pool = self.folder / "pool"
        pool.mkdir(parents=True)
        for path in packages:
            with tempfile.TemporaryDirectory() as folder:
                _call("dpkg-deb", "--raw-extract", path, folder)
                control = Path(folder) / "DEBIAN" / "control"
                lines = control.read_text(encoding="utf-8").splitlines()
                changed = [line + LATER if line.startswith("Version:") else line for line in lines]
                control.write_text("\n".join(changed) + "\n", encoding="utf-8")
                _call("dpkg-deb", "--build", "-Znone", "--root-owner-group", folder, pool / path.name)
        self.sign()

    def sign(self) -> None:
        """Write the index of the packages in the pool, and its signature."""
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
        """Return the public key as text."""
        return _call(*self.gpg, "--armor", "--export")

    def _stanza(self, path: Path) -> str:
        control = _call("dpkg-deb", "--field", path)
        content = path.read_bytes()
        relative = path.relative_to(self.folder)
        digest = hashlib.sha256(content).hexdigest()
        return f"{control}Filename: {relative}\nSize: {len(content)}\nSHA256: {digest}\n"


@contextmanager
def local_archive(folder: Path) -> Iterator[LocalArchive]:
    """Make an empty archive with a temporary key."""
    # Not in the test's folder, since the path of the agent's socket must be short.
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


def _call(*arguments: object) -> str:
    done = subprocess.run([str(word) for word in arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout
