"""How many bytes autograd keeps from a forward for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType

import torch


class _Saved:
    """A tensor that a node of the graph keeps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedActivations:
    """Inside the block, counts what autograd keeps; `peak_bytes` is the most at one time.

    A storage counts once, however many nodes keep a view of it, and whole, since a view keeps all of it.
    Those of `constants` (parameters, buffers) don't count: they are there without a backward too.
    """

    def __init__(self, constants: Iterable[torch.Tensor]) -> None:
        self.peak_bytes = 0
        self._bytes = 0
        self._constants = {_storage(tensor) for tensor in constants}
        self._users: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        storage = _storage(tensor)
        if storage in self._constants:
            return saved
        size = tensor.untyped_storage().nbytes()
        self._users[storage] = self._users.get(storage, 0) + 1
        if self._users[storage] == 1:
            self._bytes += size
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        weakref.finalize(saved, self._release, storage, size).atexit = False
        return saved

    def _release(self, storage: int, size: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            # Its address may be another tensor's from now on.
            del self._users[storage]
            self._bytes -= size


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
