"""What a checkpoint calls the tensors of a model, and how they become them, by transformers' own tables.

transformers converts names, and some tensors, while it loads a model as a whole. Its tables have no public
way in; they are read here alone; tests/server_export/checkpoint/test_tensor_names.py notices when they go.
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
    """What transformers' conversions ask of a model: its configuration, and shapes of its parameters."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def get_parameter(self, name: str) -> torch.Tensor:
        """One in shape."""
        return torch.empty(self.shapes[name], device="meta")


@dataclass
class TensorSource:
    """Stored tensors that one or more of a model's are made of.

    `stored` has their names in the files by those that transformers' tables know them by; `patterns` says
    which input of a conversion each is. Without a `conversion` one tensor is the model's as it is.
    """

    target: str
    conversion: Any = None
    stored: dict[str, str] = field(default_factory=dict)
    patterns: dict[str, str] = field(default_factory=dict)

    @property
    def targets(self) -> list[str]:
        """The model's names of what it makes."""
        if self.conversion is None:
            return [self.target]
        first, *others = self.conversion.target_patterns
        return [self.target, *(self.target.replace(first, other, 1) for other in others)]

    def convert_tensors(
        self, read: Callable[[str], torch.Tensor], outline: WeightShapes, rows: Sequence[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """The model's tensors by name, of stored ones that `read` gives by their names in the files.

        Of `rows` alone, if they are given; where every row has stored tensors of its own, no other is read.
        """
        if self.conversion is None:
            return {self.target: read(*self.stored.values())}
        conversion = copy.deepcopy(self.conversion)
        members = self._members
        for given, stored in self.stored.items():
            if rows is not None and members and members[given] not in rows:
                continue
            conversion.add_tensor(self.target, given, self.patterns[given], lambda name=stored: read(name))
        made = conversion.convert(self.target, model=outline, config=outline.config)
        found = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        if rows is None or members:
            return found
        return {name: value[list(rows)] for name, value in found.items()}

    @property
    def has_rows(self) -> bool:
        """Whether every row has stored tensors of its own."""
        return bool(self._members)

    @property
    def _members(self) -> dict[str, int]:
        """Which row each stored tensor belongs to, where lists of them become rows, as of experts."""
        groups: dict[str, list[str]] = {}
        for given, pattern in self.patterns.items():
            groups.setdefault(pattern, []).append(given)
        is_list = all("*" in pattern for pattern in groups) and len({*map(len, groups.values())}) == 1
        return {given: row for group in groups.values() for row, given in enumerate(group)} if is_list else {}


def tensor_sources(
    model: nn.Module, stored: Collection[str], conversions: Sequence[Any] | None = None
) -> dict[str, TensorSource]:
    """Where each tensor of a model comes from, by its name; those that aren't stored are left out.

    Of a checkpoint that holds more than the model, such as one of texts and images, its part is taken.

    Args:
        model: of transformers, which may lack its weights.
        stored: names in the files.
        conversions: transformers', from these names to the model's; by default those of its checkpoints.
    """
    found = _sources(model, {name: name for name in stored}, conversions)
    if conversions is not None or _table(model) in found:
        return found
    place, beside = _place_of_part(model, stored)
    prefix = _base_prefix(model)
    part = {prefix + name.removeprefix(place): name for name in stored if name.startswith(place)}
    return _sources(model, part | beside) or found


def key_mapping(model: nn.Module, stored: Collection[str]) -> dict[str, str]:
    """What transformers' `from_pretrained` is to be told, so that it finds a part of what is stored.

    Names of expressions by what takes their place; empty where transformers finds the model by itself.
    """
    if _table(model) in _sources(model, {name: name for name in stored}):
        return {}
    place, beside = _place_of_part(model, stored)
    renamed = {place: _base_prefix(model), **{name: given for given, name in beside.items() if given != name}}
    return {f"^{re.escape(name)}": given for name, given in renamed.items()}


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
    prefix, own = model.base_model_prefix, model.state_dict()
    found: dict[str, TensorSource] = {}
    # In transformers' order: some renamings begin with the first name of a group, and lists are in theirs.
    for given in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(given, renamings, converters, prefix, own)
        if target not in own and given in own:
            target, pattern = rename_source_key(given, [], [], prefix, own)
        if target not in own:
            continue
        source = found.setdefault(target, TensorSource(target, by_pattern[pattern] if pattern else None))
        source.stored[given] = names[given]
        source.patterns[given] = pattern or given
    return {target: source for source in found.values() for target in source.targets}


def _table(model: Any) -> str:
    """The name of a model's table of embeddings."""
    table = model.get_input_embeddings().weight
    return next(name for name, parameter in model.named_parameters() if parameter is table)


def _base_prefix(model: Any) -> str:
    """What the names of a model's base begin with; a model that is a base itself has none."""
    return f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""


def _place_of_part(model: Any, stored: Collection[str]) -> tuple[str, dict[str, str]]:
    """Where the base of a model that is a part of what is stored lies, and stored names of what is beside it.

    Of the prefixes that the table of embeddings has, it is the one that most names fit behind.
    """
    prefix = _base_prefix(model)
    table = _table(model).removeprefix(prefix)
    behind = {name.removeprefix(prefix) for name in model.state_dict() if name.startswith(prefix)}
    places = sorted({name.removesuffix(table) for name in stored if f".{name}".endswith(f".{table}")})
    if not places:
        return "", {}
    place = max(places, key=lambda place: sum(place + name in stored for name in behind))
    return place, dict(_beside_base(model, stored, prefix, place))


def _beside_base(model: Any, stored: Collection[str], prefix: str, place: str) -> Iterator[tuple[str, str]]:
    """What a model has beside its base, such as a head: stored at the nearest place around the base's."""
    outer = place.split(".")
    around = [".".join([*outer[:depth], ""]) for depth in range(len(outer))]
    for name in model.state_dict():
        if not name.startswith(prefix):
            yield from ((name, start + name) for start in around if start + name in stored)
