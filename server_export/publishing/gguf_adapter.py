"""A trained adapter as the GGUF file that llama.cpp loads beside a model: `--lora adapter.gguf`.

Names, shapes and keys are those that llama.cpp's `convert_lora_to_gguf.py` writes and `llama-adapter.cpp`
reads (https://github.com/ggml-org/llama.cpp). It multiplies the product of both matrices by alpha / rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from prge.engine import Array
from prge.errors import BundleError, PrgeError
from prge.files.peft import PeftAdapter
from prge.host.packages import install_extra

# transformers' name of an architecture, and llama.cpp's.
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
# llama.cpp turns pairs of neighbours in these, transformers a head's first half with its second one.
_TURNED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def write_gguf(path: Path, adapter: PeftAdapter, config: Any) -> None:
    """Write the adapter of a model with the transformers configuration `config`.

    Raises:
        BundleError: llama.cpp has no such model, or no weights for one of the adapter's modules.
        PrgeError: the package gguf is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise PrgeError(
            "writing GGUF needs the package gguf, which is not installed",
            remedy=install_extra("gguf"),
            code="package-missing",
        ) from None
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise BundleError(
            f"an adapter of {config.model_type} can't be written as GGUF, those of "
            f"{', '.join(ARCHITECTURES)} can",
            remedy="publish it as peft or merged, and convert that with llama.cpp's own scripts",
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
                f"llama.cpp has no weights for {module} of {config.model_type}",
                remedy="publish the model as merged, and convert that with llama.cpp's own scripts",
                code="no-gguf-weight",
            )
        lora_b = adapter.lora_b[module]
        if architecture == "llama":
            lora_b = lora_b[row_order(module, len(lora_b), config)]
        writer.add_tensor(f"{name}.weight.lora_a", np.ascontiguousarray(lora_a, np.float32))
        # llama.cpp divides the one alpha by each tensor's own rank.
        scale = adapter.scale_of(module) * len(lora_a) / adapter.alpha
        writer.add_tensor(f"{name}.weight.lora_b", np.ascontiguousarray(lora_b * scale, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def row_order(module: str, rows: int, config: Any) -> Array:
    """Which outputs of a Llama's layer follow each other in llama.cpp's weights."""
    numbers = np.arange(rows)
    heads_of = _TURNED.get(module.rpartition(".")[2])
    if heads_of is None:
        return numbers
    heads = getattr(config, heads_of, None) or config.num_attention_heads
    return numbers.reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1)
