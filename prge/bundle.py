"""Reading a bundle: the folder that an export writes and a device needs.

    manifest.json   contract, model, quantization, versions, verification, sha256 of every other file
    program.pte     the program: the method `forward` takes steps, and `score` scores where that can't;
                    a step that is cut is `trunk`, what no adapter changes, and `step`, what is above;
                    `<method>_<length>` is a method for rows of at most so many tokens
    adapter/        the adapter to start from, a PEFT folder (lora_A and lora_B)
    tokenizer/      tokenizer.json and, where the model has one, chat_template.jinja

A bundle from elsewhere is untrusted: nothing of it is loaded before its hash is compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from prge.chain import STACK, Chain
from prge.contract import CHAIN_FORMAT, FORMAT, Contract, TensorSpec, tensor_specs
from prge.documents import DocumentError, read_json
from prge.errors import BundleError, shown

MANIFEST = "manifest.json"
PROGRAM = "program.pte"
TABLES = "tables.safetensors"
PROGRAMS, WEIGHTS = "programs", "weights"
ADAPTER = "adapter"
TOKENIZER = "tokenizer"
STEP_METHOD = "forward"
SCORE_METHOD = "score"
TRUNK_METHOD = "trunk"
UPPER_METHOD = "step"
MOST_LENGTHS = 64
LONGEST_NAME = 255


@dataclass(frozen=True)
class Bundle:
    """An opened bundle whose files have the hashes that its manifest names.

    `contract` is of the method that takes steps, `scoring` of the one that scores where that is another one,
    `trunk` of the one that a step which is cut continues. `shorter` has the lengths below theirs that every
    method has a variant for, shortest first, with what crosses its cut.
    """

    folder: Path
    contract: Contract
    manifest: Mapping[str, Any]
    scoring: Contract | None = None
    trunk: Contract | None = None
    shorter: Mapping[int, tuple[TensorSpec, ...]] = field(default_factory=dict)
    chain: Chain | None = None

    def file(self, name: str) -> Path:
        """One of the manifest's files."""
        return self.folder / name

    def hash_of(self, name: str) -> str:
        """SHA-256 of one of the manifest's files."""
        return str(self.manifest["files"][name]["sha256"])

    def for_calls(self, contract: Contract, scoring: Contract) -> Bundle:
        """The bundle for a run that has chosen what a step's and a scoring call look like."""
        return replace(self, contract=contract, scoring=scoring)

    @property
    def methods(self) -> dict[str, Contract]:
        """The methods of the program with their contracts."""
        return {name: variant for method in self._longest for name, variant in self.variants(method).items()}

    def variants(self, method: str) -> dict[str, Contract]:
        """The methods that do what `method` does for rows of different lengths, shortest first, it last."""
        contract = self._longest[method]
        shorter = {
            variant_name(method, length): contract.shortened(length, cut)
            for length, cut in self.shorter.items()
        }
        return {**shorter, method: contract}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a row in the variants of every method, shortest first."""
        return (*self.shorter, self.contract.sequence_length)

    @property
    def _longest(self) -> dict[str, Contract]:
        named = {TRUNK_METHOD: self.trunk, self.step_method: self.contract, SCORE_METHOD: self.scoring}
        return {method: contract for method, contract in named.items() if contract is not None}

    @property
    def step_method(self) -> str:
        """The method that takes steps."""
        return UPPER_METHOD if self.trunk else STEP_METHOD

    @property
    def score_method(self) -> str:
        """The method that scores examples."""
        return SCORE_METHOD if self.scoring else self.step_method

    @property
    def score_contract(self) -> Contract:
        """Contract of the method that scores examples."""
        return self.scoring or self.contract

    @property
    def pooling(self) -> str | None:
        """How an encoder's states become one vector; None for a decoder's."""
        if not self.contract.is_encoder:
            return None
        block = self.manifest.get("readout")
        return (
            self.chain.pooling if self.chain else block.get("pooling") if isinstance(block, Mapping) else None
        )

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
            "program": self.manifest["files"].get(PROGRAM),
            "model": self.manifest.get("model"),
            "quantization": self.manifest.get("quantization"),
        }

    @property
    def program(self) -> Path:
        """The `.pte` file."""
        return self.folder / PROGRAM

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


def variant_name(method: str, length: int) -> str:
    """Name of the variant of a method for rows of at most `length` tokens."""
    return f"{method}_{length}"


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
        )
    try:
        manifest = read_json(path)
    except DocumentError as error:
        raise BundleError(f"{path} is damaged: {error}", remedy="copy or export the bundle again") from None
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, CHAIN_FORMAT):
        format_seen = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise BundleError(
            f"{path} has format {shown(format_seen)}, this version reads {FORMAT} and {CHAIN_FORMAT}",
            remedy="export the bundle again with this version",
        )
    if manifest.get("manifest_sha256") != manifest_sha256(manifest):
        raise BundleError(
            f"{path} was changed after it was written: its own hash differs",
            remedy="copy or export the bundle again",
        )
    return manifest


def open_bundle(folder: Path | str) -> Bundle:
    """Open a bundle after comparing every file with the manifest.

    Raises:
        BundleError: the manifest is unusable; a file is missing, changed, outside the folder, or in the place
            of one that is read and not in the manifest.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    files = manifest.get("files")
    if manifest["format"] == CHAIN_FORMAT and isinstance(files, dict):
        return _open_chain(folder, manifest, files)
    if not isinstance(files, dict) or PROGRAM not in files:
        raise BundleError(f"{folder / MANIFEST} lists no {PROGRAM}", remedy="export the bundle again")
    for name in files:
        check_file(folder, manifest, name)
    _check_unlisted(folder, files)
    contract, scoring = read_contracts(manifest)
    trunk, shorter = read_trunk(manifest, contract), read_shorter(manifest, contract)
    return Bundle(folder, contract, manifest, scoring, trunk, shorter)


