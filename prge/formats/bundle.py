"""Bundles: opening and checking the folder that an export writes and a device needs.

    manifest.json       chain, model, quantization, versions, verification, sha256 of every other file
    programs/           a `.pte` file for each block type, without weights
    weights/            a `.ptd` file for each block
    tables.safetensors  rotary embeddings of all positions, if the model has any
    adapter/            the adapter that training starts from, a PEFT folder (lora_A and lora_B)
    tokenizer/          tokenizer.json, and chat_template.jinja if the model has a chat template

No file of a bundle is loaded before its hash is compared. Hashes detect damage; they don't prove who wrote a
bundle.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from prge.errors import BundleError, format_value
from prge.formats.chain import STORED_TABLES, Chain
from prge.formats.documents import DocumentError, read_json
from prge.formats.format3 import FORMAT_3, chain_of_format_3
from prge.formats.tune_folder import resolve_bundle

FORMAT = 4
MANIFEST = "manifest.json"
TABLES = "tables.safetensors"
PROGRAMS, WEIGHTS = "programs", "weights"
ADAPTER = "adapter"
TOKENIZER = "tokenizer"
LONGEST_NAME = 255
_READ = (FORMAT_3, FORMAT)


@dataclass(frozen=True)
class Bundle:
    """An opened bundle, whose files match the hashes in its manifest; weights aren't read or compared yet."""

    folder: Path
    manifest: Mapping[str, Any]
    chain: Chain

    def file(self, name: str) -> Path:
        """Return the path of a file of the manifest."""
        return self.folder / name

    def hash_of(self, name: str) -> str:
        """Return the SHA-256 of a file of the manifest."""
        return str(self.manifest["files"][name]["sha256"])

    @property
    def pooling(self) -> str | None:
        """How an encoder pools its hidden states; None for a decoder."""
        return self.chain.pooling if self.chain.is_encoder else None

    @property
    def labels(self) -> tuple[str, ...]:
        """Class names of the checkpoint's own head, which is in the adapter's folder; may be empty."""
        block = self.manifest.get("head")
        labels = block.get("labels") if isinstance(block, Mapping) else None
        return tuple(map(str, labels)) if isinstance(labels, list) else ()

    @property
    def quantization(self) -> str | None:
        """Quantization scheme of the frozen weights; None for float32."""
        block = self.manifest.get("quantization")
        scheme = block.get("scheme") if isinstance(block, Mapping) else None
        return None if scheme in (None, "fp32") else str(scheme)

    @property
    def description(self) -> dict[str, Any]:
        """Hash, model and quantization, as the run.json of a run describes its bundle."""
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
        """Hash of the manifest, which identifies the bundle: the manifest has the hashes of all files."""
        return str(self.manifest["manifest_sha256"])


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in lowercase hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its own hash, independent of key order and white space."""
    content = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read `manifest.json` and check its format and its own hash, but not the files.

    Raises:
        BundleError: the manifest is missing, isn't JSON, has another format, or was changed after it was
            written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"{folder} is not a bundle: it has no {MANIFEST}.",
            remedy="Give the folder that `prge export` wrote.",
            code="not-a-bundle",
        )
    try:
        manifest = read_json(path)
    except DocumentError as error:
        raise BundleError(
            f"{path} is damaged: {error}", remedy="Copy or export the bundle again.", code="manifest-damaged"
        ) from None
    format_seen = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
    if not isinstance(manifest, dict) or type(format_seen) is not int or format_seen not in _READ:
        raise BundleError(
            f"{path} has format {format_value(format_seen)}, this version reads {FORMAT_3} and {FORMAT}.",
            remedy="Export the model again with this version.",
            code="bundle-format",
        )
    if manifest.get("manifest_sha256") != manifest_sha256(manifest):
        raise BundleError(
            f"{path} was changed after it was written: its own hash differs.",
            remedy="Copy or export the bundle again.",
            code="manifest-changed",
        )
    return manifest


def open_bundle(folder: Path | str) -> Bundle:
    """Open a bundle, after comparing its files with the manifest.

    The hashes of weights files are compared when an engine loads them.

    Args:
        folder: folder of the bundle, or of a tuning.

    Raises:
        BundleError: the manifest is invalid; or a file is missing, changed, outside of the folder, or would
            be read without being in the manifest.
        RunError: the folder is that of a tuning that has no bundle yet.
    """
    folder = resolve_bundle(Path(folder))
    manifest = read_manifest(folder)
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise BundleError(
            f"{folder / MANIFEST} lists no files.",
            remedy="Export the bundle again.",
            code="manifest-without-files",
        )
    chain = read_chain(folder, manifest)
    weights = {block.weights for block in chain.blocks}
    for name in files:
        check_file(folder, manifest, name, by_hash=name not in weights)
    _check_unlisted(folder, files)
    return Bundle(folder, manifest, chain)


def read_chain(folder: Path, manifest: Mapping[str, Any]) -> Chain:
    """Read the chain of a manifest; raises BundleError if it is invalid or one of its files isn't listed."""
    block = manifest.get("chain")
    chain = Chain.from_json(chain_of_format_3(block) if manifest["format"] == FORMAT_3 else block)
    needed = {program.file for program in chain.programs} | {block.weights for block in chain.blocks}
    needed |= {TABLES} if any(table.type in STORED_TABLES for table in chain.tables) else set()
    if missing := sorted(needed - set(manifest["files"])):
        raise BundleError(
            f"{folder / MANIFEST} doesn't list {format_value(missing[0])}.",
            remedy="Copy or export the bundle again.",
            code="manifest-lacks-file",
        )
    return chain


