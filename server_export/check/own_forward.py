"""Is an exception the fault of prge, or does the model itself fail in transformers?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from prge.errors import PrgeError, Refusal, first_line
from server_export.checkpoint.loading import LoadedModel, parameter_count
from server_export.library_errors import TRANSFORMERS_ERRORS

# Parameters of a model that is made with random numbers.
MOST_MADE = 1 << 28
_ROWS, _TOKENS = 2, 8
# What PyTorch's messages say of a tensor without numbers of which a model needs one.
_META = "meta"


@contextmanager
def refuse_if_transformers_fails(loaded: LoadedModel) -> Iterator[None]:
    """Raise a Refusal in place of a defect where the model's own forward pass in transformers fails too.

    Args:
        loaded: the model that is traced or compared inside, which may be changed there.

    Raises:
        Refusal: transformers fails to run a fresh model of the same configuration.
    """
    try:
        yield
    except (PrgeError, MemoryError):
        raise
    except Exception as error:
        failure = own_failure(type(loaded.model), loaded.config)
        if failure is None:
            raise
        raise Refusal(
            "model-fails-in-transformers",
            f"{loaded.name_or_path} fails in transformers itself: {type(loaded.model).__name__} raises "
            f"{type(failure).__name__}: {first_line(failure)}",
            remedy="correct its config.json, or take another checkpoint",
        ) from error


def own_failure(model_class: type[Any], config: Any) -> Exception | None:
    """What transformers raises when a model of a configuration reads a few tokens; None if it computes.

    A model of few parameters is made with random weights; of a larger one only shapes are computed, and None
    is returned where they don't suffice.

    Args:
        model_class: of transformers.
        config: of the text model; it isn't changed.
    """
    own = type(config).from_dict(config.to_dict(), attn_implementation="eager")
    with torch.device("meta"):
        model = model_class(own).eval()
    on_meta = parameter_count(model) > MOST_MADE
    if on_meta:
        # Without a cache transformers asks the positions, which have no numbers, whether rows are packed.
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
