"""Constants of a module, stored once for equal values."""

from __future__ import annotations

import hashlib
from itertools import count

import torch
from torch import nn

# Prefix of the names of constants that are not weights.
CONSTANT_PREFIX = "constant_"


class GraphConstants:
    """Adds constants to a module, such as a graph module, and stores equal ones once."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._names: dict[tuple[torch.dtype, torch.Size, bytes], str] = {}

    def name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor in the module, after adding it if it is new."""
        tensor = tensor.detach().contiguous()
        digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
        key = (tensor.dtype, tensor.shape, digest)
        if key not in self._names:
            candidates = (f"{CONSTANT_PREFIX}{number}" for number in count(len(self._names)))
            name = next(name for name in candidates if not hasattr(self.module, name))
            self.module.register_buffer(name, tensor, persistent=True)
            self._names[key] = name
        return self._names[key]
