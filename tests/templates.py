"""Hand-made adapters and their PEFT folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

from prge.formats.adapter import Adapter
from prge.model_spec import AdaptedModule


def random_adapter(modules: Sequence[AdaptedModule], seed: int = 0, size: float = 1.0) -> Adapter:
    """Return an adapter of normal values times `size`."""
    adapter = Adapter.zeros(tuple(modules))
    adapter.values[:] = np.random.default_rng(seed).standard_normal(adapter.size) * size
    return adapter


def write_peft_folder(folder: Path, modules: Sequence[AdaptedModule], alpha: float = 16) -> Path:
    """Write a PEFT folder like a bundle's `adapter/`: random lora_A, zero lora_B."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    tensors = {}
    for module in modules:
        prefix = f"base_model.model.{module.name}"
        lora_a = random.normal(size=(module.rank, module.in_features))
        tensors[f"{prefix}.lora_A.weight"] = lora_a.astype(np.float32)
        tensors[f"{prefix}.lora_B.weight"] = np.zeros((module.out_features, module.rank), np.float32)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": modules[0].rank,
        "lora_alpha": alpha,
        "target_modules": [module.name for module in modules],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
