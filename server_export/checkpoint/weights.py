"""A model's weights, read from its files one at a time: the whole model is never in memory."""

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
    """The tensors of a checkpoint by the names that transformers' model has for them.

    Args:
        files: of the checkpoint.
        model: without weights, whose parameters are asked for.
        transposed: names of weights that the files have as [in, out], GPT-2's way.

    Attributes:
        buffers: tensors that no file has, by name.

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
        """A parameter, or a number that the architecture says, f32; a weight of a linear layer is [out, in].

        Args:
            name: of it.
            rows: of a parameter, which alone are read; by default all.

        Raises:
            BundleError: the files lack it, or it has numbers that aren't finite.
        """
        known = self._known(name)
        if known is None:
            return self.buffers[name]
        source = self._sources[known]
        if source.conversion is None:
            (stored,) = source.stored.values()
            tensor = self._stored.read(stored, rows)
        else:
            tensor = source.convert_tensors(self._stored.read, self._outline, rows)[known]
        tensor = tensor.to(torch.float32)
        if not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
            raise Refusal(
                "weights-not-finite",
                f"{name} of {self.files.name} has numbers that aren't finite",
                remedy="give a complete checkpoint",
            )
        if name in self.transposed:
            return tensor.t()
        if rows is None:
            self._check_shape(name, tensor.shape)
        return tensor

    def iter_rows(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """What `read` gives, so many rows at a time: one that is stored as it is never is in memory whole."""
        known = self._known(name)
        if known is None or self._sources[known].conversion is not None:
            yield from self.read(name).split(rows)
            return
        (stored,) = self._sources[known].stored.values()
        shape = self._stored.shape(stored)
        if shape is None:
            yield from self.read(name).split(rows)
            return
        self._check_shape(name, shape)
        for start in range(0, shape[0], rows):
            yield self.read(name, range(start, min(start + rows, shape[0])))

    def stored_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a parameter; None of a number that the architecture says.

        Raises:
            BundleError: the files lack it.
        """
        return None if self._known(name) is None else self._outline.shapes.get(name)

    def has_rows(self, name: str) -> bool:
        """Whether some rows of a parameter can be read without the others."""
        known = self._known(name)
        if known is None or name in self.transposed:
            return False
        source = self._sources[known]
        return source.conversion is None or source.has_rows

    def _known(self, name: str) -> str | None:
        """The name that a parameter's source has; None for a number that the architecture says."""
        known = next((known for known in (name, *self._tied.get(name, ())) if known in self._sources), None)
        if known is None and name not in self.buffers:
            raise Refusal(
                "weights-incomplete", f"{self.files.name} lacks {name}", remedy="give a complete checkpoint"
            )
        return known

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        described = self._outline.shapes.get(name, tuple(shape))
        if tuple(shape) != described:
            raise Refusal(
                "weights-of-another-shape",
                f"{name} of {self.files.name} is {list(shape)}, its {self.files.config_name} describes "
                f"{list(described)}",
                remedy="copy the model again",
            )


def stored_names(files: ModelFiles, model: nn.Module) -> set[str]:
    """Names of the stored tensors that a model is made of."""
    stored = stored_tensors(files)
    found = tensor_sources(model, stored.names, stored.conversions)
    return {name for source in found.values() for name in source.stored.values()}


def checkpoint_key_mapping(files: ModelFiles, model: nn.Module) -> dict[str, str]:
    """See `server_export.checkpoint.tensor_names.key_mapping`."""
    return key_mapping(model, stored_tensors(files).names)


def load_classifier_weights(
    classifier: CheckpointClassifier, model: nn.Module, files: ModelFiles
) -> CheckpointClassifier:
    """The last layer of a model's own classification head, whose numbers are read; the model lacks it.

    Raises:
        BundleError: the files lack them.
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
    """What transformers loads a model of that it can't find in the files itself, read when it is asked for.

    A part of a checkpoint by the names that the files have, or what a GGUF file holds by those of the model.
    """
    stored = stored_tensors(files)
    found = tensor_sources(model, stored.names, stored.conversions)
    if files.gguf:
        weights = CheckpointWeights(files, model)
        return {name: _Later(weights.read, name) for source in found.values() for name in source.targets}
    return {
        given: _Later(stored.read, name) for source in found.values() for given, name in source.stored.items()
    }


@dataclass(frozen=True)
class _Later:
    """A tensor that is read when transformers takes it."""

    read: Callable[[str], torch.Tensor]
    name: str

    def __getitem__(self, _: object) -> torch.Tensor:
        return self.read(self.name)


class _WithoutParameters(TorchFunctionMode):
    """Tensors that are to be filled, as layers make theirs, have no memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **{**(kwargs or {}), **place})


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Small tensors that no file has because an architecture computes them, such as a table's scale."""
    with _WithoutParameters(), torch.no_grad():
        twin = type(model)(model.config)
    known = {name: buffer for name, buffer in twin.named_buffers() if not buffer.is_meta}
    return {name: each if each.dtype is torch.bool else each.float() for name, each in known.items()}


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The other names of parameters that have several, as a head that is the table of embeddings."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: each for each in names.values() if len(each) > 1 for name in each}
