"""A bundle made by hand: right in every hash and shape, with bytes that are no program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prge.bundle import ADAPTER, MANIFEST, PROGRAM, TOKENIZER, file_sha256, manifest_sha256
from prge.contract import FORMAT, AdaptedModule, Contract

FILES = {
    PROGRAM: b"program " * 64,
    f"{ADAPTER}/adapter_config.json": b"{}\n",
    f"{ADAPTER}/adapter_model.safetensors": b"adapter " * 64,
    f"{TOKENIZER}/tokenizer.json": b'{"version": "1.0"}\n',
}


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
        "modules": (AdaptedModule("layers.0.q_proj", 4, 8, 8), AdaptedModule("layers.0.v_proj", 4, 8, 6)),
    }
    return Contract(**{**fields, **changes})


def make_bundle(folder: Path, **changes: Any) -> Path:
    """Write a whole bundle into `folder`; `changes` replace blocks of its manifest."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "contract": make_contract().to_json(),
        "queries": 2,
        "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"], "seed": 0, "source": None},
        "model": {"name_or_path": "tiny", "revision": None, "model_type": "llama", "parameters": 1000},
        "quantization": {"scheme": "8da8w", "group_size": None, "per_channel": [], "embedding": "fp32"},
        "tokenizer": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocabulary_size": 64},
        "lowering": {
            "delegated_share": 0.97,
            "delegates": 3,
            "outside": {"aten.gather.out": 1},
            "planned_memory_bytes": 3 << 20,
            "constant_bytes": 5 << 20,
        },
        "verification": {"max_absolute_difference": 1e-4, "tolerance": 1e-2, "rows": 8},
        "versions": {"prge": "0.1.0", "torch": "2.13.0", "executorch": "1.5.1"},
        "files": {
            name: {"sha256": file_sha256(folder / name), "bytes": len(content)}
            for name, content in FILES.items()
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
