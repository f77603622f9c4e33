"""Weights of a checkpoint as tensors that are read from its files when an operator takes them.

    weights = LazyWeights(weights)
    functional_call(model, weights.of(model), kwargs={"input_ids": tokens})

runs transformers' own forward pass of a model without weights: every operator reads the parameters that it
takes and frees them. An embedding reads the rows of its tokens, a mixture those experts that it calls, and a
large linear layer some rows at a time, so that no large table is ever whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.node import map_aggregate

from server_export.checkpoint.weights import Weights

aten = torch.ops.aten
Rows = range | list[int] | None

# Numbers of a linear layer that are read at once.
NUMBERS_AT_ONCE = 1 << 23
# What is known of a tensor without its numbers.
_OF_SHAPE = {
    *(torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.ndim.__get__),
    *(torch.Tensor.requires_grad.__get__, torch.Tensor.layout.__get__, torch.Tensor.grad.__get__),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point),
}


class LazyWeight(torch.Tensor):
    """A parameter whose numbers are read whenever an operator takes it.

    Attributes:
        read: gives its numbers f32, of all rows or of some.
        has_rows: whether some rows are read without the others.
    """

    read: Callable[[Rows], torch.Tensor]
    has_rows: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], read: Callable[[Rows], torch.Tensor], has_rows: bool) -> LazyWeight:
        """One of this shape."""
        weight = torch.empty(shape, device="meta").as_subclass(cls)
        weight.read, weight.has_rows = read, has_rows
        return weight

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the numbers; what asks for the shape alone reads nothing."""
        if function in _OF_SHAPE:
            return super().__torch_function__(function, types, args, kwargs or {})
        if function == torch.Tensor.device.__get__:
            return torch.device("cpu")
        if function == torch.Tensor.is_meta.__get__:
            return False
        if function in _BY_ROWS:
            computed = _BY_ROWS[function](function, *args, **(kwargs or {}))
            if computed is not NotImplemented:
                return computed
        whole, named = map_aggregate((args, kwargs or {}), _numbers)
        return function(*whole, **named)


def _numbers(value: Any) -> Any:
    return value.read(None) if isinstance(value, LazyWeight) else value


def _embedding(function: Any, indices: Any, weight: Any, *_: Any, max_norm: Any = None, **__: Any) -> Any:
    """The rows of the tokens; aten's operator takes its arguments the other way round."""
    table, tokens = (indices, weight) if function is aten.embedding.default else (weight, indices)
    if not (isinstance(table, LazyWeight) and table.has_rows) or max_norm is not None:
        return NotImplemented
    rows, places = torch.unique(tokens, return_inverse=True)
    return table.read(rows.tolist())[places]


def _linear(function: Any, source: Any, weight: Any, bias: Any = None) -> Any:
    """The outputs of some rows of a large layer at a time."""
    if not (isinstance(weight, LazyWeight) and weight.has_rows and weight.numel() > NUMBERS_AT_ONCE):
        return NotImplemented
    count = max(1, NUMBERS_AT_ONCE // weight.shape[1])
    rows = range(weight.shape[0])
    parts = [function(source, weight.read(rows[start : start + count])) for start in rows[::count]]
    outputs = torch.cat(parts, -1)
    return outputs if bias is None else outputs + _numbers(bias)


def _row(_: Any, weight: Any, index: Any) -> Any:
    """One row, such as the weights of an expert."""
    is_number = type(index) is int or (isinstance(index, torch.Tensor) and index.dtype is torch.long)
    if not (is_number and isinstance(weight, LazyWeight) and weight.has_rows):
        return NotImplemented
    if isinstance(index, torch.Tensor) and index.dim():
        return NotImplemented
    row = int(index) % weight.shape[0]
    return weight.read(range(row, row + 1))[0]


def _products(function: Any, source: Any, weight: Any) -> Any:
    """A product for each expert, with the weights of one in memory."""
    if not (isinstance(weight, LazyWeight) and weight.has_rows):
        return NotImplemented
    rows = range(weight.shape[0])
    return torch.cat([function(source[row : row + 1], weight.read(range(row, row + 1))) for row in rows])


_BY_ROWS: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    aten.embedding.default: _embedding,
    F.linear: _linear,
    aten.linear.default: _linear,
    torch.Tensor.__getitem__: _row,
    torch.bmm: _products,
}


class LazyWeights(Weights):
    """The same weights, of which `read` gives tensors that are read when an operator takes them."""

    def __init__(self, weights: Weights) -> None:
        vars(self).update(vars(weights))
        self._weights = weights

    def read(self, name: str, rows: Any = None) -> torch.Tensor:
        """A parameter, or a range of its rows, that reads itself; numbers that the architecture says as they
        are."""
        shape, read = self.stored_shape(name), partial(self._weights.read, name)
        if shape is None or not isinstance(rows, range | None):
            return read(rows)
        if rows is None:
            return LazyWeight.of(shape, read, self.has_rows(name))

        def read_of(some: Rows) -> torch.Tensor:
            if isinstance(some, range):
                return read(rows[some.start : some.stop])
            return read(rows if some is None else [rows[row] for row in some])

        return LazyWeight.of((len(rows), *shape[1:]), read_of, self.has_rows(name))

    def of(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All that a model without weights lacks, as `torch.func.functional_call` takes it: its parameters,
        and its buffers with their numbers."""
        return {
            **{name: self.read(name) for name, _ in model.named_parameters()},
            **dict(self._buffers_of(model)),
        }

    def _buffers_of(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in model.named_buffers():
            if name in self.buffers or name in self._sources:
                yield name, self._weights.read(name).to(buffer.dtype)
