"""The classification head that a checkpoint brings along: its last layer, and what it reads of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from server_export.library_errors import TRANSFORMERS_ERRORS

_ARCHITECTURE = "ForSequenceClassification"
_KIND = "single_label_classification"
# No number of anything else.
_SOME_ROWS = 10_007


@dataclass(frozen=True)
class CheckpointClassifier:
    """The last layer of a classification head, which the driver has; all before it is the model's.

    `layer` is its name in the model, where nothing is in its place; `linear` may lack its weights; `labels`
    are the names of its classes.
    """

    layer: str
    linear: nn.Linear
    labels: tuple[str, ...]


def is_classifier(config: Any) -> bool:
    """Whether a checkpoint is one for classes of rows."""
    return any(name.endswith(_ARCHITECTURE) for name in getattr(config, "architectures", None) or ())


def is_single_label(config: Any) -> bool:
    """Whether such a checkpoint gives a row one of several classes, and transformers has its head."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as KNOWN

    is_known = type(config) in KNOWN and KNOWN[type(config)].__name__ in config.architectures
    return is_known and config.num_labels > 1 and config.problem_type in (None, _KIND)


def detach_classifier(model: Any) -> CheckpointClassifier | None:
    """Take the last layer out of a model of classes, which answers what the layer reads instead.

    The layer is the last linear one that gives a row a number for each class.

    Args:
        model: without weights.

    Returns:
        None if the model has no such layer; it stays as it was then.
    """
    if not isinstance(getattr(model, model.base_model_prefix, None), nn.Module):
        return None
    found = list[str]()

    def watching(name: str) -> Any:
        return lambda module, given, answer: found.append(name) if len(answer) == _SOME_ROWS else None

    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    classes = [name for name, each in layers.items() if each.out_features == model.config.num_labels]
    hooks = [layers[name].register_forward_hook(watching(name)) for name in classes]
    _answer(model)
    for hook in hooks:
        hook.remove()
    if not found:
        return None
    names = model.config.id2label
    labels = tuple(str(names.get(number, number)) for number in range(model.config.num_labels))
    classifier = CheckpointClassifier(found[-1], layers[found[-1]], labels)
    detach_last_layer(model, classifier)
    read = _answer(model)
    if read is not None and read.shape == (_SOME_ROWS, classifier.linear.in_features):
        return classifier
    model.set_submodule(classifier.layer, classifier.linear)
    return None


def detach_last_layer(model: nn.Module, classifier: CheckpointClassifier) -> CheckpointClassifier:
    """Take the same layer out of a model with weights; returns it with them."""
    linear: Any = model.get_submodule(classifier.layer)
    model.set_submodule(classifier.layer, nn.Identity())
    return replace(classifier, linear=linear)


def hidden_states_of(output: Any, tokens: int) -> torch.Tensor:
    """What an encoder answers of each token, f32 [rows, tokens, width].

    Of a model without the last layer of its head what that reads of a row, at each of its tokens.
    """
    if "last_hidden_state" in output:
        states: torch.Tensor = output.last_hidden_state
        return states
    read: torch.Tensor = output.logits
    return read.unsqueeze(1).expand(-1, tokens, -1)


@contextmanager
def override_base_inputs(model: Any, given: Mapping[str, Any]) -> Iterator[None]:
    """Meanwhile the encoder within a model of classes is called with these arguments, whatever else it is."""
    base = getattr(model, model.base_model_prefix)
    known = signature(base.forward)

    def give(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = dict(known.bind(*args, **kwargs).arguments)
        for name, parameter in known.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        return (), {**bound, **given}

    hook = base.register_forward_pre_hook(give, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _answer(model: Any) -> torch.Tensor | None:
    """What it answers two tokens of some rows; None if it can't tell without numbers."""
    tokens = torch.zeros(_SOME_ROWS, 2, dtype=torch.long, device="meta")
    seen, added = torch.ones_like(tokens), torch.zeros(_SOME_ROWS, 1, 1, 2, device="meta")
    # Most look whether there is padding, unless they are given what is added to scores.
    for mask, given in ((seen, {"attention_mask": added}), (seen, {}), (None, {})):
        with suppress(*TRANSFORMERS_ERRORS), torch.no_grad(), override_base_inputs(model, given):
            answer: torch.Tensor = model(input_ids=tokens, attention_mask=mask).logits
            return answer
    return None
