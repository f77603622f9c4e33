"""Public architectures with random weights: enough for speed and memory, without a download."""

from __future__ import annotations

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
}


def random_model(name: str, layers: int | None = None, seed: int = 0, scaled: bool = False) -> Any:
    """A `LoadedModel` of that architecture in float32.

    Args:
        name: of a configuration.
        layers: makes it shallower.
        seed: of the weights.
        scaled: whether logits and attention scores vary as a trained model's do. Without, the usual
            initialization: all tokens about equally probable, all positions about equally attended.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from server_export.loading import prepare_model

    settings = dict(CONFIGURATIONS[name])
    if layers:
        settings["num_hidden_layers"] = layers
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if scaled:
        with torch.no_grad():
            for path, layer in model.named_modules():
                if isinstance(layer, torch.nn.Linear) and path != "lm_head":
                    layer.weight.normal_(0, layer.in_features**-0.5)
            # The head shares the table: logits with a deviation of 3.
            model.get_input_embeddings().weight.normal_(0, 3 * config.hidden_size**-0.5)
    return prepare_model(model, name, True, None)
