"""Tensors of a GGUF file under transformers' names and in its layout, read and dequantized one at a time.

Names, permutations and offsets are those of transformers' own tables for GGUF. They have no public way in;
they are read here and nowhere else; tests/server_export/checkpoint/gguf/test_weights.py notices when they go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from prge.errors import Refusal, refused_as, shown
from server_export.checkpoint.gguf.files import IN_CONFIGURATION, GgufModel
from server_export.checkpoint.gguf.header import GgufTensor
from server_export.checkpoint.tensor_names import tensor_sources
from server_export.library_errors import TRANSFORMERS_ERRORS

_REMEDY = "take the model's own folder with safetensors, such as its publisher's on the hub"


class GgufTensors:
    """The tensors of a GGUF file by the names that `server_export.checkpoint.tensor_names` takes them for.

    Of architectures whose conversions transformers writes as it does those of its own checkpoints, `names`
    are the file's, and `conversions` says what becomes of them. Of the others `names` are transformers' own.

    Raises:
        BundleError: the file lacks a tensor of its model, has one that the model has no place for, or one of
            another size.
    """

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self._whole = _outline(model)
        self.conversions: list[Any] | None = None
        architecture = model.header.architecture
        self._processor, self._known = None, dict[str, str]()
        what = f"{model.paths[0]} can't be read as {architecture}"
        with refused_as("gguf-not-read", what, TRANSFORMERS_ERRORS, remedy=_REMEDY):
            self.conversions = _conversions(architecture, self._whole.config)
            if self.conversions is None:
                self._processor, self._known = _older_tables(architecture, self._whole)
        self._parts = self._sorted()
        self._check()

    @property
    def names(self) -> list[str]:
        """Names of what is stored."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor whose rows can be read alone; None of another one."""
        parts = self._parts[name]
        return parts[0].shape if len(parts) == 1 and self._keeps_rows(parts[0]) else None

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor in float32, of some rows alone where they are given."""
        parts = self._parts[name]
        alone = rows is not None and all(map(self._keeps_rows, parts))
        made: dict[str, torch.Tensor] = {}
        for part in parts:
            values = part.values(_selection(rows) if alone and rows is not None else None)
            made[name] = self._processed(part, values, name, made)
        tensor = made[name]
        return tensor if rows is None or alone else tensor[list(rows)]

    def _processed(
        self, part: GgufTensor, values: np.ndarray[Any, Any], name: str, made: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        if self._processor is None:
            return torch.from_numpy(values)
        # Some write what they make of several tensors into this mapping themselves.
        parsed: dict[str, Any] = {"tensors": dict(made)}
        # Sizes that don't fit each other are met by whatever statement uses them.
        what = f"{part.name} of {part.path} can't be read"
        with refused_as("gguf-tensor-not-read", what, TRANSFORMERS_ERRORS, remedy=_REMEDY):
            result = self._processor.process(
                weights=values, name=part.name, tensor_key_mapping=self._known, parsed_parameters=parsed
            )
        if result.name is None:
            tensor: torch.Tensor = parsed["tensors"][name]
            return tensor
        return torch.from_numpy(np.ascontiguousarray(result.weights))

    def _keeps_rows(self, part: GgufTensor) -> bool:
        """Whether some rows become what they become in the whole: seen by a trial with their numbers."""
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
        except TRANSFORMERS_ERRORS:  # it needs the other sizes too
            return False
        return result.name is not None and np.array_equal(result.weights, trial)

    def _sorted(self) -> dict[str, list[GgufTensor]]:
        """The file's tensors by name; several are one of a model's where it has them in one."""
        sorted_parts: dict[str, list[GgufTensor]] = {}
        spare = []
        for name, tensor in self._model.header.tensors.items():
            if name in IN_CONFIGURATION:
                continue
            known: str | None = name
            if self.conversions is None:
                known = self._known.get(name) or self._known.get(name.removesuffix(".weight"))
            if known is None:
                spare.append(name)
            else:
                sorted_parts.setdefault(known, []).append(tensor)
        self._refuse_spare(spare)
        return sorted_parts

    def _check(self) -> None:
        """That everything a model has is there, in as many numbers as its configuration says, and no more."""
        parameters = dict(self._whole.named_parameters())
        found = tensor_sources(self._whole, self.names, self.conversions)
        problems = [f"it lacks {name}" for name in parameters if name not in found]
        used = set[str]()
        for source in found.values():
            used |= {*source.stored.values()}
            described = sum(math.prod(self._whole.state_dict()[name].shape) for name in source.targets)
            stored = sum(part.numel for name in source.stored.values() for part in self._parts[name])
            if described != stored:
                problems.append(f"{source.target} has {stored:,} numbers, the header describes {described:,}")
        # Layers that predict several tokens at once, for which transformers has no place either.
        predicted = f"blk.{self._whole.config.num_hidden_layers}."
        self._refuse_spare(
            [name for name in self.names if name not in used and not name.startswith(predicted)]
        )
        if problems:
            raise Refusal(
                "gguf-incomplete",
                f"{self._model.paths[0]} holds no whole model: {'; '.join(problems[:5])}",
                remedy="download the file again",
            )

    def _refuse_spare(self, names: Sequence[str]) -> None:
        if names:
            raise Refusal(
                "gguf-spare-tensors",
                f"{self._model.paths[0]} has tensors that transformers' {type(self._whole).__name__} has no "
                f"place for, so that it would be another model: {shown(', '.join(sorted(names)[:5]))}",
                remedy=_REMEDY,
            )


def _selection(rows: Sequence[int]) -> slice | list[int]:
    return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else list(rows)


def _outline(model: GgufModel) -> Any:
    """The causal language model of a file, without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(model.folder), local_files_only=True)
    what = f"{model.paths[0]} holds no causal language model"
    with refused_as("gguf-not-read", what, TRANSFORMERS_ERRORS, remedy=_REMEDY), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _conversions(architecture: str, config: Any) -> list[Any] | None:
    from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported

    return get_gguf_conversion_mapping(architecture, config) if is_gguf_arch_supported(architecture) else None


class _Shallow:
    """What transformers' table of names asks of a model, two floors of it: it would look through all."""

    def __init__(self, module: Any, floors: int = 2) -> None:
        self.config = module.config
        self._module, self._floors = module, floors

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self._module.state_dict()

    def named_children(self) -> list[tuple[str, Any]]:
        if self._floors < 2:
            return []
        inner = ((name, child) for name, child in self._module.named_children() if hasattr(child, "config"))
        return [(name, _Shallow(child, self._floors - 1)) for name, child in inner]


def _older_tables(architecture: str, whole: Any) -> tuple[Any, dict[str, str]]:
    """What undoes llama.cpp's changes of values, and transformers' names by a file's."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=whole.config.to_dict())
    return processor, dict(get_gguf_hf_weights_map(_Shallow(whole), processor))
