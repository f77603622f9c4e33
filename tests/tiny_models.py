"""Tiny transformers models with random weights, one per architecture, with a tokenizer each can share.

Shapes are chosen to tell things apart: grouped keys and values, a head width that isn't width / heads where
the architecture allows it, a sliding window shorter than the rows, soft caps, biases that aren't zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 128
WIDTH = 64
LENGTH = 12
WINDOW = 5

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": WINDOW}),
    "qwen2": (
        "Qwen2Config",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {**_GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3Config", {**_GROUPED, "sliding_window": WINDOW}),
    "opt": (
        "OPTConfig",
        {
            **{key: value for key, value in _COMMON.items() if key != "intermediate_size"},
            "ffn_dim": 96,
            "word_embed_proj_dim": 32,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 96,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
}
_ENCODER = {**_COMMON, "type_vocab_size": 2}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _ENCODER),
    "roberta": ("RobertaConfig", {**_ENCODER, "pad_token_id": 1, "bos_token_id": 0, "type_vocab_size": 1}),
    # One layer that is used three times.
    "albert": ("AlbertConfig", {**_ENCODER, "embedding_size": 32, "num_hidden_layers": 3}),
    # The first layer lacks a norm; a window on both sides.
    "modernbert": (
        "ModernBertConfig",
        {**_COMMON, "num_hidden_layers": 4, "global_attn_every_n_layers": 2, "local_attention": 2 * WINDOW},
    ),
    "distilbert": (
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": WIDTH,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 96,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
    ),
}
ARCHITECTURES = tuple([*DECODERS, *ENCODERS])
# Encoders with relative positions in their attention scores.
RELATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-v2": (
        "DebertaV2Config",
        {
            **{**_ENCODER, "type_vocab_size": 0},
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
    ),
    "mpnet": ("MPNetConfig", _COMMON),
}
# Mixtures of experts: routers that select before or after the softmax, with normalized sums or a selection
# bias, and shared experts.
_EXPERTS = {**_GROUPED, "intermediate_size": 48, "num_experts_per_tok": 2, "num_hidden_layers": 1}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("OlmoeConfig", {**_EXPERTS, "num_experts": 8, "num_hidden_layers": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "moe_intermediate_size": 48, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True},
    ),
    "granitemoe": ("GraniteMoeConfig", {**_EXPERTS, "num_local_experts": 8, "residual_multiplier": 0.7}),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "num_local_experts": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_EXPERTS,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "num_experts": 8,
        },
    ),
    # Attention with sinks, with and without sliding windows.
    "gpt_oss": (
        "GptOssConfig",
        {
            **_EXPERTS,
            "num_local_experts": 8,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # All experts process all tokens, with weights that are mostly 0.
    "llama4": (
        "Llama4TextConfig",
        {
            **_EXPERTS,
            "intermediate_size_mlp": 96,
            "num_local_experts": 8,
            "interleave_moe_layer_step": 1,
            "head_dim": 16,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_EXPERTS,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_dense_layers": 0,
            "layer_types": ["full_attention"],
        },
    ),
}
# Decoders with several live values between layers; the last two layers use keys and values of others.
_SHARING = {
    **_GEMMA,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
SHARING: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **{name: value for name, value in _SHARING.items() if name != "query_pre_attn_scalar"},
            "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0],
            "altup_num_inputs": 3,
            "laurel_rank": 4,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **{name: value for name, value in _SHARING.items() if name != "query_pre_attn_scalar"},
            "global_head_dim": 32,
            "use_double_wide_mlp": True,
        },
    ),
    # Attention whose weights, and the embedding, are shared by several layers, before a state space.
    "zamba2": (
        "Zamba2Config",
        {
            **_GROUPED,
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "mamba_d_state": 12,
            "adapter_rank": 4,
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": True,
            "layers_block_type": ["hybrid", "hybrid"],
        },
    ),
}
# A model whose layer names are not among PEFT's defaults.
UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "persimmon": ("PersimmonConfig", _COMMON),
    # Position biases, and matrices of all position pairs.
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            **_COMMON,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["local", "global"], 1]],
            "window_size": WINDOW,
        },
    ),
}


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12}
# Decoders with a recurrent state of fixed size, next to attention or instead of it.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2Config",
        {**_GROUPED, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]},
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            **_GROUPED,
            "head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
            },
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {
            **{key: _COMMON[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 12,
            "n_groups": 2,
            "chunk_size": 8,
            **{key: _COMMON[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")},
        },
    ),
    "mamba": (
        "MambaConfig",
        {
            **{key: _COMMON[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "state_size": 6,
            **{key: _COMMON[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")},
        },
    ),
    # Every channel of a key has its own decay.
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_GROUPED,
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "mlp_layer_types": ["dense", "dense"],
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    # Its convolution is a module, and gates control the decay of its state.
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {
            **_GROUPED,
            "lru_width": WIDTH,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "falcon_h1": ("FalconH1Config", {**_GROUPED, "head_dim": 16, "mamba_d_ssm": 128, **_MAMBA}),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_GROUPED,
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["mamba", "attention"],
        },
    ),
}


# One layer of each model: the one that is harder to get right.
SHALLOW: dict[str, dict[str, Any]] = {
    **{architecture: {"num_hidden_layers": 1} for architecture in [*DECODERS, *ENCODERS]},
    "gpt2": {"n_layer": 1},
    "distilbert": {"n_layers": 1},
    "qwen2": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "gemma2": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    "gemma3": {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
}


def make_config(architecture: str, **changes: Any) -> Any:
    """Return the transformers configuration of a tiny model."""
    import transformers

    known = {**DECODERS, **SHARING, **RECURRENT, **ENCODERS, **RELATIVE, **EXPERTS, **UNUSUAL}
    name, settings = known[architecture]
    return getattr(transformers, name)(**{**settings, **changes})


def make_model(architecture: str, seed: int = 0, *, head: bool = True, **changes: Any) -> Any:
    """Return a tiny model in float32 with all parameters random, including norms and biases."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = make_config(architecture, **changes)
    model_class = AutoModelForCausalLM if architecture not in {**ENCODERS, **RELATIVE} and head else AutoModel
    model = model_class.from_config(config, attn_implementation="eager").eval()
    if getattr(model, "pooler", None) is not None:
        model.pooler = torch.nn.Identity()
    randomize(model)
    return model.requires_grad_(False)


def randomize(model: Any) -> None:
    """Set every parameter to random values in place, including norms and biases."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(std=0.5 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.normal_(std=0.1)


def make_tokenizer() -> Any:
    """Return a byte-level tokenizer of words and letters; it knows `<pad>`, `<s>`, `</s>` and adds none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*sorted(letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter <= "~"), "\u0120"]
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *letters]
    merges = []
    for word in ("\u0120yes", "\u0120no"):
        parts = list(word)
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts[:2] = [parts[0] + parts[1]]
            tokens.append(parts[0])
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def save_model(folder: Path, architecture: str, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny model and its tokenizer into a folder with `save_pretrained`."""
    make_model(architecture, seed, **changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
