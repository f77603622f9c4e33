"""Checkpoint weights as tensors that are read from the files when an operator uses them.

    weights = LazyWeights(weights)
    functional_call(model, weights.of(model), kwargs={"input_ids": tokens})

runs transformers' own forward pass of a model without weights: every operator reads the parameters that it
uses and frees them. An embedding reads the rows of its tokens, a mixture of experts reads the experts that it
calls, and a large linear layer is read a few rows at a time, so that no large tensor is in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.node import map_aggregate

from server_export.checkpoint.weights import CheckpointWeights

aten = torch.ops.aten
Rows = range | list[int] | None

# Elements of a linear layer's weight that are read at once.
ELEMENTS_PER_READ = 1 << 23
# Functions that need a tensor's metadata only.
_METADATA = {
    *(torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.ndim.__get__),
    *(torch.Tensor.requires_grad.__get__, torch.Tensor.layout.__get__, torch.Tensor.grad.__get__),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point),
}


class LazyWeight(torch.Tensor):
    """A parameter whose values are read from the checkpoint whenever an operator uses them.

    Attributes:
        read: returns the values in float32, of all rows or of the given rows.
        has_rows: whether single rows can be read without the others.
    """

    read: Callable[[Rows], torch.Tensor]
    has_rows: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], read: Callable[[Rows], torch.Tensor], has_rows: bool) -> LazyWeight:
        """Return a lazy parameter of this shape."""
        weight = torch.empty(shape, device="meta").as_subclass(cls)
        weight.read, weight.has_rows = read, has_rows
        return weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with the values of its lazy arguments; functions of metadata read nothing."""
        if function in _METADATA:
            return super().__torch_function__(function, types, args, kwargs or {})
        if function == torch.Tensor.device.__get__:
            return torch.device("cpu")
        if function == torch.Tensor.is_meta.__get__:
            return False
        if function in _ROW_READERS:
            result = _ROW_READERS[function](function, *args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        values, named_values = map_aggregate((args, kwargs or {}), _values)
        return function(*values, **named_values)


def _values(value: Any) -> Any:
    return value.read(None) if isinstance(value, LazyWeight) else value


def _read_embedding(
    function: Any, indices: Any, weight: Any, *_: Any, max_norm: Any = None, **__: Any
) -> Any:
    """Read only the rows of the tokens; ATen's operator takes the table first, PyTorch's second."""
    table, tokens = (indices, weight) if function is aten.embedding.default else (weight, indices)
    if not (isinstance(table, LazyWeight) and table.has_rows) or max_norm is not None:
        return NotImplemented
    rows, positions = torch.unique(tokens, return_inverse=True)
    return table.read(rows.tolist())[positions]


def _read_linear(function: Any, source: Any, weight: Any, bias: Any = None) -> Any:
    """Compute the outputs of a large layer from a few rows of its weight at a time."""
    if not (isinstance(weight, LazyWeight) and weight.has_rows and weight.numel() > ELEMENTS_PER_READ):
        return NotImplemented
    count = max(1, ELEMENTS_PER_READ // weight.shape[1])
    rows = range(weight.shape[0])
    parts = [function(source, weight.read(rows[start : start + count])) for start in rows[::count]]
    outputs = torch.cat(parts, -1)
    return outputs if bias is None else outputs + _values(bias)


def _read_row(_: Any, weight: Any, index: Any) -> Any:
    """Read one row, such as the weights of one expert."""
    is_index = type(index) is int or (isinstance(index, torch.Tensor) and index.dtype is torch.long)
    if not (is_index and isinstance(weight, LazyWeight) and weight.has_rows):
        return NotImplemented
    if isinstance(index, torch.Tensor) and index.dim():
        return NotImplemented
    row = int(index) % weight.shape[0]
    return weight.read(range(row, row + 1))[0]


def _read_bmm(function: Any, source: Any, weight: Any) -> Any:
    """Multiply with one matrix of a stack at a time, such as the weights of one expert."""
    if not (isinstance(weight, LazyWeight) and weight.has_rows):
        return NotImplemented
    rows = range(weight.shape[0])
    return torch.cat([function(source[row : row + 1], weight.read(range(row, row + 1))) for row in rows])


_ROW_READERS: dict[Any, Callable[..., Any]] = {
    F.embedding: _read_embedding,
    aten.embedding.default: _read_embedding,
    F.linear: _read_linear,
    aten.linear.default: _read_linear,
    torch.Tensor.__getitem__: _read_row,
    torch.bmm: _read_bmm,
}


class LazyWeights(CheckpointWeights):
    """Weights of a checkpoint whose `read` returns tensors that are read when an operator uses them."""

    def __init__(self, weights: CheckpointWeights) -> None:
        vars(self).update(vars(weights))
        self._weights = weights

    def read(self, name: str, rows: Any = None) -> torch.Tensor:
        """Return a lazy parameter, or a range of its rows; buffers and lists of rows are read at once."""
        shape, read = self.stored_shape(name), partial(self._weights.read, name)
        if shape is None or not isinstance(rows, range | None):
            return read(rows)
        if rows is None:
            return LazyWeight.of(shape, read, self.has_rows(name))

        def read_selected(selection: Rows) -> torch.Tensor:
            if isinstance(selection, range):
                return read(rows[selection.start : selection.stop])
            return read(rows if selection is None else [rows[row] for row in selection])

        return LazyWeight.of((len(rows), *shape[1:]), read_selected, self.has_rows(name))

    def of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of a model without weights, for `torch.func.functional_call`.

        Parameters are lazy; buffers are read at once.
        """
        return {
            **{name: self.read(name) for name, _ in model.named_parameters()},
            **dict(self._stored_buffers(model)),
        }

    def _stored_buffers(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in model.named_buffers():
            if name in self.buffers or name in self._sources:
                yield name, self._weights.read(name).to(buffer.dtype)
