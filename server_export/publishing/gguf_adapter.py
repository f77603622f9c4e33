"""Write a trained adapter as a GGUF file for llama.cpp's `--lora adapter.gguf`.

Names, shapes and keys are those that llama.cpp's `convert_lora_to_gguf.py` writes and `llama-adapter.cpp`
reads (https://github.com/ggml-org/llama.cpp). llama.cpp multiplies the product of both matrices by
alpha / rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from prge.engine import Array
from prge.errors import BundleError, PrgeError
from prge.formats.peft import PeftAdapter
from prge.system.packages import install_extra_command

# llama.cpp's names of architectures, by transformers' names.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
}
# Layers with rotary embeddings: llama.cpp rotates pairs of neighbours, transformers the halves of a head.
_ROTATED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def write_gguf(path: Path, adapter: PeftAdapter, config: Any) -> None:
    """Write an adapter as GGUF.

    Args:
        path: the file.
        adapter: the adapter.
        config: configuration of the base model in transformers.

    Raises:
        BundleError: llama.cpp lacks the architecture, or the weight of an adapted module.
        PrgeError: the package gguf is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise PrgeError(
            "Writing GGUF needs the package gguf, which is not installed.",
            remedy=install_extra_command("gguf"),
            code="package-missing",
        ) from None
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise BundleError(
            f"Cannot write an adapter of {config.model_type} as GGUF. Supported are "
            f"{', '.join(ARCHITECTURES)}.",
            remedy="Publish it as peft or merged, and convert that with llama.cpp's own scripts.",
            code="no-gguf-architecture",
        )
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.alpha)
    for module, lora_a in adapter.lora_a.items():
        name = names.get_name(module)
        if name is None or (name == "output" and config.tie_word_embeddings):
            raise BundleError(
                f"llama.cpp has no weight for {module} of {config.model_type}.",
                remedy="Publish the model as merged, and convert that with llama.cpp's own scripts.",
                code="no-gguf-weight",
            )
        lora_b = adapter.lora_b[module]
        if architecture == "llama":
            lora_b = lora_b[row_order(module, len(lora_b), config)]
        writer.add_tensor(f"{name}.weight.lora_a", np.ascontiguousarray(lora_a, np.float32))
        # The file has one alpha, which llama.cpp divides by each tensor's own rank.
        scale = adapter.scale_of(module) * len(lora_a) / adapter.alpha
        writer.add_tensor(f"{name}.weight.lora_b", np.ascontiguousarray(lora_b * scale, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def row_order(module: str, rows: int, config: Any) -> Array:
    """Return the order of a Llama layer's output rows in llama.cpp's weights.

    Args:
        module: name of the layer.
        rows: number of output rows.
        config: configuration of the model in transformers.
    """
    order = np.arange(rows)
    heads_name = _ROTATED.get(module.rpartition(".")[2])
    if heads_name is None:
        return order
    heads = getattr(config, heads_name, None) or config.num_attention_heads
    return order.reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1)
