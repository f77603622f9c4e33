"""The contract: shapes, order of inputs, round trip, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from prge.contract import AdaptedModule, Contract, TensorSpec
from prge.errors import BundleError
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
    contract = make_contract(kind="tangent", copies=1, queries=3)
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
    contract = make_contract(kind="tangent", copies=1, queries=3, readout="pooled", positions=0, width=12)
    assert [(spec.name, spec.shape) for spec in contract.outputs] == [
        ("pooled", (2, 12)),
        ("dpooled", (3, 2, 12)),
    ]


STATES = TensorSpec("trunk.0", "float32", (2, 16, 12))


def test_shared_rows_are_given_once_and_answered_for_every_copy() -> None:
    contract = make_contract(shared_rows=True)
    assert [spec.shape for spec in contract.inputs] == [(2, 16), (2, 3), (2, 3), (4, 4, 8), (4, 4, 6)]
    assert contract.outputs == make_contract().outputs
    assert (contract.given_rows, contract.rows, contract.computed_rows) == (2, 8, 8)


@pytest.mark.parametrize(
    "changes",
    [{"shared_rows": True}, {"kind": "tangent", "copies": 1, "queries": 3}],
    ids=["stack", "tangent"],
)
def test_a_cut_program_takes_states_in_the_place_of_tokens(changes: dict[str, Any]) -> None:
    whole = make_contract(**changes)
    trunk, step = whole.divided((STATES,))
    assert [spec.name for spec in trunk.inputs] == ["tokens"]
    assert trunk.outputs == (STATES,)
    assert (trunk.kind, trunk.rows) == ("trunk", 2)
    assert step.inputs == (STATES, *whole.inputs[1:])
    assert step.outputs == whole.outputs
    assert step.whole == whole


def test_both_parts_of_a_cut_encoder_take_the_mask() -> None:
    trunk, step = make_contract(readout="pooled", positions=0, width=12, shared_rows=True).divided((STATES,))
    assert [spec.name for spec in trunk.inputs] == ["tokens", "attention_mask"]
    assert [spec.name for spec in step.inputs][:2] == ["trunk.0", "attention_mask"]


def test_only_a_stack_program_of_free_rows_can_score() -> None:
    assert make_contract().can_score
    assert not make_contract(shared_rows=True).can_score
    assert not make_contract(kind="tangent", copies=1, queries=3).can_score
    trunk, step = make_contract(copies=1).divided((STATES,))
    assert not trunk.can_score and not step.can_score


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared_rows": True},
        {"copies": 1, "cut": (STATES,)},
        {"kind": "trunk", "copies": 1, "cut": (STATES,)},
        {"kind": "tangent", "copies": 1, "queries": 3},
        {"readout": "verbalizer", "label_tokens": (5, 9)},
        {"readout": "pooled", "positions": 0, "width": 3},
    ],
    ids=["logprobs", "shared rows", "cut", "trunk", "tangent", "verbalizer", "pooled"],
)
def test_round_trip_through_json(changes: dict[str, Any]) -> None:
    contract = make_contract(**changes)
    assert Contract.from_json(json.loads(json.dumps(contract.to_json()))) == contract


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"copies": 0}, "copies is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"vocabulary_size": 0}, "vocabulary_size is 0"),
        ({"kind": "circle"}, "kind is 'circle'"),
        ({"kind": "tangent", "copies": 1}, "queries is 0"),
        ({"kind": "tangent", "copies": 4, "queries": 2}, "copies is 4"),
        ({"queries": 2}, "queries is 2"),
        ({"kind": "tangent", "copies": 1, "queries": 2, "shared_rows": True}, "shared_rows is true"),
        ({"kind": "trunk", "copies": 1}, "cut is empty"),
        ({"cut": (TensorSpec("trunk.0", "float32", (3, 16)),)}, "must be float32 of 2 rows"),
        ({"cut": (TensorSpec("trunk.0", "int64", (2, 16)),)}, "trunk.0 is int64"),
        ({"readout": "logits"}, "readout is 'logits'"),
        ({"readout": "pooled", "width": 0}, "width is 0"),
        ({"positions": 0}, "positions is 0"),
        ({"readout": "verbalizer"}, "label_tokens is empty"),
        ({"modules": ()}, "modules is empty"),
    ],
)
def test_impossible_contract_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BundleError, match=named):
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
        ({"cut": (TensorSpec("trunk.0", "float32", (2, -5)),)}, r"trunk.0 has shape \[2, -5\]"),
        ({"cut": (TensorSpec("trunk.0", "float32", (2, 10**12)),)}, "trunk.0's shape is 1000000000000"),
    ],
)
def test_sizes_of_no_program_are_refused_before_anything_is_allocated(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(BundleError, match=named):
        Contract.from_json(asdict(make_contract()) | {name: _json(value) for name, value in changes.items()})


def _json(value: Any) -> Any:
    return [asdict(each) for each in value] if isinstance(value, tuple) else value


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(BundleError) as caught:
        make_contract(copies=0, batch_size=0, modules=())
    assert all(word in str(caught.value) for word in ("copies", "batch_size", "modules"))


@pytest.mark.parametrize("key", ["kind", "copies", "label_tokens", "modules"])
def test_missing_key_is_refused(key: str) -> None:
    block = make_contract().to_json()
    del block[key]
    with pytest.raises(BundleError, match=key):
        Contract.from_json(block)


@pytest.mark.parametrize(
    ("key", "value"),
    [("copies", "many"), ("modules", 3), ("modules", [{"name": "q"}]), ("label_tokens", None), ("width", [])],
)
def test_value_of_another_type_is_refused(key: str, value: Any) -> None:
    with pytest.raises(BundleError, match="can't be read"):
        Contract.from_json({**make_contract().to_json(), key: value})


def test_a_block_of_an_older_version_has_no_cut() -> None:
    block = make_contract().to_json()
    del block["shared_rows"], block["cut"]
    assert Contract.from_json(block) == make_contract()


def test_block_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(BundleError, match="can't be read"):
        Contract.from_json([1, 2])  # type: ignore[arg-type]


def test_input_name_of_a_module() -> None:
    assert AdaptedModule("a.b", 1, 2, 3).input_name == "lora_b.a.b"
