"""Translation of the manifest of bundles of format 3, which development versions after 0.2.0 wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMAT_3 = 3
# Current role names by the names of format 3, which the methods of its programs still have.
ROLES: Mapping[str, str] = {
    "stack": "forward",
    "tangent": "jvp",
    "back": "backward",
    "save": "forward_save",
    "back_saved": "backward_saved",
    "prefill": "prefill",
    "decode": "decode",
    "prefill_tangent": "prefill_jvp",
    "prefill_back": "prefill_backward",
}
_VALUES: Mapping[str, str] = {
    "state": "hidden_states",
    "taken": "shared_in",
    "given": "shared_out",
    "carried": "recurrent_state",
    "saved": "residual",
    "padding": "padding_mask",
    "seen": "past_mask",
    "causal": "causal_mask",
    "own": "own_mask",
}
_GRADIENTS: Mapping[str, str] = {
    "slope": "grad_hidden_states",
    "gradient": "grad_lora_b",
    "gradient_a": "grad_lora_a",
}
_PREFIXES: Mapping[str, str] = {"d_": "tangent_", "slope_": "grad_"}


def chain_of_format_3(chain: Any) -> Any:
    """Return a manifest's `chain` block in the current format; an invalid block stays as it is."""
    try:
        return {
            **{name: value for name, value in chain.items() if name != "kinds"},
            "programs": [_program(block_type) for block_type in chain["kinds"]],
            "blocks": [
                _renamed(block, {"kind": "program", "takes": "shared_in"}) for block in chain["blocks"]
            ],
            "tables": [_renamed(table, {"kind": "type"}) for table in chain["tables"]],
            "bounds": _renamed(chain["bounds"], {"piece": "chunk"}),
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return chain  # Chain.from_json reports what is wrong


def _program(block_type: Mapping[str, Any]) -> dict[str, Any]:
    methods = {ROLES.get(role, role): _method(role, method) for role, method in block_type["methods"].items()}
    return _renamed({**block_type, "methods": methods}, {"program": "file"})


def _method(role: str, method: Mapping[str, Any]) -> dict[str, Any]:
    is_head = "targets" in method["inputs"]
    inputs = [
        "grad_parts" if is_head and name == "slope" else port_of_format_3(name) for name in method["inputs"]
    ]
    return {
        **method,
        "method": role,
        "inputs": inputs,
        "outputs": [*map(port_of_format_3, method["outputs"])],
    }


def port_of_format_3(name: str) -> str:
    """Return the current name of an input or output of a method."""
    stem, dot, index = name.partition(".")
    if stem in _GRADIENTS:
        return f"{_GRADIENTS[stem]}{dot}{index}"
    prefix = next((prefix for prefix in _PREFIXES if stem.startswith(prefix)), "")
    value = stem.removeprefix(prefix)
    return f"{_PREFIXES.get(prefix, '')}{_VALUES.get(value, value)}{dot}{index}"


def _renamed(block: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in block.items()}
