"""Reading a bundle: the folder that an export writes and a device needs.

    manifest.json       chain, model, quantization, versions, verification, sha256 of every other file
    programs/           a `.pte` for each kind of block, without weights
    weights/            a `.ptd` for each block
    tables.safetensors  rotations of all positions, where the model has any
    adapter/            the adapter to start from, a PEFT folder (lora_A and lora_B)
    tokenizer/          tokenizer.json and, where the model has one, chat_template.jinja

Nothing of a bundle is loaded before its hash is compared. Hashes tell damage, not who wrote its programs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from prge.errors import BundleError, shown
from prge.files.chain import STORED_TABLES, Chain
from prge.files.documents import DocumentError, read_json
from prge.files.tuned import bundle_at

FORMAT = 3
MANIFEST = "manifest.json"
TABLES = "tables.safetensors"
PROGRAMS, WEIGHTS = "programs", "weights"
ADAPTER = "adapter"
TOKENIZER = "tokenizer"
LONGEST_NAME = 255


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its files have the hashes that its manifest names; weights are not read yet."""

    folder: Path
    manifest: Mapping[str, Any]
    chain: Chain

    def file(self, name: str) -> Path:
        """One of the manifest's files."""
        return self.folder / name

    def hash_of(self, name: str) -> str:
        """SHA-256 of one of the manifest's files."""
        return str(self.manifest["files"][name]["sha256"])

    @property
    def pooling(self) -> str | None:
        """How an encoder's states become one vector; None for a decoder's."""
        return self.chain.pooling if self.chain.is_encoder else None

    @property
    def labels(self) -> tuple[str, ...]:
        """Classes of the checkpoint's own head, which lies beside the adapter; none without such a head."""
        block = self.manifest.get("head")
        labels = block.get("labels") if isinstance(block, Mapping) else None
        return tuple(map(str, labels)) if isinstance(labels, list) else ()

    @property
    def quantization(self) -> str | None:
        """The scheme of the frozen weights; None for float32."""
        block = self.manifest.get("quantization")
        scheme = block.get("scheme") if isinstance(block, Mapping) else None
        return None if scheme in (None, "fp32") else str(scheme)

    @property
    def description(self) -> dict[str, Any]:
        """What run.json says of the bundle that a run trains: hashes, model, quantization."""
        return {
            "bundle": self.sha256,
            "model": self.manifest.get("model"),
            "quantization": self.manifest.get("quantization"),
        }

    @property
    def adapter(self) -> Path:
        """PEFT folder of the adapter that training starts from."""
        return self.folder / ADAPTER

    @property
    def tokenizer(self) -> Path:
        """Folder with `tokenizer.json`."""
        return self.folder / TOKENIZER

    @property
    def sha256(self) -> str:
        """Hash of the manifest, and through it of every file: what a run was made with."""
        return str(self.manifest["manifest_sha256"])


def file_sha256(path: Path) -> str:
    """Lowercase hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """Hash of a manifest's content, its own hash left out, independent of key order and white space."""
    content = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check `manifest.json`: format number and own hash, not yet the files.

    Raises:
        BundleError: missing, not JSON, of another format, or changed since it was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST}",
            remedy="give the folder that `prge export` wrote",
            code="not-a-bundle",
        )
    try:
        manifest = read_json(path)
    except DocumentError as error:
        raise BundleError(
            f"{path} is damaged: {error}", remedy="copy or export the bundle again", code="manifest-damaged"
        ) from None
    format_seen = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
    if not isinstance(manifest, dict) or type(format_seen) is not int or format_seen != FORMAT:
        raise BundleError(
            f"{path} has format {shown(format_seen)}, this version reads {FORMAT}",
            remedy="export the model again with this version",
            code="bundle-format",
        )
    if manifest.get("manifest_sha256") != manifest_sha256(manifest):
        raise BundleError(
            f"{path} was changed after it was written: its own hash differs",
            remedy="copy or export the bundle again",
            code="manifest-changed",
        )
    return manifest


