"""The adapter as one vector, and the matrices that are views of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prge.files.adapter import Adapter, adapter_size, views
from prge.model_spec import AdaptedModule
from tests.templates import random_adapter

MODULES = (
    AdaptedModule("model.layers.0.q_proj", rank=2, in_features=5, out_features=3),
    AdaptedModule("model.layers.0.v_proj", rank=2, in_features=5, out_features=4),
)


def test_values_are_the_modules_one_after_the_other() -> None:
    adapter = Adapter.zeros(MODULES)
    adapter.values[:] = np.arange(adapter.size)
    named = adapter.lora_b
    assert adapter.size == 2 * 3 + 2 * 4
    assert named["model.layers.0.q_proj"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert named["model.layers.0.v_proj"][0].tolist() == [6, 7, 8, 9]
    named["model.layers.0.v_proj"][1, 3] = -1
    assert adapter.values[-1] == -1


def test_a_copy_has_its_own_values() -> None:
    adapter = random_adapter(MODULES)
    other = adapter.copy()
    other.values[0] += 1
    assert adapter.values[0] != other.values[0]


@pytest.mark.parametrize("values", [np.zeros(3, np.float32), np.zeros(14), np.zeros(28, np.float32)[::2]])
def test_a_vector_of_another_kind_is_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="float32"):
        Adapter(MODULES, values)


def test_views_are_of_every_copy_of_the_values() -> None:
    copies = np.stack([random_adapter(MODULES, seed).values for seed in (1, 2, 3)])
    found = views(MODULES, copies)
    assert list(found) == [f"lora_b.{module.name}" for module in MODULES]
    for module in MODULES:
        matrices = found[f"lora_b.{module.name}"]
        assert matrices.shape == (3, module.rank, module.out_features)
        assert np.shares_memory(matrices, copies)
        for copy, values in enumerate(copies):
            assert np.array_equal(matrices[copy], Adapter(MODULES, values).lora_b[module.name])


def test_views_of_lora_have_both_matrices_in_their_order() -> None:
    modules = tuple(replace(module, trains_a=True) for module in MODULES)
    values = np.arange(adapter_size(modules), dtype=np.float32)
    found = views(modules, values)
    assert list(found) == [f"lora_{letter}.{module.name}" for module in modules for letter in "ab"]
    assert np.concatenate([matrix.ravel() for matrix in found.values()]).tolist() == values.tolist()
    adapter = Adapter(modules, values)
    assert adapter.lora_a is not None
    for module in modules:
        assert np.array_equal(adapter.lora_a[module.name], found[f"lora_a.{module.name}"])
