"""Hand-made bundles: valid in every hash and shape, with bytes that are no programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prge.formats.bundle import (
    ADAPTER,
    FORMAT,
    MANIFEST,
    TABLES,
    TOKENIZER,
    Bundle,
    file_sha256,
    manifest_sha256,
)
from prge.formats.chain import BlockProgram, BlockSpec, Bounds, Chain, Interface, TableSpec
from prge.formats.signatures import BACKWARD, BACKWARD_SAVED, FORWARD, FORWARD_SAVE, JVP
from prge.model_spec import AdaptedModule, ModelSpec

PROGRAM = "programs/block.pte"
FILES = {
    f"{ADAPTER}/adapter_config.json": b"{}\n",
    f"{ADAPTER}/adapter_model.safetensors": b"adapter " * 64,
    f"{TOKENIZER}/tokenizer.json": b'{"version": "1.0"}\n',
}
MODULES = (AdaptedModule("layers.0.q_proj", 4, 8, 8), AdaptedModule("layers.0.v_proj", 4, 8, 6))


def make_spec(**changes: Any) -> ModelSpec:
    """Return a decoder's spec with two adapted modules and sequences of up to 16 tokens."""
    fields: dict[str, Any] = {
        "readout": "logprobs",
        "width": 0,
        "vocabulary_size": 64,
        "sequence_length": 16,
        "modules": MODULES,
    }
    return ModelSpec(**{**fields, **changes})


def _methods(is_encoder: bool) -> tuple[dict[str, Interface], dict[str, Interface]]:
    """Return the interfaces of all roles, of a block with two adapted modules and of a head."""
    extra_inputs = ("table.0", "ones", *(["padding_mask"] if is_encoder else []))
    matrices = ("lora_b.0", "lora_b.1")
    factors = ("u.0", "v.0", "u.1", "v.1")
    block = {
        FORWARD: Interface(("hidden_states", *extra_inputs, *matrices), ("hidden_states",)),
        JVP: Interface(
            ("hidden_states", *extra_inputs, *matrices, "tangent_hidden_states", *factors),
            ("hidden_states", "tangent_hidden_states"),
        ),
        BACKWARD: Interface(
            ("hidden_states", *extra_inputs, *matrices, "grad_hidden_states"),
            ("grad_hidden_states", "grad_lora_b.0", "grad_lora_b.1"),
        ),
        FORWARD_SAVE: Interface(
            ("hidden_states", *extra_inputs, *matrices), ("hidden_states", "residual.0", "residual.1")
        ),
        BACKWARD_SAVED: Interface(
            ("hidden_states", *extra_inputs, *matrices, "grad_hidden_states", "residual.0", "residual.1"),
            ("grad_hidden_states", "grad_lora_b.0", "grad_lora_b.1"),
        ),
    }
    head = {
        FORWARD: Interface(("hidden_states", "targets", "shift"), ("parts",)),
        JVP: Interface(
            ("hidden_states", "targets", "shift", "tangent_hidden_states"), ("parts", "tangent_parts")
        ),
        BACKWARD: Interface(("hidden_states", "targets", "shift", "grad_parts"), ("grad_hidden_states",)),
        FORWARD_SAVE: Interface(("hidden_states", "targets", "shift"), ("parts", "residual.0")),
        BACKWARD_SAVED: Interface(
            ("hidden_states", "targets", "shift", "grad_parts", "residual.0"), ("grad_hidden_states",)
        ),
    }
    return block, head


