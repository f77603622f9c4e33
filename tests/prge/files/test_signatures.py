"""The table of roles: every word of it is read, and it says the shapes that a call has."""

from __future__ import annotations

import pytest

from prge.files import signatures
from prge.files.signatures import (
    ALL_ROLES,
    BACK,
    BACK_SAVED,
    DECODE,
    OF_BACK,
    PREFILL,
    PREFILL_BACK,
    PREFILL_TANGENT,
    ROLES,
    SAVE,
    STACK,
    STEP_ROLES,
    TANGENT,
    Sharing,
    of_block,
    of_head,
)  # fmt: skip

SIZES = {"copies": 3, "batch": 2, "queries": 5, "tokens": 7, "entering": 11, "leaving": 13}
SIZES |= {
    "rank": 4,
    "in": 11,
    "out": 6,
    "sequences": 2,
    "heads": 2,
    "key": 8,
    "value": 9,
    "members": 3,
    "past": 17,
    "saved": 20,
    "taken": 21,
    "given": 22,
}


@pytest.mark.parametrize("name", ["_BLOCK", "_ATTENTION", "_TAKEN", "_GIVEN", "_TOKENS", "_HEAD"])
def test_every_word_of_the_table_is_a_tensor(name: str) -> None:
    for text in getattr(signatures, name).values():
        rest = signatures._TENSOR.sub("", text).replace("->", "")
        assert not rest.split(), f"{text!r} has {rest.split()}"


@pytest.mark.parametrize("role", [*ROLES, *OF_BACK])
@pytest.mark.parametrize("is_first", [False, True])
def test_every_role_has_shapes_of_numbers(role: str, is_first: bool) -> None:
    signature = of_block(role, is_first, attends=not is_first, saved=2)
    for tensor in (*signature.inputs, *signature.outputs):
        assert all(number > 0 for number in tensor.shape(SIZES))
    assert ("tokens" in signature.needed(0)) == is_first != ("state" in signature.needed(0))


@pytest.mark.parametrize("role", ALL_ROLES)
def test_of_what_a_block_takes_only_values_that_change_have_derivatives(role: str) -> None:
    is_back, is_tangent = role in (BACK, BACK_SAVED, PREFILL_BACK), role in (TANGENT, PREFILL_TANGENT)
    sharing = Sharing(takes=(False, True, True), gives=1, past=(1, 2))
    signature = of_block(role, attends=True, sharing=sharing)
    asked, answered = signature.needed(0), signature.answers(0)
    assert {"taken.0", "taken.1", "taken.2"} < asked
    assert ("given.0" in answered) == (not is_back)
    assert ("d_taken.1" in asked, "d_given.0" in answered) == (is_tangent, is_tangent)
    assert ("slope_given.0" in asked, "slope_taken.2" in answered) == (is_back, is_back)
    assert not {"d_taken.0", "slope_taken.0", "slope_keys"} & {*asked, *answered}
    assert "keys" not in answered
    for tensor in (*signature.inputs, *signature.outputs):
        assert all(number > 0 for number in tensor.shape(SIZES))


def test_a_past_that_doesnt_change_has_no_derivative() -> None:
    sharing = Sharing(takes=(False, False), past=(0, 1))
    tangent, back = (
        of_block(role, attends=True, sharing=sharing) for role in (PREFILL_TANGENT, PREFILL_BACK)
    )
    assert "past_keys" in tangent.needed(0) & back.needed(0)
    assert not {"d_past_keys", "slope_past_keys"} & {*tangent.needed(0), *back.answers(0)}


def test_copies_and_rows_leave_a_stack_together() -> None:
    stack = of_block(STACK)
    assert stack.tensor("state").shape(SIZES) == (3, 2, 7, 11)
    assert stack.tensor("state", is_output=True).shape(SIZES) == (6, 7, 13)
    assert stack.tensor("lora_b.1").shape(SIZES) == (3, 4, 6)


def test_an_adapter_has_a_tensor_for_each_of_its_modules() -> None:
    back = of_block(BACK)
    assert back.needed(2) == {"state", "slope"} and back.allowed(2) >= {"lora_b.0", "lora_b.1", "padding"}
    assert back.answers(2) == ["slope", "gradient.0", "gradient.1"]
    assert of_block(TANGENT).allowed(1) >= {"u.0", "v.0", "d_state"}


def test_the_way_back_takes_what_a_forward_pass_saves() -> None:
    save, back = (of_block(role, saved=2) for role in OF_BACK)
    assert save.answers(1) == ["state", "saved.0", "saved.1"] and back.needed(1) >= {"saved.0", "saved.1"}
    assert save.tensor("saved.1", is_output=True) == back.tensor("saved.1")
    assert back.tensor("saved.1").shape(SIZES) == (2, 7, 20)
    # But for these it is the way back.
    assert of_block(BACK_SAVED) == of_block(BACK) and of_block(BACK_SAVED).outputs == back.outputs
    assert of_head(SAVE, 1).answers(0) == ["parts", "saved.0"]
    assert "gradient_a.0" in of_block(BACK_SAVED, trains_a=True).answers(1)
    assert "lora_a.0" not in of_block(SAVE).allowed(1)


def test_who_looks_at_the_tokens_before_has_a_past() -> None:
    assert "past_keys" not in of_block(DECODE).allowed(1)
    assert of_block(PREFILL, attends=True).answers(0) == ["state", "keys", "values"]
    assert of_block(PREFILL, attends=True).tensor("seen").shape(SIZES) == (21, 17)
    assert of_block(STACK, attends=True) == of_block(STACK)


def test_a_head_answers_parts_or_logits_and_never_goes_on_with_a_row() -> None:
    assert [of_head(role).answers(0) for role in STEP_ROLES] == [["parts"], ["parts", "d_parts"], ["slope"]]
    assert of_head(DECODE).answers(0) == ["logits"] and not of_head(PREFILL).inputs
