"""The description of a model, and refused values."""

from __future__ import annotations

from typing import Any

import pytest

from prge.errors import ConfigError
from prge.model_spec import AdaptedModule, Matrix
from tests.bundles import make_spec
from tests.refusals import raises


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sequence_length": 0}, "sequence_length"),
        ({"vocabulary_size": 0}, "vocabulary_size"),
        ({"readout": "logits"}, "'logits'"),
        ({"readout": "pooled", "width": 0}, "width"),
        ({"modules": ()}, "modules"),
        ({"sequence_length": 10**12}, "1000000000000"),
        ({"vocabulary_size": 10**300}, "vocabulary_size"),
        ({"modules": (AdaptedModule("q", 10**12, 8, 8),)}, "1000000000000"),
        ({"modules": (AdaptedModule("q", 0, 8, 8),)}, "'q'"),
        ({"modules": (AdaptedModule("q", 1 << 24, 8, 1 << 24),)}, str(1 << 48)),
        ({"modules": (AdaptedModule("q", 4, 8, 8),) * 2}, "2"),
    ],
)
def test_sizes_out_of_bounds_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with raises(ConfigError, "model-sizes", containing=named):
        make_spec(**changes)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_spec(sequence_length=0, vocabulary_size=0, modules=())
    assert all(word in str(caught.value) for word in ("sequence_length", "vocabulary_size", "modules"))


def test_matrices_of_a_module() -> None:
    assert AdaptedModule("a.b", 1, 2, 3).matrices == (Matrix("b", "a.b", 1, 3),)
    lora_a, lora_b = AdaptedModule("a.b", 1, 2, 3, trains_a=True).matrices_of("7")
    assert (lora_a.name, lora_a.u, lora_a.v, lora_a.gradient) == (
        "lora_a.7",
        "u_a.7",
        "v_a.7",
        "grad_lora_a.7",
    )
    assert (lora_b.name, lora_b.u, lora_b.v, lora_b.gradient) == ("lora_b.7", "u.7", "v.7", "grad_lora_b.7")
    assert (lora_a.width, lora_b.width) == (2, 3)
