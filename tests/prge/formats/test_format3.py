"""Bundles of format 3 open: their manifest's chain is translated to the current names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prge.errors import BundleError
from prge.formats.chain import Chain
from prge.formats.format3 import ROLES, chain_of_format_3, port_of_format_3
from prge.formats.signatures import ALL_ROLES, BACKWARD, BACKWARD_SAVED, FORWARD, JVP

# The chain of a tiny Llama's bundle with all roles, rows in chunks, and int8 layers.
OLD = json.loads(Path(__file__).with_name("chain_of_format_3.json").read_text(encoding="utf-8"))


def test_every_role_has_a_current_name() -> None:
    assert sorted(ROLES.values()) == sorted(ALL_ROLES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("state", "hidden_states"),
        ("d_state", "tangent_hidden_states"),
        ("slope", "grad_hidden_states"),
        ("slope_keys", "grad_keys"),
        ("d_past_values", "tangent_past_values"),
        ("slope_carried.1", "grad_recurrent_state.1"),
        ("saved.12", "residual.12"),
        ("gradient.3", "grad_lora_b.3"),
        ("gradient_a.3", "grad_lora_a.3"),
        ("u_a.0", "u_a.0"),
        ("lora_b.0", "lora_b.0"),
        ("seen", "past_mask"),
        ("causal", "causal_mask"),
    ],
)
def test_names_of_ports(old: str, new: str) -> None:
    assert port_of_format_3(old) == new


def test_a_chain_of_format_3_is_read_with_the_names_of_its_programs_methods() -> None:
    chain = Chain.from_json(chain_of_format_3(OLD))
    assert {FORWARD, JVP, BACKWARD} < set(chain.roles)
    block, head = chain.programs[1], chain.programs[-1]
    assert [block.method_name(role) for role in (FORWARD, JVP, BACKWARD)] == ["stack", "tangent", "back"]
    assert "grad_hidden_states" in block.methods[BACKWARD].inputs
    assert "grad_parts" in head.methods[BACKWARD].inputs
    assert head.methods[BACKWARD].outputs == ("grad_hidden_states",)
    assert any(name.startswith("residual.") for name in block.methods[BACKWARD_SAVED].inputs)
    assert all(method.has_specs for program in chain.programs for method in program.methods.values())


@pytest.mark.parametrize("damaged", [None, [], {}, {"kinds": 3}, {"kinds": [3], "blocks": []}])
def test_an_invalid_chain_is_refused(damaged: Any) -> None:
    with pytest.raises(BundleError):
        Chain.from_json(chain_of_format_3(damaged))
