"""Tensors of a GGUF file under transformers' names and in its layout, read and dequantized one at a time.

Names, permutations and offsets are those of transformers' own tables for GGUF, which have no public
interface. Only this module reads them, and tests/server_export/checkpoint/gguf/test_weights.py fails if they
change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from prge.errors import Refusal, format_value, refused_as
from server_export.checkpoint.gguf.files import IN_CONFIGURATION, GgufModel
from server_export.checkpoint.gguf.header import GgufTensor
from server_export.checkpoint.tensor_names import tensor_sources
from server_export.library_errors import TRANSFORMERS_ERRORS

_REMEDY = "Use the model's original folder with safetensors, such as its publisher's on the Hub."


class GgufTensors:
    """The tensors of a GGUF file, under the names that `server_export.checkpoint.tensor_names` expects.

    For architectures that transformers converts from GGUF like its own checkpoints, `names` are the file's
    and `conversions` has the conversions. For other architectures `names` are transformers' own.

    Raises:
        BundleError: the file lacks a tensor of its model, has a tensor that the model does not use, or has a
            tensor of another size.
    """

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self._whole = _outline(model)
        self.conversions: list[Any] | None = None
        architecture = model.header.architecture
        self._processor, self._known = None, dict[str, str]()
        what = f"Cannot read {model.paths[0]} as {architecture}"
        with refused_as("gguf-not-read", what, TRANSFORMERS_ERRORS, remedy=_REMEDY):
            self.conversions = _conversions(architecture, self._whole.config)
            if self.conversions is None:
                self._processor, self._known = _older_tables(architecture, self._whole)
        self._parts = self._sorted()
        self._check()

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor whose rows can be read alone; None for any other tensor."""
        parts = self._parts[name]
        return parts[0].shape if len(parts) == 1 and self._keeps_rows(parts[0]) else None

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Read a tensor, or some of its rows, in float32."""
        parts = self._parts[name]
        by_rows = rows is not None and all(map(self._keeps_rows, parts))
        tensors: dict[str, torch.Tensor] = {}
        for part in parts:
            values = part.values(_selection(rows) if by_rows and rows is not None else None)
            tensors[name] = self._processed(part, values, name, tensors)
        tensor = tensors[name]
        return tensor if rows is None or by_rows else tensor[list(rows)]

    def _processed(
        self, part: GgufTensor, values: np.ndarray[Any, Any], name: str, tensors: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        if self._processor is None:
            return torch.from_numpy(values)
        # Some processors write the result of several tensors into this mapping themselves.
        parsed: dict[str, Any] = {"tensors": dict(tensors)}
        # transformers doesn't check that sizes match, so any of its statements may raise.
        what = f"Cannot read {part.name} of {part.path}"
        with refused_as("gguf-tensor-not-read", what, TRANSFORMERS_ERRORS, remedy=_REMEDY):
            result = self._processor.process(
                weights=values, name=part.name, tensor_key_mapping=self._known, parsed_parameters=parsed
            )
        if result.name is None:
            tensor: torch.Tensor = parsed["tensors"][name]
            return tensor
        return torch.from_numpy(np.ascontiguousarray(result.weights))

    def _keeps_rows(self, part: GgufTensor) -> bool:
        """Return whether each row is processed independently, by a trial with the row numbers as values."""
        if self._processor is None or "_exps." in part.name:
            return True
        trial = np.arange(part.shape[0], dtype=np.float32).reshape(-1, *[1] * (len(part.shape) - 1))
        try:
            result = self._processor.process(
                weights=trial.copy(),
                name=part.name,
                tensor_key_mapping=self._known,
                parsed_parameters={"tensors": {}},
            )
        except TRANSFORMERS_ERRORS:  # the processor needs the other sizes too
            return False
        return result.name is not None and np.array_equal(result.weights, trial)

    def _sorted(self) -> dict[str, list[GgufTensor]]:
        """Return the file's tensors by stored name; several tensors may form one tensor of the model."""
        by_name: dict[str, list[GgufTensor]] = {}
        unused = []
        for name, tensor in self._model.header.tensors.items():
            if name in IN_CONFIGURATION:
                continue
            target: str | None = name
            if self.conversions is None:
                target = self._known.get(name) or self._known.get(name.removesuffix(".weight"))
            if target is None:
                unused.append(name)
            else:
                by_name.setdefault(target, []).append(tensor)
        self._refuse_spare(unused)
        return by_name

    def _check(self) -> None:
        """Refuse the file unless it has every tensor of the model in the described size, and no others."""
        parameters = dict(self._whole.named_parameters())
        by_target = tensor_sources(self._whole, self.names, self.conversions)
        problems = [f"it lacks {name}" for name in parameters if name not in by_target]
        used = set[str]()
        for source in by_target.values():
            used |= {*source.stored.values()}
            described = sum(math.prod(self._whole.state_dict()[name].shape) for name in source.targets)
            stored = sum(part.numel for name in source.stored.values() for part in self._parts[name])
            if described != stored:
                problems.append(
                    f"{source.target} has {stored:,} elements, but the header describes {described:,}"
                )
        # transformers has no modules for layers that predict several tokens at once.
        predicted = f"blk.{self._whole.config.num_hidden_layers}."
        self._refuse_spare(
            [name for name in self.names if name not in used and not name.startswith(predicted)]
        )
        if problems:
            raise Refusal(
                "gguf-incomplete",
                f"{self._model.paths[0]} does not contain a complete model: {'; '.join(problems[:5])}.",
                remedy="Download the file again.",
            )

    def _refuse_spare(self, names: Sequence[str]) -> None:
        if names:
            raise Refusal(
                "gguf-spare-tensors",
                f"{self._model.paths[0]} has tensors that transformers' {type(self._whole).__name__} does "
                f"not use, so that it would be another model: {format_value(', '.join(sorted(names)[:5]))}.",
                remedy=_REMEDY,
            )


def _selection(rows: Sequence[int]) -> slice | list[int]:
    return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else list(rows)


def _outline(model: GgufModel) -> Any:
    """Return the causal language model of a file, without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(model.folder), local_files_only=True)
    what = f"{model.paths[0]} does not contain a causal language model"
    with refused_as("gguf-not-read", what, TRANSFORMERS_ERRORS, remedy=_REMEDY), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _conversions(architecture: str, config: Any) -> list[Any] | None:
    from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported

    return get_gguf_conversion_mapping(architecture, config) if is_gguf_arch_supported(architecture) else None


class _Shallow:
    """The part of a model that transformers' table of names uses, two levels deep instead of all."""

    def __init__(self, module: Any, levels: int = 2) -> None:
        self.config = module.config
        self._module, self._floors = module, levels

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self._module.state_dict()

    def named_children(self) -> list[tuple[str, Any]]:
        if self._floors < 2:
            return []
        inner = ((name, child) for name, child in self._module.named_children() if hasattr(child, "config"))
        return [(name, _Shallow(child, self._floors - 1)) for name, child in inner]


def _older_tables(architecture: str, whole: Any) -> tuple[Any, dict[str, str]]:
    """Return what undoes llama.cpp's changes of values, and transformers' names by the file's names."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=whole.config.to_dict())
    return processor, dict(get_gguf_hf_weights_map(_Shallow(whole), processor))
