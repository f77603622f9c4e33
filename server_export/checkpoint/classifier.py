"""A checkpoint's own classification head: its last layer, and the features that this layer reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from server_export.library_errors import TRANSFORMERS_ERRORS

_CLASSIFIER_SUFFIX = "ForSequenceClassification"
_SINGLE_LABEL = "single_label_classification"
# A batch size that differs from all other sizes of a model.
_ROWS = 10_007


@dataclass(frozen=True)
class CheckpointClassifier:
    """The last layer of a checkpoint's classification head, which the driver computes instead of the model.

    Attributes:
        layer: the name of the layer in the model, where an identity takes its place.
        linear: the layer, which may lack its weights.
        labels: the names of the classes.
    """

    layer: str
    linear: nn.Linear
    labels: tuple[str, ...]


def is_classifier(config: Any) -> bool:
    """Return whether a checkpoint is a sequence classifier."""
    return any(name.endswith(_CLASSIFIER_SUFFIX) for name in getattr(config, "architectures", None) or ())


def is_single_label(config: Any) -> bool:
    """Return whether a classifier predicts one of several classes and transformers implements its head."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as KNOWN

    is_known = type(config) in KNOWN and KNOWN[type(config)].__name__ in config.architectures
    return is_known and config.num_labels > 1 and config.problem_type in (None, _SINGLE_LABEL)


def detach_classifier(model: Any) -> CheckpointClassifier | None:
    """Replace the last layer of a classifier by an identity, so that the model returns the layer's inputs.

    The layer is the last linear layer that returns one value per class for each row.

    Args:
        model: a classifier without weights.

    Returns:
        The layer; None if the model has no such layer, and the model is then unchanged.
    """
    if not isinstance(getattr(model, model.base_model_prefix, None), nn.Module):
        return None
    seen_layers = list[str]()

    def record(name: str) -> Any:
        return lambda module, inputs, output: seen_layers.append(name) if len(output) == _ROWS else None

    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    candidates = [name for name, each in layers.items() if each.out_features == model.config.num_labels]
    hooks = [layers[name].register_forward_hook(record(name)) for name in candidates]
    _meta_outputs(model)
    for hook in hooks:
        hook.remove()
    if not seen_layers:
        return None
    names = model.config.id2label
    labels = tuple(str(names.get(number, number)) for number in range(model.config.num_labels))
    classifier = CheckpointClassifier(seen_layers[-1], layers[seen_layers[-1]], labels)
    detach_last_layer(model, classifier)
    features = _meta_outputs(model)
    if features is not None and features.shape == (_ROWS, classifier.linear.in_features):
        return classifier
    model.set_submodule(classifier.layer, classifier.linear)
    return None


def detach_last_layer(model: nn.Module, classifier: CheckpointClassifier) -> CheckpointClassifier:
    """Replace the last layer of a loaded classifier by an identity; return the layer with its weights."""
    linear: Any = model.get_submodule(classifier.layer)
    model.set_submodule(classifier.layer, nn.Identity())
    return replace(classifier, linear=linear)


def hidden_states_of(output: Any, tokens: int) -> torch.Tensor:
    """Return an encoder's hidden states of each token, f32 [rows, tokens, width].

    A classifier without its last layer returns one vector per row, which is repeated for each token.
    """
    if "last_hidden_state" in output:
        states: torch.Tensor = output.last_hidden_state
        return states
    features: torch.Tensor = output.logits
    return features.unsqueeze(1).expand(-1, tokens, -1)


@contextmanager
def override_base_inputs(model: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Call the encoder inside a classifier with these arguments too while the context is active."""
    base = getattr(model, model.base_model_prefix)
    known = signature(base.forward)

    def add_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = dict(known.bind(*args, **kwargs).arguments)
        for name, parameter in known.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        return (), {**bound, **arguments}

    hook = base.register_forward_pre_hook(add_arguments, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _meta_outputs(model: Any) -> torch.Tensor | None:
    """Return the model's outputs for a batch of two tokens; None if it needs values, which it lacks."""
    tokens = torch.zeros(_ROWS, 2, dtype=torch.long, device="meta")
    all_seen, additive_mask = torch.ones_like(tokens), torch.zeros(_ROWS, 1, 1, 2, device="meta")
    # Most models check the mask for padding unless they get an additive attention mask.
    for mask, arguments in ((all_seen, {"attention_mask": additive_mask}), (all_seen, {}), (None, {})):
        with suppress(*TRANSFORMERS_ERRORS), torch.no_grad(), override_base_inputs(model, arguments):
            outputs: torch.Tensor = model(input_ids=tokens, attention_mask=mask).logits
            return outputs
    return None
