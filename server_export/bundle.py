"""Writing a bundle: whole or not at all."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prge import __version__
from prge.bundle import (
    ADAPTER,
    MANIFEST,
    PROGRAM,
    TOKENIZER,
    TRUNK_METHOD,
    file_sha256,
    manifest_sha256,
    variant_name,
)
from prge.chain import Chain
from prge.contract import CHAIN_FORMAT, FORMAT, TensorSpec
from prge.peft import PeftAdapter, write_lora
from server_export.check.chain import ChainVerification
from server_export.check.verification import Verification
from server_export.lower.lowering import LoweredProgram, LoweringReport
from server_export.model.base import base_of
from server_export.model.loading import LoadedModel
from server_export.model.program import SCORE_METHOD, BuiltProgram, StartAdapter
from server_export.model.quantization import QuantizationReport
from server_export.model.tokenization import tokenizer_block, write_tokenizer
from server_export.settings import ExportConfig

_PACKAGES = ("torch", "executorch", "torchao", "transformers", "peft", "tokenizers")


def write_program(folder: Path, lowered: LoweredProgram) -> Path:
    """Write the `.pte` into a bundle's folder."""
    path = folder / PROGRAM
    lowered.write(path)
    return path


def write_adapter(folder: Path, built: BuiltProgram | StartAdapter) -> None:
    """Write the adapter to start from as a PEFT folder."""
    targets = built.target_modules
    config = {
        "peft_type": "LORA",
        "r": built.rank,
        "lora_alpha": _integer_if_whole(built.alpha),
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        # PEFT's name for "the base layer stores its weight transposed", which GPT-2's does.
        "fan_in_fan_out": built.had_conv1d,
        "task_type": "CAUSAL_LM" if built.loaded.is_decoder else "FEATURE_EXTRACTION",
        **base_of(built.loaded).in_peft(),
        "inference_mode": True,
    }
    lora_a, lora_b = (
        {name: matrix.numpy() for name, matrix in matrices.items()}
        for matrices in (built.lora_a, built.lora_b)
    )
    write_lora(folder, PeftAdapter(config, lora_a, lora_b))


def write_bundle(
    folder: Path,
    config: ExportConfig,
    built: BuiltProgram,
    tokenizer: Any,
    lowering: Mapping[str, LoweringReport],
    verification: Verification,
    cut: tuple[TensorSpec, ...] = (),
    shorter_cuts: Mapping[int, tuple[TensorSpec, ...]] | None = None,
) -> dict[str, Any]:
    """Fill `folder`, which holds the program already, with everything else; returns the manifest.

    `cut` is what crosses from a program's trunk to its step, `shorter_cuts` the same by shorter length.
    """
    trunk, contract = built.contract.divided(cut) if cut else (None, built.contract)
    write_adapter(folder / ADAPTER, built)
    write_tokenizer(tokenizer, folder / TOKENIZER)
    content = {
        "contract": contract.to_json(),
        "score": None if built.score_contract is None else built.score_contract.to_json(),
        "trunk": None if trunk is None else trunk.to_json(),
        "lengths": [
            {
                "sequence_length": length,
                "cut": [asdict(spec) for spec in (shorter_cuts or {}).get(length, ())],
                "lowering": {
                    method: report.to_json()
                    for method, report in lowering.items()
                    if method.endswith(variant_name("", length))
                },
            }
            for length in built.shorter
        ],
        "queries": config.queries,
        "lora": _lora_block(config, built),
        "model": _model_block(built.loaded, built.parameters),
        "readout": {
            "pooling": config.pooling if built.contract.is_encoder else None,
            "label_words": config.label_words,
        },
        "quantization": built.quantization.to_json(),
        "tokenizer": tokenizer_block(tokenizer, config.prepend_bos, built.contract.vocabulary_size),
        "lowering": lowering[built.step_method].to_json(),
        "score_lowering": lowering[SCORE_METHOD].to_json() if SCORE_METHOD in lowering else None,
        "trunk_lowering": lowering[TRUNK_METHOD].to_json() if TRUNK_METHOD in lowering else None,
        "verification": verification.to_json(),
    }
    return write_manifest(folder, content)


def write_chain_bundle(
    folder: Path,
    config: ExportConfig,
    start: StartAdapter,
    chain: Chain,
    tokenizer: Any,
    quantization: QuantizationReport,
    verification: ChainVerification,
) -> dict[str, Any]:
    """Fill `folder`, which holds programs and weights already, with everything else; returns the manifest."""
    write_adapter(folder / ADAPTER, start)
    write_tokenizer(tokenizer, folder / TOKENIZER)
    content = {
        "chain": chain.to_json(),
        "lora": _lora_block(config, start),
        "model": _model_block(start.loaded, start.parameters),
        "readout": {"label_words": config.label_words},
        "quantization": quantization.to_json(),
        "tokenizer": tokenizer_block(tokenizer, config.prepend_bos, chain.vocabulary_size),
        "verification": verification.to_json(),
    }
    return write_manifest(folder, content, CHAIN_FORMAT)


def _lora_block(config: ExportConfig, built: BuiltProgram | StartAdapter) -> dict[str, Any]:
    return {
        "rank": built.rank,
        "alpha": built.alpha,
        "target_modules": built.target_modules,
        "seed": config.seed if config.adapter is None else None,
        "source": str(config.adapter) if config.adapter is not None else None,
    }


def write_manifest(folder: Path, content: Mapping[str, Any], version_number: int = FORMAT) -> dict[str, Any]:
    """Write the manifest of a folder that holds everything else, with its own hash and every file's."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        "format": version_number,
        **content,
        "versions": {
            "prge": __version__,
            **{name: version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        },
        "files": {
            path.relative_to(folder).as_posix(): {"sha256": file_sha256(path), "bytes": path.stat().st_size}
            for path in paths
        },
    }
    manifest["manifest_sha256"] = manifest_sha256(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _model_block(loaded: LoadedModel, parameters: int) -> dict[str, Any]:
    return {
        "name_or_path": loaded.name_or_path,
        "revision": loaded.revision,
        "sha256": loaded.sha256,
        "architecture": type(loaded.model).__name__,
        "model_type": loaded.config.model_type,
        "parameters": parameters,
    }


def _integer_if_whole(value: float) -> float | int:
    return int(value) if value == int(value) else value
