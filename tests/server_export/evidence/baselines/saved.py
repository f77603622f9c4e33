"""The tensors that autograd saves between forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch


def saved_storages(forward: Callable[[], torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the storages that a forward pass saves, including parameters, by address."""
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        result = forward()
    assert result.requires_grad
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
