"""The adapter as one vector, and as the inputs of a program."""

from __future__ import annotations

import numpy as np
import pytest

from prge.files.adapter import Adapter, AdapterStack, stack
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
    with pytest.raises(ValueError, match="contiguous float32"):
        Adapter(MODULES, values)


def test_stack_puts_the_adapter_into_every_copy() -> None:
    adapter = random_adapter(MODULES)
    inputs = stack(adapter, 3)
    assert list(inputs) == [f"lora_b.{module.name}" for module in MODULES]
    for module in MODULES:
        buffer = inputs[f"lora_b.{module.name}"]
        assert buffer.flags.c_contiguous and buffer.dtype == np.float32
        assert buffer.shape == (3, module.rank, module.out_features)
        for copy in range(3):
            assert np.array_equal(buffer[copy], adapter.lora_b[module.name])


def test_a_stack_is_filled_in_place_copy_by_copy() -> None:
    buffers = AdapterStack(MODULES, 2)
    before = {name: array.ctypes.data for name, array in buffers.inputs.items()}
    first, second = random_adapter(MODULES, 1), random_adapter(MODULES, 2)
    buffers.fill(0, first.values)
    buffers.fill(1, second.values)
    assert before == {name: array.ctypes.data for name, array in buffers.inputs.items()}
    for module in MODULES:
        assert np.array_equal(buffers.inputs[f"lora_b.{module.name}"][0], first.lora_b[module.name])
        assert np.array_equal(buffers.inputs[f"lora_b.{module.name}"][1], second.lora_b[module.name])


def test_a_stack_refuses_what_it_has_no_place_for() -> None:
    buffers = AdapterStack(MODULES, 2)
    with pytest.raises(ValueError, match="copy is 2"):
        buffers.fill(2, random_adapter(MODULES).values)
    with pytest.raises(ValueError, match="copy is -1"):
        buffers.fill(-1, random_adapter(MODULES).values)
    with pytest.raises(ValueError, match="shape"):
        buffers.fill(0, np.zeros(15, np.float32))
