"""One program file in the stock engine, with its weights inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from prge.errors import told_as_bundle_error
from server_export.quiet import quiet_engine

Answers = tuple[torch.Tensor, ...]


def loaded_method(path: Path, method: str, inputs: Sequence[torch.Tensor]) -> Callable[[], Answers]:
    """A method of a `.pte`, to be called with the same inputs again and again; see `opened_method`."""
    arguments = [tensor.contiguous() for tensor in inputs]
    call = opened_method(path, method)
    return lambda: call(*arguments)


def opened_method(path: Path, method: str) -> Callable[..., Answers]:
    """A method of a `.pte`, to be called with contiguous inputs. What it keeps in buffers lasts.

    Raises:
        BundleError: the engine refuses the program, or, when it is called, the inputs.
    """
    from executorch.runtime import Runtime

    refusal = "the engine refuses the program that was just lowered"
    remedy = "please report it with the name of the model"
    with told_as_bundle_error(refusal, remedy), quiet_engine():
        loaded = Runtime.get().load_program(path).load_method(method)

    def call(*inputs: torch.Tensor) -> Answers:
        with told_as_bundle_error(refusal, remedy):
            return tuple(loaded.execute(inputs))

    return call
