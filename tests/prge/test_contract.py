"""The contract: shapes, order of inputs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from prge.model_spec import AdaptedModule, Matrix
from prge.errors import ConfigError
from tests.bundles import make_contract


def test_inputs_of_a_decoder_in_calling_order() -> None:
    inputs = make_contract().inputs
    assert [(spec.name, spec.dtype, spec.shape) for spec in inputs] == [
        ("tokens", "int64", (8, 16)),
        ("positions", "int64", (8, 3)),
        ("targets", "int64", (8, 3)),
        ("lora_b.layers.0.q_proj", "float32", (4, 4, 8)),
        ("lora_b.layers.0.v_proj", "float32", (4, 4, 6)),
    ]
    (output,) = make_contract().outputs
    assert (output.name, output.shape) == ("logprobs", (8, 3))


def test_inputs_of_an_encoder() -> None:
    contract = make_contract(readout="pooled", positions=0, width=12)
    assert [spec.name for spec in contract.inputs][:2] == ["tokens", "attention_mask"]
    assert len(contract.inputs) == 2 + len(contract.modules)
    (output,) = contract.outputs
    assert (output.name, output.shape) == ("pooled", (8, 12))


def test_inputs_and_outputs_of_a_tangent_decoder() -> None:
    contract = make_contract(role="tangent", copies=1, queries=3)
    assert [(spec.name, spec.shape) for spec in contract.inputs] == [
        ("tokens", (2, 16)),
        ("positions", (2, 3)),
        ("targets", (2, 3)),
        ("lora_b.layers.0.q_proj", (4, 8)),
        ("lora_b.layers.0.v_proj", (4, 6)),
        ("u.layers.0.q_proj", (3, 2, 4)),
        ("v.layers.0.q_proj", (3, 2, 8)),
        ("u.layers.0.v_proj", (3, 2, 4)),
        ("v.layers.0.v_proj", (3, 2, 6)),
    ]
    assert [(spec.name, spec.shape) for spec in contract.outputs] == [
        ("logprobs", (2, 3)),
        ("dlogprobs", (3, 2, 3)),
    ]
    assert (contract.rows, contract.computed_rows) == (2, 8)


def test_outputs_of_a_tangent_encoder() -> None:
    contract = make_contract(role="tangent", copies=1, queries=3, readout="pooled", positions=0, width=12)
    assert [(spec.name, spec.shape) for spec in contract.outputs] == [
        ("pooled", (2, 12)),
        ("dpooled", (3, 2, 12)),
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"copies": 0}, "copies is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"vocabulary_size": 0}, "vocabulary_size is 0"),
        ({"role": "circle"}, "role is 'circle'"),
        ({"role": "tangent", "copies": 1}, "queries is 0"),
        ({"role": "tangent", "copies": 4, "queries": 2}, "copies is 4"),
        ({"queries": 2}, "queries is 2"),
        ({"readout": "logits"}, "readout is 'logits'"),
        ({"readout": "pooled", "width": 0}, "width is 0"),
        ({"positions": 0}, "positions is 0"),
        ({"modules": ()}, "modules is empty"),
    ],
)
def test_impossible_contract_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_contract(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"copies": 10**12}, "copies is 1000000000000, must be at most 16777216"),
        ({"sequence_length": 10**12}, "sequence_length is 1000000000000"),
        ({"vocabulary_size": 10**300}, "vocabulary_size is 1000"),
        ({"batch_size": 1 << 20, "sequence_length": 1 << 20}, "inputs and outputs take .* bytes"),
        ({"modules": (AdaptedModule("q", 10**12, 8, 8),)}, "the module 'q' has rank 1000000000000"),
        ({"modules": (AdaptedModule("q", 0, 8, 8),)}, "the module 'q' has rank 0"),
        ({"modules": (AdaptedModule("q", 1 << 24, 8, 1 << 24),)}, "inputs and outputs take .* bytes"),
        ({"modules": (AdaptedModule("q", 4, 8, 8),) * 2}, "modules are 2, must be .* different ones"),
    ],
)
def test_sizes_of_no_call_are_refused_before_anything_is_allocated(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make_contract(**changes)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_contract(copies=0, batch_size=0, modules=())
    assert all(word in str(caught.value) for word in ("copies", "batch_size", "modules"))


def test_matrices_of_a_module() -> None:
    assert AdaptedModule("a.b", 1, 2, 3).matrices == (Matrix("b", "a.b", 1, 3),)
    lora_a, lora_b = AdaptedModule("a.b", 1, 2, 3, trains_a=True).matrices_of("7")
    assert (lora_a.name, lora_a.u, lora_a.v, lora_a.gradient) == (
        "lora_a.7",
        "u_a.7",
        "v_a.7",
        "gradient_a.7",
    )
    assert (lora_b.name, lora_b.u, lora_b.v, lora_b.gradient) == ("lora_b.7", "u.7", "v.7", "gradient.7")
    assert (lora_a.width, lora_b.width) == (2, 3)