def make_small_chain(**changes: Any) -> Chain:
    """Return a decoder's chain of embedding, block with two adapted modules, and head; 16 tokens."""

    is_encoder = changes.get("readout") == "pooled"
    block, head = _methods(is_encoder)
    programs = [
        BlockProgram("programs/embedding.pte", {FORWARD: Interface(("tokens",), ("hidden_states",))}),
        BlockProgram("programs/block.pte", block),
        BlockProgram("programs/head.pte", head),
    ]
    blocks = [
        BlockSpec(0, "weights/embedding.ptd", (), ()),
        BlockSpec(1, "weights/000.ptd", (0, 1), (0, 1)),
        BlockSpec(2, "weights/head.ptd", (), ()),
    ]
    fields: dict[str, Any] = {
        "readout": "logprobs",
        "pooling": "mean",
        "width": 8,
        "vocabulary_size": 64,
        "modules": MODULES,
        "bounds": Bounds(copies=8, batch=4, queries=8, tokens=16, states=128),
        "tables": (TableSpec("causal", 7), TableSpec("rotary")),
        "programs": tuple(programs[:2] if is_encoder else programs),
        "blocks": tuple(blocks[:2] if is_encoder else blocks),
    }
    return Chain(**{**fields, **changes})


def make_bundle(folder: Path, chain: Chain | None = None, **changes: Any) -> Path:
    """Write a complete bundle into `folder` and return it.

    An adapter and a tokenizer that are there are kept; `changes` replace parts of the manifest.
    """
    chain = chain or make_small_chain()
    files = {program.file: b"program " * 64 for program in chain.programs}
    files |= {block.weights: b"weights " * 64 * (1 + number) for number, block in enumerate(chain.blocks)}
    block = {"format": FORMAT, "chain": chain.to_json(), **changes}
    return _write_bundle(folder, {**FILES, **files, TABLES: b"tables"}, block)


def in_memory_bundle(chain: Chain | None = None, **manifest: Any) -> Bundle:
    """Return a bundle that is in no folder."""
    chain = chain or make_small_chain()
    return Bundle(Path(), manifest, chain)


def make_chain(readout: str = "logprobs", lowest: int = 1) -> Chain:
    """Return a chain of four blocks of three types; adapted blocks, from `lowest` on, have two modules."""
    is_encoder = readout == "pooled"
    block, head = _methods(is_encoder)
    plain = {FORWARD: Interface(("hidden_states", "table.0"), ("hidden_states",))}
    programs = [BlockProgram("programs/embedding.pte", {FORWARD: Interface(("tokens",), ("hidden_states",))})]
    programs += [BlockProgram("programs/block.pte", block)]
    programs += [] if is_encoder else [BlockProgram("programs/head.pte", head)]
    programs += [BlockProgram("programs/plain.pte", plain)] if lowest == 2 else []
    adapted = range(lowest, 4 if is_encoder else 3)
    module_indices = {number: (2 * index, 2 * index + 1) for index, number in enumerate(adapted)}
    numbers = [0, 1 if lowest == 1 else len(programs) - 1, 1, 1 if is_encoder else 2]
    tables = ((), (0,), (0,), (0,) if is_encoder else ())
    return Chain(
        readout=readout,
        pooling="mean",
        width=8,
        vocabulary_size=64,
        modules=tuple(
            AdaptedModule(f"layers.{number}.{name}", 4, 8, out)
            for number in adapted
            for name, out in (("q_proj", 8), ("v_proj", 6))
        ),
        bounds=Bounds(tokens=16),
        tables=(TableSpec("causal", window=5), TableSpec("positions", first=2)),
        programs=tuple(programs),
        blocks=tuple(
            BlockSpec(
                program_index, f"weights/{number:03d}.ptd", tables[number], module_indices.get(number, ())
            )
            for number, program_index in enumerate(numbers)
        ),
    )


def _write_bundle(folder: Path, files: Mapping[str, bytes], changes: Mapping[str, Any]) -> Path:
    there = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
    for name, content in files.items():
        if name not in there:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    files = {**files, **there}
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


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a bundle's manifest without checks."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def rehash(folder: Path) -> None:
    """Update a manifest's hashes to its files, as an attacker would."""
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        entry["sha256"], entry["bytes"] = file_sha256(folder / name), (folder / name).stat().st_size
    write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest with the hash of its content."""
    content = {**manifest, "manifest_sha256": manifest_sha256(manifest)}
    (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