def _check_unlisted(folder: Path, files: Mapping[str, Any]) -> None:
    """Raise BundleError if the folder of the adapter or the tokenizer has a file that the manifest lacks."""
    for name in (ADAPTER, TOKENIZER):
        for path in sorted((folder / name).glob("[!.]*")):
            if f"{name}/{path.name}" not in files:
                raise BundleError(
                    f"{path} is not in the bundle's manifest.",
                    remedy="Remove it, or copy the bundle again.",
                    code="file-not-in-manifest",
                )


def check_file(folder: Path, manifest: Mapping[str, Any], name: str, by_hash: bool = True) -> None:
    """Compare a file with its manifest entry: path, size and, with `by_hash`, hash.

    Raises:
        BundleError: the file is missing, a link, outside of the folder, or has another size or hash.
    """
    entry = manifest["files"][name]
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name:
        raise BundleError(
            f"{folder / MANIFEST} names a file outside the bundle: {format_value(name)}",
            remedy="Don't use this bundle.",
            code="file-outside-bundle",
        )
    if not (isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and "sha256" in entry):
        raise BundleError(
            f"{folder / MANIFEST} has no size or no hash of {name}.",
            remedy="Export the bundle again.",
            code="manifest-lacks-hash",
        )
    path = folder / relative
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in relative.parts):
        raise BundleError(
            f"The bundle lacks its file {format_value(name)}.",
            remedy="Copy or export the bundle again.",
            code="bundle-file-missing",
        )
    if any((folder / part).is_symlink() for part in (relative, *relative.parents[:-1])):
        raise BundleError(
            f"{path} is a link or in a linked folder.",
            remedy="Copy the bundle with its links followed.",
            code="bundle-file-linked",
        )
    if not path.is_file():
        raise BundleError(
            f"The bundle lacks its file {name}.",
            remedy="Copy or export the bundle again.",
            code="bundle-file-missing",
        )
    if path.stat().st_size != entry["bytes"]:
        raise BundleError(
            f"{path} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}.",
            remedy="Copy or export the bundle again.",
            code="bundle-file-size",
        )
    if by_hash:
        check_content(folder, manifest, name)


def check_content(folder: Path, manifest: Mapping[str, Any], name: str) -> None:
    """Compare a file's hash with the manifest's; raises BundleError if they differ."""
    path = folder / name
    if file_sha256(path) != manifest["files"][name]["sha256"]:
        raise BundleError(
            f"{path} is not the file that the manifest names: its SHA-256 differs.",
            remedy="Copy or export the bundle again.",
            code="bundle-file-hash",
        )
