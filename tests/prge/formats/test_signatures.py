"""Signatures follow from a block's ports and a role: names, shapes, and which values have derivatives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prge.formats.signatures import (
    ALL_ROLES,
    BACKWARD,
    BACKWARD_SAVED,
    CHUNK_ROLE,
    DECODE,
    FORWARD,
    FORWARD_SAVE,
    JVP,
    PREFILL,
    PREFILL_BACKWARD,
    PREFILL_JVP,
    RESIDUAL_ROLES,
    ROLE_OF,
    STEP_ROLES,
    BlockPorts,
    Derivative,
    Part,
    Port,
    View,
    signature,
)

SIZES = {"copies": 3, "batch": 2, "queries": 5, "tokens": 7, "entering": 11, "leaving": 13}
SIZES |= {"rank": 4, "in": 11, "out": 6, "sequences": 2, "states": 9, "words": 30}
SIZES |= {"heads": 2, "key": 8, "value": 9, "members": 3, "past": 17, "high": 5, "wide": 4}
SIZES |= {"residual": 20, "shared_in": 21, "shared_out": 22}

# Shared values that a block uses, including keys and values of its attention.
SHARED = [((), ()), ((True,), ()), ((False, False), (0, 1)), ((True, False, True), (0, 2))]
BLOCKS = st.builds(
    lambda shared, **ports: BlockPorts(shared_in=shared[0], past=shared[1], **ports),
    st.sampled_from(SHARED),
    modules=st.integers(0, 2),
    trains_a=st.booleans(),
    is_first=st.booleans(),
    attends=st.booleans(),
    shared_out=st.integers(0, 2),
    recurrent_states=st.integers(0, 2),
    residuals=st.integers(0, 2),
)


@given(BLOCKS, st.sampled_from(ALL_ROLES))
def test_every_port_has_a_unique_name_and_a_shape(block: BlockPorts, role: str) -> None:
    result = signature(block, ROLE_OF[role])
    for ports in (result.inputs, result.outputs):
        assert len({port.name for port in ports}) == len(ports)
        assert all(number > 0 for port in ports for number in port.shape(SIZES))
        assert {port.name for port in ports if port.dtype == "int64"} <= {"tokens", "targets"}


@given(BLOCKS, st.sampled_from([View.BATCH, View.CHUNK]))
def test_differentiable_values_have_a_tangent_in_jvp_and_a_gradient_in_backward(
    block: BlockPorts, view: View
) -> None:
    """The derivatives of consecutive blocks therefore fit each other."""
    by_derivative = {
        role.derivative: signature(block, role) for role in ROLE_OF.values() if role.view is view
    }
    forward, reverse = by_derivative[Derivative.JVP], by_derivative[Derivative.BACKWARD]
    values = {port for port in forward.inputs if port.part is Part.VALUE and port.is_differentiable}
    tangents = {
        Port(port.value, port.index) for port in forward.inputs if port.part in (Part.TANGENT, Part.U)
    }
    gradients = {Port(port.value, port.index) for port in reverse.outputs}
    assert tangents == gradients == values
    answers = [Port(port.value, port.index) for port in by_derivative[Derivative.VALUE].outputs]
    assert [Port(p.value, p.index) for p in forward.outputs if p.part is Part.TANGENT] == answers
    assert [Port(p.value, p.index) for p in reverse.inputs if p.part is Part.GRADIENT] == answers


@pytest.mark.parametrize(
    ("role", "inputs", "outputs"),
    [
        (FORWARD, {"hidden_states": (3, 2, 7, 11), "lora_b.0": (3, 4, 6)}, {"hidden_states": (6, 7, 13)}),
        (
            JVP,
            {"tangent_hidden_states": (5, 2, 7, 11), "lora_b.0": (4, 6), "u.0": (5, 2, 4), "v.0": (5, 2, 6)},
            {"hidden_states": (2, 7, 13), "tangent_hidden_states": (5, 2, 7, 13)},
        ),
        (
            BACKWARD,
            {"grad_hidden_states": (2, 7, 13), "lora_b.0": (2, 4, 6)},
            {"grad_hidden_states": (2, 7, 11), "grad_lora_b.0": (2, 4, 6)},
        ),
        (
            FORWARD_SAVE,
            {"hidden_states": (2, 7, 11)},
            {"hidden_states": (2, 7, 13), "residual.0": (2, 7, 20)},
        ),
        (
            BACKWARD_SAVED,
            {"residual.0": (2, 7, 20)},
            {"grad_hidden_states": (2, 7, 11), "grad_lora_b.0": (2, 4, 6)},
        ),
        (
            PREFILL,
            {"past_keys": (2, 17, 8), "past_mask": (21, 17), "causal_mask": (21, 7), "lora_a.0": (1, 4, 11)},
            {"hidden_states": (1, 7, 13), "keys": (2, 7, 8), "values": (2, 7, 9)},
        ),
        (
            DECODE,
            {
                "past_values": (4, 17, 9),
                "past_mask": (4, 1, 17),
                "own_mask": (1, 1, 17),
                "lora_a.0": (2, 4, 11),
            },
            {"hidden_states": (2, 1, 13), "keys": (4, 1, 8), "values": (4, 1, 9)},
        ),
        (
            PREFILL_JVP,
            {
                "tangent_past_keys": (5, 2, 17, 8),
                "lora_b.0": (4, 6),
                "u.0": (5, 1, 4),
                "past_ones": (1, 17, 1),
            },
            {
                "hidden_states": (1, 7, 13),
                "tangent_hidden_states": (5, 1, 7, 13),
                "tangent_keys": (5, 2, 7, 8),
                "values": (2, 7, 9),
            },
        ),
        (
            PREFILL_BACKWARD,
            {"grad_keys": (2, 7, 8), "grad_values": (2, 7, 9)},
            {"grad_hidden_states": (1, 7, 11), "grad_past_keys": (2, 17, 8), "grad_lora_b.0": (1, 4, 6)},
        ),
    ],
)
def test_the_roles_of_a_block_with_attention_and_one_adapted_layer(
    role: str, inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]]
) -> None:
    result = signature(BlockPorts(modules=1, attends=True, residuals=1), ROLE_OF[role])
    for name, shape in inputs.items():
        assert result.port(name).shape(SIZES) == shape
    for name, shape in outputs.items():
        assert result.port(name, is_output=True).shape(SIZES) == shape


@pytest.mark.parametrize("role", ALL_ROLES)
def test_only_differentiable_shared_values_have_derivatives(role: str) -> None:
    is_backward, is_jvp = ROLE_OF[role].derivative.is_backward, role in (JVP, PREFILL_JVP)
    result = signature(
        BlockPorts(attends=True, shared_in=(False, True, True), shared_out=1, past=(1, 2)), ROLE_OF[role]
    )
    assert {"shared_in.0", "shared_in.1", "shared_in.2"} < result.required_inputs
    assert ("shared_out.0" in result.output_names) == (not is_backward)
    assert (
        "tangent_shared_in.1" in result.required_inputs,
        "tangent_shared_out.0" in result.output_names,
    ) == (
        is_jvp,
        is_jvp,
    )
    assert ("grad_shared_out.0" in result.required_inputs, "grad_shared_in.2" in result.output_names) == (
        is_backward,
        is_backward,
    )
    assert not {"tangent_shared_in.0", "grad_shared_in.0", "grad_keys", "keys"} & {
        *result.required_inputs,
        *result.output_names,
    }


def test_a_past_that_adapters_do_not_affect_has_no_derivative() -> None:
    block = BlockPorts(attends=True, shared_in=(False, False), past=(0, 1))
    jvp, backward = (signature(block, ROLE_OF[role]) for role in (PREFILL_JVP, PREFILL_BACKWARD))
    assert "past_keys" in jvp.required_inputs & backward.required_inputs
    assert not {"tangent_past_keys", "grad_past_keys"} & {*jvp.required_inputs, *backward.output_names}


def test_adapter_inputs_are_optional() -> None:
    backward = signature(BlockPorts(modules=2), ROLE_OF[BACKWARD])
    assert backward.required_inputs == {
        "hidden_states",
        "grad_hidden_states",
    } and backward.allowed_inputs >= {
        "lora_b.0",
        "lora_b.1",
        "padding_mask",
    }
    assert backward.output_names == ["grad_hidden_states", "grad_lora_b.0", "grad_lora_b.1"]


def test_lora_a_is_an_input_if_it_is_trained_and_in_text_generation() -> None:
    for role in ALL_ROLES:
        has_a = "lora_a.0" in signature(BlockPorts(modules=1), ROLE_OF[role]).allowed_inputs
        assert has_a == (role in (PREFILL, DECODE))
    result = signature(BlockPorts(modules=1, trains_a=True), ROLE_OF[BACKWARD_SAVED])
    assert result.output_names == ["grad_hidden_states", "grad_lora_a.0", "grad_lora_b.0"]


def test_the_backward_pass_takes_the_residuals_of_a_forward_pass() -> None:
    save, backward = (signature(BlockPorts(residuals=2), ROLE_OF[role]) for role in RESIDUAL_ROLES)
    assert save.output_names == [
        "hidden_states",
        "residual.0",
        "residual.1",
    ] and backward.required_inputs >= {
        "residual.0",
        "residual.1",
    }
    assert save.port("residual.1", is_output=True).sizes == backward.port("residual.1").sizes


def test_only_a_block_with_attention_has_a_past() -> None:
    assert "past_keys" not in signature(BlockPorts(), ROLE_OF[DECODE]).allowed_inputs
    assert signature(BlockPorts(attends=True), ROLE_OF[FORWARD]) == signature(BlockPorts(), ROLE_OF[FORWARD])


def test_a_head_returns_parts_or_logits_and_has_no_chunk_roles() -> None:
    head = BlockPorts(is_head=True, residuals=1)
    answers = [signature(head, ROLE_OF[role]).output_names for role in (*STEP_ROLES, FORWARD_SAVE, DECODE)]
    assert answers == [
        ["parts"],
        ["parts", "tangent_parts"],
        ["grad_hidden_states"],
        ["parts", "residual.0"],
        ["logits"],
    ]
    assert not any(signature(head, ROLE_OF[role]).inputs for role in CHUNK_ROLE.values())
    assert signature(head, ROLE_OF[BACKWARD]).port("grad_parts").shape(SIZES) == (1, 9, 2)
