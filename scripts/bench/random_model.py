"""An architecture with random weights, made in memory."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from server_export.model.loading import LoadedModel, prepare_model
from server_export.model.random_models import configuration


def random_model(name: str, layers: int | None = None, seed: int = 0, scaled: bool = False) -> LoadedModel:
    """A model of that architecture in float32.

    Args:
        name: of a configuration.
        layers: makes it shallower.
        seed: of the weights.
        scaled: whether logits and attention scores vary as a trained model's do. Without, the usual
            initialization: all tokens about equally probable, all positions about equally attended.
    """
    config = configuration(name, layers)
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
