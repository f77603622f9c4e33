"""The tensors of a model's files by the names that they have there, whatever the format."""

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
    """Tensors that are read one at a time.

    `conversions` are transformers' ways from these names to a model's, None for those of its own checkpoints.
    """

    @property
    def names(self) -> Sequence[str]:
        """Names of all."""

    @property
    def conversions(self) -> Sequence[Any] | None:
        """See above."""

    def shape(self, name: str) -> Sequence[int] | None:
        """The shape of a tensor whose rows can be read alone; None of another one."""

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor, of some rows alone where they are given."""


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
                    f"{path} can't be read: {first_line(error)}",
                    remedy="copy the model again",
                ) from None

    @property
    def names(self) -> list[str]:
        """Names of all."""
        return list(self._paths)

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor."""
        with safe_open(str(self._paths[name]), framework="pt") as reader:
            shape: list[int] = reader.get_slice(name).get_shape()
        return shape

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor, of some rows alone where they are given."""
        # Opened again and again: pages that were read stay in memory as long as a file is open.
        with safe_open(str(self._paths[name]), framework="pt") as reader:
            if isinstance(rows, range):
                tensor: torch.Tensor = reader.get_slice(name)[rows.start : rows.stop]
            else:
                tensor = reader.get_tensor(name)[... if rows is None else list(rows)]
        return tensor


def stored_tensors(files: ModelFiles) -> StoredTensors:
    """The tensors of a model's files; raises PrgeError where one can't be read."""
    # Without weights there are none to read, as of a model whose configuration alone is asked for.
    if files.gguf and files.weights:
        return _of_gguf(open_gguf(files.gguf))
    return SafetensorsTensors(files.weights)


@lru_cache(maxsize=2)
def _of_gguf(model: GgufModel) -> GgufTensors:
    """Made once of a file: its tables take longer than many a tensor."""
    return GgufTensors(model)
