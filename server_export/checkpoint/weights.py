"""A model's weights, read from its files one tensor at a time, so that the model is never whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from prge.errors import Refusal
from server_export.checkpoint.classifier import CheckpointClassifier
from server_export.checkpoint.files import ModelFiles
from server_export.checkpoint.stored import stored_tensors
from server_export.checkpoint.tensor_names import WeightShapes, key_mapping, tensor_sources


class CheckpointWeights:
    """The tensors of a checkpoint by transformers' names of the model's parameters.

    Args:
        files: the files of the checkpoint.
        model: the model without weights.
        transposed: names of weights that the files store as [in, out], as GPT-2's do.

    Attributes:
        buffers: tensors that are computed instead of stored, by name.

    Raises:
        BundleError: a file can't be read.
    """

    def __init__(self, files: ModelFiles, model: nn.Module, transposed: Collection[str] = ()) -> None:
        self.files = files
        self.transposed = frozenset(transposed)
        self._outline = WeightShapes(model)
        self._tied = _tied_names(model)
        self.buffers = _buffers(model)
        self._stored = stored_tensors(files)
        self._sources = tensor_sources(model, self._stored.names, self._stored.conversions)

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a parameter or buffer in float32; the weight of a linear layer is [out, in].

        Args:
            name: the name of the parameter or buffer.
            rows: the rows of a parameter to read; by default all.

        Raises:
            BundleError: the files lack the parameter, or some of its values are not finite.
        """
        source_name = self._known(name)
        if source_name is None:
            return self.buffers[name]
        source = self._sources[source_name]
        if source.conversion is None:
            (stored,) = source.stored.values()
            tensor = self._stored.read(stored, rows)
        else:
            tensor = source.convert_tensors(self._stored.read, self._outline, rows)[source_name]
        tensor = tensor.to(torch.float32)
        if not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
            raise Refusal(
                "weights-not-finite",
                f"{name} of {self.files.name} has values that aren't finite.",
                remedy="Use a complete checkpoint.",
            )
        if name in self.transposed:
            return tensor.t()
        if rows is None:
            self._check_shape(name, tensor.shape)
        return tensor

    def iter_rows(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a parameter in parts of `rows` rows; an unconverted one is never in memory as a whole."""
        source_name = self._known(name)
        if source_name is None or self._sources[source_name].conversion is not None:
            yield from self.read(name).split(rows)
            return
        (stored,) = self._sources[source_name].stored.values()
        shape = self._stored.shape(stored)
        if shape is None:
            yield from self.read(name).split(rows)
            return
        self._check_shape(name, shape)
        for start in range(0, shape[0], rows):
            yield self.read(name, range(start, min(start + rows, shape[0])))

    def stored_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a parameter; None for a buffer.

        Raises:
            BundleError: the files lack the parameter.
        """
        return None if self._known(name) is None else self._outline.shapes.get(name)

    def has_rows(self, name: str) -> bool:
        """Return whether some rows of a parameter can be read without the others."""
        source_name = self._known(name)
        if source_name is None or name in self.transposed:
            return False
        source = self._sources[source_name]
        return source.conversion is None or source.has_rows

    def _known(self, name: str) -> str | None:
        """Return the name under which a parameter, or one tied to it, is stored; None for a buffer."""
        source_name = next(
            (
                source_name
                for source_name in (name, *self._tied.get(name, ()))
                if source_name in self._sources
            ),
            None,
        )
        if source_name is None and name not in self.buffers:
            raise Refusal(
                "weights-incomplete",
                f"{self.files.name} lacks {name}.",
                remedy="Use a complete checkpoint.",
            )
        return source_name

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        described = self._outline.shapes.get(name, tuple(shape))
        if tuple(shape) != described:
            raise Refusal(
                "weights-of-another-shape",
                f"{name} of {self.files.name} has the shape {list(shape)}, but its {self.files.config_name} "
                f"describes {list(described)}.",
                remedy="Copy or download the model again.",
            )


def stored_names(files: ModelFiles, model: nn.Module) -> set[str]:
    """Return the names of the stored tensors that a model is made of."""
    stored = stored_tensors(files)
    by_name = tensor_sources(model, stored.names, stored.conversions)
    return {name for source in by_name.values() for name in source.stored.values()}


def checkpoint_key_mapping(files: ModelFiles, model: nn.Module) -> dict[str, str]:
    """Return `server_export.checkpoint.tensor_names.key_mapping` of a model and its files."""
    return key_mapping(model, stored_tensors(files).names)


def load_classifier_weights(
    classifier: CheckpointClassifier, model: nn.Module, files: ModelFiles
) -> CheckpointClassifier:
    """Load the weights of a classifier's last layer, which `model` lacks.

    Raises:
        BundleError: the files lack the weights.
    """
    layer, linear = classifier.layer, classifier.linear
    model.set_submodule(layer, linear)
    weights = CheckpointWeights(files, model)
    filled = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None).requires_grad_(False)
    for name, parameter in filled.named_parameters():
        parameter.copy_(weights.read(f"{layer}.{name}"))
    model.set_submodule(layer, nn.Identity())
    return replace(classifier, linear=filled)


def lazy_state_dict(files: ModelFiles, model: nn.Module) -> dict[str, Any]:
    """Return a state dict that is read when transformers uses its tensors.

    Its names are those of the files; for a GGUF file, those of the model.
    """
    stored = stored_tensors(files)
    by_name = tensor_sources(model, stored.names, stored.conversions)
    if files.gguf:
        weights = CheckpointWeights(files, model)
        return {
            name: _LazyTensor(weights.read, name) for source in by_name.values() for name in source.targets
        }
    return {
        table_name: _LazyTensor(stored.read, name)
        for source in by_name.values()
        for table_name, name in source.stored.items()
    }


@dataclass(frozen=True)
class _LazyTensor:
    """A tensor that is read when transformers indexes it."""

    read: Callable[[str], torch.Tensor]
    name: str

    def __getitem__(self, _: object) -> torch.Tensor:
        return self.read(self.name)


class _MetaParameters(TorchFunctionMode):
    """Gives parameters no memory, which layers allocate by `torch.empty`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **{**(kwargs or {}), **device})


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the small tensors that an architecture computes instead of loading, such as a table's scale."""
    with _MetaParameters(), torch.no_grad():
        twin = type(model)(model.config)
    buffers = {name: buffer for name, buffer in twin.named_buffers() if not buffer.is_meta}
    return {name: each if each.dtype is torch.bool else each.float() for name, each in buffers.items()}


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter that has several, such as a head that is tied to the embedding."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: each for each in names.values() if len(each) > 1 for name in each}
