"""Public architectures with random weights: enough for speed and memory, without a download."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prge.errors import ConfigError
from server_export.settings import ExportConfig

if TYPE_CHECKING:
    import torch

Config = TypeVar("Config", bound=ExportConfig)
# `random:NAME` in the place of a model; `random:NAME:tiny` is the same of a size that means nothing.
RANDOM, TINY = "random:", ":tiny"
_TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_QWEN2_5 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_QWEN_HALF_BILLION = {
    **_QWEN2_5,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_PER_LAYER_INPUTS = {
    "num_attention_heads": 8,
    "head_dim": 256,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
# From each model's published config.json.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_SMOLLM2,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "smollm2-360m": {
        **_SMOLLM2,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
    },
    "qwen2-0.5b": {**_QWEN_HALF_BILLION, "max_position_embeddings": 131072},
    "qwen2.5-0.5b": _QWEN_HALF_BILLION,
    "qwen2.5-1.5b": {
        **_QWEN2_5,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen2.5-3b": {
        **_QWEN2_5,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "qwen3-1.7b": {
        **_QWEN2_5,
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "gemma3-1b": {
        **_GEMMA3,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    },
    "gemma3-4b": {
        **_GEMMA3,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3n-e2b": {
        **_PER_LAYER_INPUTS,
        "model_type": "gemma3n_text",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 10,
        "vocab_size": 262400,
        "max_position_embeddings": 32768,
    },
    "tinyllama-1.1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe",
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_hidden_layers": 24,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
SHARD_BYTES = 1 << 30


@contextmanager
def with_random_model(config: Config, *, weights: bool = True) -> Iterator[Config]:
    """The settings, with a folder that is there for a while in the place of `random:NAME`.

    Raises:
        ConfigError: no architecture has that name.
    """
    if not config.model.startswith(RANDOM):
        yield config
        return
    name = config.model.removeprefix(RANDOM)
    configuration(name, None)
    out = Path(config.out).absolute().parent
    # Where the bundle will lie there must be room for as much anyway.
    out = out if weights else Path(tempfile.gettempdir())
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".random-") as place:
        model = Path(place, name.replace(":", "-"))
        save_random_model(model, name, weights=weights)
        yield replace(config, model=str(model), rounding=config.rounding or "nearest")


def save_random_model(
    folder: Path, name: str, layers: int | None = None, seed: int = 0, *, weights: bool = True
) -> None:
    """Write a folder that `prge export` takes: that architecture in bfloat16, and a tokenizer of letters.

    One shard of the weights is in memory at a time. Without `weights` the folder says what the model is.
    """
    import torch

    torch.manual_seed(seed)
    config = configuration(name, layers)
    config.save_pretrained(folder)
    _save_tokenizer(folder)
    if weights:
        _save_weights(folder, config)


def _save_weights(folder: Path, config: Any) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # Tied weights are one parameter.
    shards: list[dict[str, torch.Size]] = [{}]
    room = SHARD_BYTES
    for weight, parameter in model.named_parameters():
        if parameter.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][weight] = parameter.shape
        room -= parameter.nbytes
    files: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files |= dict.fromkeys(shapes, file)
        tensors = {
            weight: _random_weight(shape, config.initializer_range) for weight, shape in shapes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.save_pretrained(folder)


def _random_weight(shape: Sequence[int], deviation: float) -> torch.Tensor:
    """As transformers begins with: norms of ones, all else normal."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, deviation)


def configuration(name: str, layers: int | None) -> Any:
    """transformers' configuration of that architecture; `layers` makes it shallower.

    Raises:
        ConfigError: none has that name.
    """
    from transformers import AutoConfig

    known = name.removesuffix(TINY)
    if known not in CONFIGURATIONS:
        raise ConfigError(
            "there is no such architecture to give random weights:",
            [f"{RANDOM}{known}, must be {RANDOM} and one of {', '.join(CONFIGURATIONS)}"],
            code="no-such-architecture",
        )
    settings = dict(CONFIGURATIONS[known])
    if name != known:
        settings |= _TINY_SIZES | ({"head_dim": 16} if "head_dim" in settings else {})
        layers = layers or _TINY_SIZES["num_hidden_layers"]
    if layers:
        settings["num_hidden_layers"] = layers
        if "layer_types" in settings:
            settings["layer_types"] = settings["layer_types"][:layers]
    return AutoConfig.for_model(**settings)
