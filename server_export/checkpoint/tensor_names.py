"""Names of a model's tensors in a checkpoint, and their conversion, by transformers' own tables.

transformers renames tensors, and converts some, while it loads a model as a whole. Its tables have no public
interface. Only this module reads them, and tests/server_export/checkpoint/test_tensor_names.py fails if they
change.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


class WeightShapes:
    """A model's configuration and shapes of parameters, as transformers' conversions use them."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a tensor of a parameter's shape, without memory."""
        return torch.empty(self.shapes[name], device="meta")


@dataclass
class TensorSource:
    """The stored tensors that one or more tensors of a model are made of.

    Attributes:
        target: the model's name of the first tensor.
        conversion: transformers' conversion, or None if one stored tensor is the model's tensor unchanged.
        stored: names in the files, by the names that transformers' tables have for them.
        patterns: for each stored tensor, the input of the conversion that it is used for.
    """

    target: str
    conversion: Any = None
    stored: dict[str, str] = field(default_factory=dict)
    patterns: dict[str, str] = field(default_factory=dict)

    @property
    def targets(self) -> list[str]:
        """The model's names of all tensors that this source produces."""
        if self.conversion is None:
            return [self.target]
        first, *others = self.conversion.target_patterns
        return [self.target, *(self.target.replace(first, other, 1) for other in others)]

    def convert_tensors(
        self, read: Callable[[str], torch.Tensor], outline: WeightShapes, rows: Sequence[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the model's tensors by name, made of the stored tensors.

        Args:
            read: reads a stored tensor by its name in the files.
            outline: the model's configuration and shapes.
            rows: the rows to return; by default all. If each row has stored tensors of its own, only those of
                the requested rows are read.
        """
        if self.conversion is None:
            return {self.target: read(*self.stored.values())}
        conversion = copy.deepcopy(self.conversion)
        members = self._members
        for table_name, stored in self.stored.items():
            if rows is not None and members and members[table_name] not in rows:
                continue
            conversion.add_tensor(
                self.target, table_name, self.patterns[table_name], lambda name=stored: read(name)
            )
        converted = conversion.convert(self.target, model=outline, config=outline.config)
        tensors = {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
        if rows is None or members:
            return tensors
        return {name: value[list(rows)] for name, value in tensors.items()}

    @property
    def has_rows(self) -> bool:
        """Whether each row has stored tensors of its own."""
        return bool(self._members)

    @property
    def _members(self) -> dict[str, int]:
        """The row of each stored tensor, if lists of tensors are stacked as rows, as for experts."""
        groups: dict[str, list[str]] = {}
        for name, pattern in self.patterns.items():
            groups.setdefault(pattern, []).append(name)
        is_list = all("*" in pattern for pattern in groups) and len({*map(len, groups.values())}) == 1
        return {name: row for group in groups.values() for row, name in enumerate(group)} if is_list else {}


def tensor_sources(
    model: nn.Module, stored: Collection[str], conversions: Sequence[Any] | None = None
) -> dict[str, TensorSource]:
    """Return the source of each stored tensor of a model, by the model's name.

    If the checkpoint contains more than the model, such as the image part of a multimodal model, only the
    tensors of the model are returned.

    Args:
        model: the transformers model, with or without weights.
        stored: names in the files.
        conversions: transformers' conversions from these names to the model's; default: those of its own
            checkpoints.
    """
    by_name = _sources(model, {name: name for name in stored}, conversions)
    if conversions is not None or _table(model) in by_name:
        return by_name
    stored_prefix, outside = _locate_base(model, stored)
    prefix = _base_prefix(model)
    part = {
        prefix + name.removeprefix(stored_prefix): name for name in stored if name.startswith(stored_prefix)
    }
    return _sources(model, part | outside) or by_name


def key_mapping(model: nn.Module, stored: Collection[str]) -> dict[str, str]:
    """Return the `key_mapping` that lets transformers' `from_pretrained` load a part of a checkpoint.

    It maps regular expressions to replacements, and is empty if transformers finds the model by itself.
    """
    if _table(model) in _sources(model, {name: name for name in stored}):
        return {}
    stored_prefix, outside = _locate_base(model, stored)
    renamed = {
        stored_prefix: _base_prefix(model),
        **{name: target for target, name in outside.items() if target != name},
    }
    return {f"^{re.escape(name)}": target for name, target in renamed.items()}


def _sources(
    model: Any, names: Mapping[str, str], conversions: Sequence[Any] | None = None
) -> dict[str, TensorSource]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    entries = get_model_conversion_mapping(model) if conversions is None else conversions
    renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    by_target: dict[str, TensorSource] = {}
    # transformers' order matters: some renamings match only the first name of a group, and lists keep it.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue
        source = by_target.setdefault(target, TensorSource(target, by_pattern[pattern] if pattern else None))
        source.stored[name] = names[name]
        source.patterns[name] = pattern or name
    return {target: source for source in by_target.values() for target in source.targets}


def _table(model: Any) -> str:
    """Return the name of a model's embedding table."""
    table = model.get_input_embeddings().weight
    return next(name for name, parameter in model.named_parameters() if parameter is table)


def _base_prefix(model: Any) -> str:
    """Return the prefix of the names of a model's base; empty if the model is the base itself."""
    return f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""


def _locate_base(model: Any, stored: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return the stored prefix of a model's base, and the stored names of the model's other tensors.

    Among the prefixes of stored embedding tables, the one with most of the base's names is chosen.
    """
    prefix = _base_prefix(model)
    table = _table(model).removeprefix(prefix)
    base_names = {name.removeprefix(prefix) for name in model.state_dict() if name.startswith(prefix)}
    prefixes = sorted({name.removesuffix(table) for name in stored if f".{name}".endswith(f".{table}")})
    if not prefixes:
        return "", {}
    stored_prefix = max(
        prefixes, key=lambda stored_prefix: sum(stored_prefix + name in stored for name in base_names)
    )
    return stored_prefix, dict(_outside_base(model, stored, prefix, stored_prefix))


def _outside_base(
    model: Any, stored: Collection[str], prefix: str, stored_prefix: str
) -> Iterator[tuple[str, str]]:
    """Yield the tensors outside of a model's base, such as a head, at the nearest prefix around the base."""
    outer = stored_prefix.split(".")
    outer_prefixes = [".".join([*outer[:depth], ""]) for depth in range(len(outer))]
    for name in model.state_dict():
        if not name.startswith(prefix):
            yield from ((name, start + name) for start in outer_prefixes if start + name in stored)
