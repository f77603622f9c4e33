"""Distinguish defects of prge from models that fail in transformers themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from prge.errors import PrgeError, Refusal, first_line
from server_export.checkpoint.loading import LoadedModel, parameter_count
from server_export.library_errors import TRANSFORMERS_ERRORS

# Most parameters of a model that is instantiated with random weights.
MAX_PARAMETERS = 1 << 28
_ROWS, _TOKENS = 2, 8
# In PyTorch's messages if a model reads a value of a tensor without data.
_META = "meta"


@contextmanager
def refuse_if_transformers_fails(loaded: LoadedModel) -> Iterator[None]:
    """Turn an exception of the block into a Refusal if the model also fails in transformers itself.

    Args:
        loaded: the model that the block traces or compares; the block may change it.

    Raises:
        Refusal: the block raises an exception, and transformers fails to run a new model of the same
            configuration.
    """
    try:
        yield
    except (PrgeError, MemoryError):
        raise
    except Exception as error:
        failure = transformers_failure(type(loaded.model), loaded.config)
        if failure is None:
            raise
        raise Refusal(
            "model-fails-in-transformers",
            f"{loaded.name_or_path} fails in transformers itself: {type(loaded.model).__name__} raises "
            f"{type(failure).__name__}: {first_line(failure)}",
            remedy="Correct its config.json, or use another checkpoint.",
        ) from error


def transformers_failure(model_class: type[Any], config: Any) -> Exception | None:
    """Return the exception of a model's forward pass on a few tokens in transformers; None if it succeeds.

    A small model gets random weights. For a larger one, only shapes are computed on the meta device, and None
    is returned if the model needs values.

    Args:
        model_class: class of transformers.
        config: configuration of the text model, which is not changed.
    """
    own = type(config).from_dict(config.to_dict(), attn_implementation="eager")
    with torch.device("meta"):
        model = model_class(own).eval()
    on_meta = parameter_count(model) > MAX_PARAMETERS
    if on_meta:
        # Without a cache, transformers reads values of the positions to find out whether rows are packed.
        own.use_cache = True
    else:
        model = model_class(own).eval()
    tokens = torch.ones(_ROWS, _TOKENS, dtype=torch.long, device="meta" if on_meta else "cpu")
    try:
        with torch.no_grad():
            model(input_ids=tokens)
    except TRANSFORMERS_ERRORS as failure:
        return None if on_meta and _META in str(failure).lower() else failure
    return None
