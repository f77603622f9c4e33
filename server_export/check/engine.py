"""One program file in the stock engine, with its weights inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from prge.errors import refused_as
from server_export.quiet_libraries import quiet_engine

Answers = tuple[torch.Tensor, ...]


def bind_method(path: Path, method: str, inputs: Sequence[torch.Tensor]) -> Callable[[], Answers]:
    """A method of a `.pte`, to be called with the same inputs again and again; see `load_method`."""
    arguments = [tensor.contiguous() for tensor in inputs]
    call = load_method(path, method)
    return lambda: call(*arguments)


def load_method(path: Path, method: str) -> Callable[..., Answers]:
    """A method of a `.pte`, to be called with contiguous inputs. What it keeps in buffers lasts.

    Raises:
        Refusal: the engine refuses the program, or, when it is called, the inputs.
    """
    from executorch.runtime import Runtime

    def refusal() -> AbstractContextManager[None]:
        return refused_as(
            "engine-refuses-program",
            "the engine refuses the program that was just lowered",
            RuntimeError,
            remedy="please report it with the name of the model",
        )

    with refusal(), quiet_engine():
        loaded = Runtime.get().load_program(path).load_method(method)

    def call(*inputs: torch.Tensor) -> Answers:
        with refusal():
            return tuple(loaded.execute(inputs))

    return call
