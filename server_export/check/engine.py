"""Run a program file that contains its weights, in the stock engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from prge.errors import refused_as
from server_export.quiet_libraries import quiet_engine

Outputs = tuple[torch.Tensor, ...]


def bind_method(path: Path, method: str, inputs: Sequence[torch.Tensor]) -> Callable[[], Outputs]:
    """Return a function that calls a method of a `.pte` with fixed inputs; see `load_method`."""
    arguments = [tensor.contiguous() for tensor in inputs]
    call = load_method(path, method)
    return lambda: call(*arguments)


def load_method(path: Path, method: str) -> Callable[..., Outputs]:
    """Return a function that calls a method of a `.pte` with contiguous inputs.

    The method's buffers keep their values between calls.

    Raises:
        Refusal: the engine refuses the program, or refuses the inputs of a call.
    """
    from executorch.runtime import Runtime

    def refusal() -> AbstractContextManager[None]:
        return refused_as(
            "engine-refuses-program",
            "The engine refuses the program that was just lowered",
            RuntimeError,
            remedy="Please report the problem with the name of the model.",
        )

    with refusal(), quiet_engine():
        loaded = Runtime.get().load_program(path).load_method(method)

    def call(*inputs: torch.Tensor) -> Outputs:
        with refusal():
            return tuple(loaded.execute(inputs))

    return call
