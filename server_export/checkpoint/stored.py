"""The tensors of a model's files by their stored names, for every file format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from prge.errors import Refusal, first_line
from server_export.checkpoint.files import ModelFiles
from server_export.checkpoint.gguf.files import GgufModel, open_gguf
from server_export.checkpoint.gguf.weights import GgufTensors


class StoredTensors(Protocol):
    """Tensors of a checkpoint that are read one at a time.

    `conversions` are transformers' conversions from these names to a model's; None for the names of
    transformers' own checkpoints.
    """

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors."""

    @property
    def conversions(self) -> Sequence[Any] | None:
        """transformers' conversions from these names to a model's; see the class."""

    def shape(self, name: str) -> Sequence[int] | None:
        """Return the shape of a tensor whose rows can be read separately; None for any other tensor."""

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a tensor, or some of its rows."""


class SafetensorsTensors:
    """The tensors of safetensors files.

    Raises:
        BundleError: a file can't be read.
    """

    conversions = None

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths: dict[str, Path] = {}
        for path in paths:
            try:
                with safe_open(str(path), framework="pt") as reader:
                    self._paths.update(dict.fromkeys(reader.keys(), path))
            except (OSError, ValueError, RuntimeError) as error:
                raise Refusal(
                    "weights-damaged",
                    f"Cannot read {path}: {first_line(error)}",
                    remedy="Copy or download the model again.",
                ) from None

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._paths)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor."""
        with safe_open(str(self._paths[name]), framework="pt") as reader:
            shape: list[int] = reader.get_slice(name).get_shape()
        return shape

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a tensor, or some of its rows."""
        # The file is opened for each tensor: its pages would stay in memory as long as it is open.
        with safe_open(str(self._paths[name]), framework="pt") as reader:
            if isinstance(rows, range):
                tensor: torch.Tensor = reader.get_slice(name)[rows.start : rows.stop]
            else:
                tensor = reader.get_tensor(name)[... if rows is None else list(rows)]
        return tensor


def stored_tensors(files: ModelFiles) -> StoredTensors:
    """Open the tensors of a model's files; raises PrgeError if a file can't be read."""
    # `ConfigOnlyFiles` has no weights.
    if files.gguf and files.weights:
        return _gguf_tensors(open_gguf(files.gguf))
    return SafetensorsTensors(files.weights)


@lru_cache(maxsize=2)
def _gguf_tensors(model: GgufModel) -> GgufTensors:
    """Open a GGUF file once: building its tables takes longer than reading most tensors."""
    return GgufTensors(model)