def read_chain(folder: Path, manifest: Mapping[str, Any]) -> Chain:
    """The chain that a manifest describes; raises BundleError if it can't be run or a file isn't listed."""
    chain = Chain.from_json(manifest.get("chain"))
    needed = {kind.program for kind in chain.kinds} | {block.weights for block in chain.blocks}
    needed |= {TABLES} if any(table.kind == "rotary" for table in chain.tables) else set()
    if missing := sorted(needed - set(manifest["files"])):
        raise BundleError(
            f"{folder / MANIFEST} lists no {shown(missing[0])}", remedy="copy or export the bundle again"
        )
    return chain


def _open_chain(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, Any]) -> Bundle:
    """A bundle of a chain; the hashes of its weights are compared when an engine takes them."""
    chain = read_chain(folder, manifest)
    weights = {block.weights for block in chain.blocks}
    for name in files:
        check_file(folder, manifest, name, by_hash=name not in weights)
    _check_unlisted(folder, files)
    step = chain.contract(STACK, chain.bounds.batch)
    scoring = chain.contract(STACK, chain.bounds.copies * chain.bounds.batch)
    return Bundle(folder, step, manifest, scoring, chain=chain)


def chain_of(bundle: Bundle) -> Chain:
    """The chain of a bundle that has one; raises BundleError for one of version 1."""
    if bundle.chain is None:
        raise BundleError(f"{bundle.folder} is a bundle of version 1", remedy="export the model again")
    return bundle.chain


def _check_unlisted(folder: Path, files: Mapping[str, Any]) -> None:
    """Refuse files that a reader could take for the bundle's and whose hash nobody knows."""
    for name in (ADAPTER, TOKENIZER):
        for path in sorted((folder / name).glob("[!.]*")):
            if f"{name}/{path.name}" not in files:
                raise BundleError(
                    f"{path} is not in the bundle's manifest", remedy="remove it, or copy the bundle again"
                )


