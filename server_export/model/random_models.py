"""Public architectures with random weights: enough for speed and memory, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# From each model's published config.json.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
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
}


def save_random_model(folder: Path, name: str, layers: int | None = None, seed: int = 0) -> None:
    """Write a folder that `prge export` takes: that architecture in bfloat16, and a tokenizer of letters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configuration(name, layers), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.save_pretrained(folder)


def configuration(name: str, layers: int | None) -> Any:
    """transformers' configuration of that architecture; `layers` makes it shallower."""
    from transformers import AutoConfig

    settings = dict(CONFIGURATIONS[name])
    if layers:
        settings["num_hidden_layers"] = layers
    return AutoConfig.for_model(**settings)
