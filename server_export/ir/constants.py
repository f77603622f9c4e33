"""Tensors that are added to a module as constants, and stored once."""

from __future__ import annotations

import hashlib
from itertools import count

import torch
from torch import nn

# How names of constants begin that are no weights.
MADE = "constant_"


class Constants:
    """Constants that are added to a module, such as a graph's; equal ones are stored once."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._names: dict[tuple[torch.dtype, torch.Size, bytes], str] = {}

    def name(self, tensor: torch.Tensor) -> str:
        """The name under which the module has the tensor from now on."""
        tensor = tensor.detach().contiguous()
        digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
        key = (tensor.dtype, tensor.shape, digest)
        if key not in self._names:
            numbers = (f"{MADE}{number}" for number in count(len(self._names)))
            name = next(name for name in numbers if not hasattr(self.module, name))
            self.module.register_buffer(name, tensor, persistent=True)
            self._names[key] = name
        return self._names[key]
