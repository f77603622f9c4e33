"""Write the files of a bundle other than its programs and weights."""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from prge import __version__
from prge.formats.bundle import ADAPTER, FORMAT, MANIFEST, TOKENIZER, file_sha256, manifest_sha256
from prge.formats.chain import Chain
from prge.formats.layers import LAYERS
from prge.formats.peft import HEAD, PeftAdapter, write_lora
from prge.objectives.classification_head import Head
from prge.training.checkpoint import head_arrays
from prge.training.costs import ModelSizes
from server_export.adapter.initial_adapter import StartAdapter
from server_export.check.chain import ChainVerification
from server_export.checkpoint.base_model import base_of
from server_export.checkpoint.classifier import CheckpointClassifier
from server_export.checkpoint.loading import LoadedModel
from server_export.checkpoint.tokenization import write_tokenizer
from server_export.quantize.quantization import QuantizationReport
from server_export.settings import ExportConfig

_PACKAGES = ("torch", "executorch", "torchao", "transformers", "peft", "tokenizers")


def write_adapter(folder: Path, start: StartAdapter) -> None:
    """Write the adapter that training starts from as a PEFT folder."""
    targets = start.target_modules
    config = {
        "peft_type": "LORA",
        "r": start.rank,
        "lora_alpha": _integer_if_whole(start.alpha),
        # PEFT's fields for layers with another rank or alpha than the default.
        "rank_pattern": {name: len(a) for name, a in start.lora_a.items() if len(a) != start.rank},
        "alpha_pattern": {
            name: _integer_if_whole(alpha) for name, alpha in start.alphas.items() if alpha != start.alpha
        },
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        # PEFT's fan_in_fan_out: the base layer's weight is transposed, as GPT-2's is.
        **({"use_rslora": True} if start.use_rslora else {}),
        "fan_in_fan_out": start.had_conv1d,
        "task_type": _task_type(start.loaded),
        **base_of(start.loaded).to_peft(),
        "inference_mode": True,
    }
    lora_a, lora_b = (
        {name: matrix.numpy() for name, matrix in matrices.items()}
        for matrices in (start.lora_a, start.lora_b)
    )
    write_lora(folder, PeftAdapter(config, lora_a, lora_b))


def _task_type(loaded: LoadedModel) -> str | None:
    """Return PEFT's task type of a model; None for encoders that don't accept PEFT's arguments."""
    if loaded.is_decoder:
        return "CAUSAL_LM"
    parameters = inspect.signature(loaded.model.forward).parameters
    is_headless = loaded.classifier is None
    return "FEATURE_EXTRACTION" if is_headless and "inputs_embeds" in parameters else None


def write_bundle(
    folder: Path,
    config: ExportConfig,
    start: StartAdapter,
    chain: Chain,
    outline: ModelSizes,
    tokenizer: Any,
    tokenizer_block: Mapping[str, Any],
    quantization: QuantizationReport,
    verification: ChainVerification,
    layers: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Fill a folder that already has programs and weights with all other files; return the manifest.

    Args:
        folder: the bundle's folder.
        config: the export's settings.
        start: the adapter that training starts from, and the model.
        chain: the description of the programs.
        outline: the sizes of the model.
        tokenizer: the tokenizer of transformers.
        tokenizer_block: the manifest's `tokenizer` entry.
        quantization: how the weights are quantized.
        verification: the results of the checks.
        layers: the table of calibrated layers; empty if none are calibrated.
    """
    write_adapter(folder / ADAPTER, start)
    classifier = start.loaded.classifier
    if classifier is not None:
        save_file(head_arrays(_head(classifier)), folder / ADAPTER / HEAD)
    write_tokenizer(tokenizer, folder / TOKENIZER)
    if layers:
        (folder / LAYERS).write_text(json.dumps(layers, indent=1) + "\n", encoding="utf-8")
    content = {
        "chain": chain.to_json(),
        "outline": outline.to_json(),
        "lora": _lora_entry(config, start),
        **({} if classifier is None else {"head": _head_entry(classifier)}),
        "model": _model_entry(start.loaded, start.parameters),
        "quantization": quantization.to_json(),
        "tokenizer": dict(tokenizer_block),
        "verification": verification.to_json(),
    }
    return write_manifest(folder, content)


def _head(classifier: CheckpointClassifier) -> Head:
    """Return the last layer of a checkpoint's own head as the driver's head."""
    linear = classifier.linear
    head = Head(linear.out_features, linear.in_features)
    head.weight[:] = linear.weight.numpy()
    if linear.bias is not None:
        head.bias[:] = linear.bias.numpy()
    return head


def _head_entry(classifier: CheckpointClassifier) -> dict[str, Any]:
    return {"layer": classifier.layer, "labels": [*classifier.labels]}


def _lora_entry(config: ExportConfig, start: StartAdapter) -> dict[str, Any]:
    return {
        "adapter": config.adapter,
        "rank": start.rank,
        "alpha": start.alpha,
        "target_modules": start.target_modules,
        "seed": config.seed if config.start_adapter is None else None,
        "source": str(config.start_adapter) if config.start_adapter is not None else None,
        "init": config.init if config.start_adapter is None else None,
    }


def write_manifest(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest of a folder with the hashes of all other files and of itself; return it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        "format": FORMAT,
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


def _model_entry(loaded: LoadedModel, parameters: int) -> dict[str, Any]:
    return {
        "name_or_path": loaded.name_or_path,
        "revision": loaded.revision,
        "sha256": loaded.sha256,
        "architecture": type(loaded.model).__name__,
        "model_type": loaded.config.model_type,
        "parameters": parameters,
        **({"source": dict(loaded.source)} if loaded.source else {}),
        **(
            {"text_part_of": loaded.part_of, "key_mapping": dict(loaded.key_mapping)}
            if loaded.part_of is not None
            else {}
        ),
    }


def _integer_if_whole(value: float) -> float | int:
    return int(value) if value == int(value) else value