def open_bundle(folder: Path | str) -> Bundle:
    """Open a bundle after comparing its files with the manifest.

    The hashes of its weights are compared when an engine takes them.

    Raises:
        BundleError: the manifest is unusable; a file is missing, changed, outside the folder, or in the place
            of one that is read and not in the manifest.
        RunError: it is the folder of a tuning that has no bundle yet.
    """
    folder = bundle_at(Path(folder))
    manifest = read_manifest(folder)
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise BundleError(
            f"{folder / MANIFEST} lists no files",
            remedy="export the bundle again",
            code="manifest-without-files",
        )
    chain = read_chain(folder, manifest)
    weights = {block.weights for block in chain.blocks}
    for name in files:
        check_file(folder, manifest, name, by_hash=name not in weights)
    _check_unlisted(folder, files)
    return Bundle(folder, manifest, chain)


def read_chain(folder: Path, manifest: Mapping[str, Any]) -> Chain:
    """The chain that a manifest describes; raises BundleError if it can't be run or a file isn't listed."""
    chain = Chain.from_json(manifest.get("chain"))
    needed = {kind.program for kind in chain.kinds} | {block.weights for block in chain.blocks}
    needed |= {TABLES} if any(table.kind in STORED_TABLES for table in chain.tables) else set()
    if missing := sorted(needed - set(manifest["files"])):
        raise BundleError(
            f"{folder / MANIFEST} lists no {shown(missing[0])}",
            remedy="copy or export the bundle again",
            code="manifest-lacks-file",
        )
    return chain


def _check_unlisted(folder: Path, files: Mapping[str, Any]) -> None:
    """Refuse files that a reader could take for the bundle's and whose hash nobody knows."""
    for name in (ADAPTER, TOKENIZER):
        for path in sorted((folder / name).glob("[!.]*")):
            if f"{name}/{path.name}" not in files:
                raise BundleError(
                    f"{path} is not in the bundle's manifest",
                    remedy="remove it, or copy the bundle again",
                    code="file-not-in-manifest",
                )


def check_file(folder: Path, manifest: Mapping[str, Any], name: str, by_hash: bool = True) -> None:
    """Compare one file with what the manifest says of it; without `by_hash` its place and size alone.

    Raises:
        BundleError: missing, a link, outside the folder, or of another size or hash.
    """
    entry = manifest["files"][name]
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name:
        raise BundleError(
            f"{folder / MANIFEST} names a file outside the bundle: {shown(name)}",
            remedy="don't use this bundle",
            code="file-outside-bundle",
        )
    if not (isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and "sha256" in entry):
        raise BundleError(
            f"{folder / MANIFEST} says neither size nor hash of {name}",
            remedy="export the bundle again",
            code="manifest-lacks-hash",
        )
    path = folder / relative
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in relative.parts):
        raise BundleError(
            f"the bundle lacks its file {shown(name)}",
            remedy="copy or export the bundle again",
            code="bundle-file-missing",
        )
    if any((folder / part).is_symlink() for part in (relative, *relative.parents[:-1])):
        raise BundleError(
            f"{path} is a link or in a linked folder",
            remedy="copy the bundle with its links followed",
            code="bundle-file-linked",
        )
    if not path.is_file():
        raise BundleError(
            f"the bundle lacks its file {name}",
            remedy="copy or export the bundle again",
            code="bundle-file-missing",
        )
    if path.stat().st_size != entry["bytes"]:
        raise BundleError(
            f"{path} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}",
            remedy="copy or export the bundle again",
            code="bundle-file-size",
        )
    if by_hash:
        check_content(folder, manifest, name)


def check_content(folder: Path, manifest: Mapping[str, Any], name: str) -> None:
    """Compare a file's hash with the manifest's; raises BundleError if it is another file."""
    path = folder / name
    if file_sha256(path) != manifest["files"][name]["sha256"]:
        raise BundleError(
            f"{path} is not the file that the manifest names: its SHA-256 differs",
            remedy="copy or export the bundle again",
            code="bundle-file-hash",
        )