def read_shorter(manifest: Mapping[str, Any], contract: Contract) -> dict[int, tuple[TensorSpec, ...]]:
    """The lengths below a step's that the methods have variants for, with what crosses a step's cut.

    Raises:
        BundleError: they can't be read, don't rise up to the step's length, or have another cut.
    """
    try:
        cuts = {
            int(block["sequence_length"]): tensor_specs(block.get("cut", ()))
            for block in manifest.get("lengths") or ()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BundleError(
            f"the manifest's lengths can't be read: {shown(error)}", remedy="export the bundle again"
        ) from None
    lengths = [*cuts, contract.sequence_length]
    if len(lengths) > MOST_LENGTHS:
        raise BundleError(
            f"the manifest has {len(lengths)} lengths, must be at most {MOST_LENGTHS}",
            remedy="export the bundle again",
        )
    expected = [(spec.name, len(spec.shape)) for spec in contract.cut]
    if lengths != sorted(set(lengths)) or any(
        [(spec.name, len(spec.shape)) for spec in cut] != expected for cut in cuts.values()
    ):
        raise BundleError(
            f"the manifest's lengths {', '.join(map(str, lengths))} are not those of one program",
            remedy="export the bundle again",
        )
    for length, cut in cuts.items():
        contract.shortened(length, cut)
    return cuts


def read_trunk(manifest: Mapping[str, Any], contract: Contract) -> Contract | None:
    """The contract of the trunk that a step's program continues, if it continues one.

    Raises:
        BundleError: it can't be read, or is not the one that the step was cut from.
    """
    block = manifest.get("trunk")
    trunk = None if block is None else Contract.from_json(block)
    expected = contract.divided(contract.cut)[0] if contract.cut else None
    if trunk != expected or contract.kind == "trunk":
        raise BundleError(
            f"the methods {TRUNK_METHOD} and {UPPER_METHOD} don't belong together",
            remedy="export the bundle again",
        )
    return trunk


def read_contracts(manifest: Mapping[str, Any]) -> tuple[Contract, Contract | None]:
    """The contract of the method that takes steps, and of the one that scores where that is another one.

    Raises:
        BundleError: one can't be read, a program that can't score lacks the second, or the two are not of one
            model.
    """
    contract = Contract.from_json(manifest.get("contract", {}))
    block = manifest.get("score")
    if block is None:
        if contract.can_score:
            return contract, None
        raise BundleError(
            f"the manifest describes no method {SCORE_METHOD}, and a program for steps like this one can't "
            "score",
            remedy="export the bundle again",
        )
    scoring = Contract.from_json(block)
    problems = [
        f"{name} is {shown(getattr(contract, name))} and {shown(getattr(scoring, name))}"
        for name in ("readout", "width", "vocabulary_size", "label_tokens", "modules")
        if getattr(contract, name) != getattr(scoring, name)
    ]
    if not scoring.can_score:
        problems.append(f"{SCORE_METHOD} is a program for steps only")
    if scoring.sequence_length < contract.sequence_length:
        problems.append(f"sequence_length is {contract.sequence_length} and only {scoring.sequence_length}")
    if problems:
        raise BundleError(
            f"the methods for steps and {SCORE_METHOD} don't belong together: " + "; ".join(problems),
            remedy="export the bundle again",
        )
    return contract, scoring


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
        )
    if not (isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and "sha256" in entry):
        raise BundleError(
            f"{folder / MANIFEST} says neither size nor hash of {name}", remedy="export the bundle again"
        )
    path = folder / relative
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in relative.parts):
        raise BundleError(
            f"the bundle lacks its file {shown(name)}", remedy="copy or export the bundle again"
        )
    if any((folder / part).is_symlink() for part in (relative, *relative.parents[:-1])):
        raise BundleError(
            f"{path} is a link or in a linked folder", remedy="copy the bundle with its links followed"
        )
    if not path.is_file():
        raise BundleError(f"the bundle lacks its file {name}", remedy="copy or export the bundle again")
    if path.stat().st_size != entry["bytes"]:
        raise BundleError(
            f"{path} has {path.stat().st_size} bytes, the manifest says {entry['bytes']}",
            remedy="copy or export the bundle again",
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
        )
