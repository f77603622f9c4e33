"""A bundle made by hand: right in every hash and shape, with bytes that are no program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prge.bundle import (
    ADAPTER,
    MANIFEST,
    PROGRAM,
    TABLES,
    TOKENIZER,
    file_sha256,
    manifest_sha256,
)
from prge.chain import ROLES, STACK, Block, Bounds, Chain, Interface, Kind, Table
from prge.contract import CHAIN_FORMAT, FORMAT, AdaptedModule, Contract

FILES = {
    PROGRAM: b"program " * 64,
    f"{ADAPTER}/adapter_config.json": b"{}\n",
    f"{ADAPTER}/adapter_model.safetensors": b"adapter " * 64,
    f"{TOKENIZER}/tokenizer.json": b'{"version": "1.0"}\n',
}


LOWERING = {
    "delegated_share": 0.97,
    "delegates": 3,
    "outside": {"aten.gather.out": 1},
    "planned_memory_bytes": 3 << 20,
    "constant_bytes": 5 << 20,
}
MODULES = (AdaptedModule("layers.0.q_proj", 4, 8, 8), AdaptedModule("layers.0.v_proj", 4, 8, 6))


def make_contract(**changes: Any) -> Contract:
    """A decoder's contract with two adapted modules: 4 copies of 2 examples, 16 tokens, 3 positions."""
    fields: dict[str, Any] = {
        "kind": "stack",
        "readout": "logprobs",
        "copies": 4,
        "batch_size": 2,
        "sequence_length": 16,
        "positions": 3,
        "width": 0,
        "vocabulary_size": 64,
        "label_tokens": (),
        "modules": MODULES,
    }
    return Contract(**{**fields, **changes})


def make_chain(**changes: Any) -> Chain:
    """A decoder's chain for all estimators: embedding, a block with two adapted modules, head; 16 tokens."""

    def methods(value: str, answer: str) -> dict[str, Interface]:
        return {role: Interface((value,), (answer,)) for role in ROLES}

    fields: dict[str, Any] = {
        "readout": "logprobs",
        "pooling": "mean",
        "width": 8,
        "vocabulary_size": 64,
        "label_tokens": (),
        "modules": MODULES,
        "bounds": Bounds(copies=8, batch=4, queries=8, tokens=16, states=128),
        "tables": (Table("causal", 7), Table("rotary")),
        "kinds": (
            Kind("programs/embedding.pte", {STACK: Interface(("tokens",), ("state",))}),
            Kind("programs/block.pte", methods("state", "state")),
            Kind("programs/head.pte", methods("state", "logprobs")),
        ),
        "blocks": (
            Block(0, "weights/embedding.ptd", (), ()),
            Block(1, "weights/000.ptd", (0, 1), (0, 1)),
            Block(2, "weights/head.ptd", (), ()),
        ),
    }
    return Chain(**{**fields, **changes})


def make_chain_bundle(folder: Path, chain: Chain | None = None, **changes: Any) -> Path:
    """Write a whole bundle of a chain into `folder`; `changes` replace blocks of its manifest."""
    chain = chain or make_chain()
    files = {name: content for name, content in FILES.items() if name != PROGRAM}
    files |= {kind.program: b"program " * 64 for kind in chain.kinds}
    files |= {block.weights: b"weights " * 64 * (1 + number) for number, block in enumerate(chain.blocks)}
    return _write_bundle(
        folder, {**files, TABLES: b"tables"}, {"format": CHAIN_FORMAT, "chain": chain.to_json(), **changes}
    )


def make_bundle(folder: Path, **changes: Any) -> Path:
    """Write a whole bundle into `folder`; `changes` replace blocks of its manifest."""
    block = {"format": FORMAT, "contract": make_contract().to_json(), "queries": 2, "lowering": LOWERING}
    return _write_bundle(folder, FILES, {**block, **changes})


def _write_bundle(folder: Path, files: Mapping[str, bytes], changes: Mapping[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest: dict[str, Any] = {
        "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"], "seed": 0, "source": None},
        "model": {"name_or_path": "tiny", "revision": None, "model_type": "llama", "parameters": 1000},
        "quantization": {"scheme": "8da8w", "group_size": None, "per_channel": [], "embedding": "fp32"},
        "tokenizer": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocabulary_size": 64},
        "verification": {"max_absolute_difference": 1e-4, "tolerance": 1e-2, "rows": 8},
        "versions": {"prge": "0.1.0", "torch": "2.13.0", "executorch": "1.5.1"},
        "files": {
            name: {"sha256": file_sha256(folder / name), "bytes": len(content)}
            for name, content in files.items()
        },
    }
    write_manifest(folder, {**manifest, **changes})
    return folder


def read_json(folder: Path) -> dict[str, Any]:
    """A bundle's manifest, unchecked."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest with the hash that its content has."""
    content = {**manifest, "manifest_sha256": manifest_sha256(manifest)}
    (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
