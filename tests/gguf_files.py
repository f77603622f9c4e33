"""Write GGUF files of tiny models in the form of llama.cpp's `convert_hf_to_gguf.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# llama.cpp's architecture names by transformers' names.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "lfm2": "lfm2",
}
_FILE_TYPES = {each.name.partition("_")[2]: each for each in gguf.LlamaFileType}


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Any,
    matrix_type: str = "F32",
    *,
    tensor_types: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    template: str | None = None,
    split: str = "gpt-2",
) -> Path:
    """Write a transformers model with its tokenizer and return the path.

    Args:
        path: path of the file.
        model: a causal language model.
        tokenizer: byte-level BPE.
        matrix_type: ggml's name of the type of matrices; one-dimensional tensors are F32.
        tensor_types: types of single tensors, by their names in the file.
        more: further keys, without the name of the architecture.
        tensors: further tensors.
        template: chat template.
        split: name of the rule that splits texts.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_name("Tiny")
    for key, value in {**_keys(config), **(more or {})}.items():
        _add(writer, f"{architecture}.{key}", value)
    _write_tokenizer(writer, tokenizer, config.vocab_size, split)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_file_type(_FILE_TYPES.get(matrix_type, gguf.LlamaFileType.GUESSED))
    for name, values in {**_tensors(model, architecture), **(tensors or {})}.items():
        chosen = (tensor_types or {}).get(name, matrix_type if values.ndim > 1 else "F32")
        stored = gguf.GGMLQuantizationType[chosen]
        writer.add_tensor(name, _stored(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    value_types = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
    }
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, value_types[type(value)])


def _keys(config: Any) -> dict[str, Any]:
    """Return the converter's metadata of a model, by keys without the architecture."""
    heads = config.num_attention_heads
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": heads,
    }
    if config.model_type == "gpt2":
        inner = config.n_inner or 4 * config.hidden_size
        return keys | {
            "feed_forward_length": inner,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameters = config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    keys |= {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None) or config.norm_eps,
        "rope.freq_base": float(parameters["rope_theta"]),
    }
    if config.model_type == "lfm2":
        counts = [config.num_key_value_heads * (layer_type != "conv") for layer_type in config.layer_types]
        return keys | {"attention.head_count_kv": counts, "shortconv.l_cache": config.conv_L_cache}
    if config.model_type == "llama":
        keys |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim}
    if config.model_type in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if config.model_type in ("gemma2", "gemma3_text"):
        keys |= {"attention.sliding_window": config.sliding_window}
    if config.model_type == "gemma2":
        names = ("attn_logit_softcapping", "final_logit_softcapping")
        keys |= {name: float(getattr(config, name)) for name in names}
    if config.model_type == "phi3":
        keys |= {"rope.dimension_count": head_dim, "attention.sliding_window": config.sliding_window}
    if config.model_type.endswith("_moe"):
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if config.model_type == "qwen2_moe":
        keys |= {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    return keys


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Return the weights with llama.cpp's names and layout."""
    config = model.config
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    written = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        if name.endswith(".experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = np.split(values, 2, axis=1)
            written[f"blk.{layer}.ffn_gate_exps.weight"] = gate.copy()
            written[f"blk.{layer}.ffn_up_exps.weight"] = up.copy()
            continue
        stem, _, ending = name.rpartition(".")
        if ending not in ("weight", "bias"):
            stem, ending = name, "weight"
        result = names.get_name(stem)
        assert result is not None, name
        written[f"{result}.{ending}"] = np.ascontiguousarray(_converted(values, stem, ending, config))
    return written


def _converted(values: np.ndarray, name: str, ending: str, config: Any) -> np.ndarray:
    leaf = name.rpartition(".")[2]
    if config.model_type == "llama" and leaf in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if leaf == "q_proj" else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if config.model_type == "gpt2" and ending == "weight" and leaf in ("c_attn", "c_proj", "c_fc"):
        return values.T
    if config.model_type.startswith("gemma") and leaf.endswith("norm"):
        return values + 1
    if name.endswith("shared_expert_gate") or name.endswith("conv.conv"):
        return values.squeeze()
    return values


def _stored(values: np.ndarray, ggml_type: gguf.GGMLQuantizationType) -> np.ndarray:
    try:
        return gguf.quantize(values, ggml_type)
    except NotImplementedError:
        return _made_up(values.shape, ggml_type)


def _made_up(shape: tuple[int, ...], ggml_type: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks of a type that the package can only read, with scales of 0.01."""
    block, size = gguf.GGML_QUANT_SIZES[ggml_type]
    random = np.random.default_rng(shape[0])
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for at in _SCALES[ggml_type.name]:
        blocks[..., at : at + 2] = scale
    return blocks.reshape(*shape[:-1], -1)


# Offsets of a block's float16 scales.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, size: int, split: str) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids)
    # Embedding rows without a token.
    tokens = [vocabulary.get(number, f"[PAD{number}]") for number in range(size)]
    token_types = [3 if number in special else 1 if number in vocabulary else 5 for number in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(token_types)
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(False)
