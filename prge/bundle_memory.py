"""Memory of a run, from what a bundle's manifest says of its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prge.bundle import SCORE_METHOD, STEP_METHOD, TRUNK_METHOD, UPPER_METHOD
from prge.contract import Contract
from prge.costs import RUNTIME_BYTES, run_memory

_OF_STEPS = (STEP_METHOD, UPPER_METHOD, TRUNK_METHOD)


def memory_of_steps(manifest: Mapping[str, Any], contract: Contract) -> dict[str, dict[str, Any]]:
    """Bytes while the program for steps is loaded; see `memory_estimate`."""
    return memory_estimate(contract, _lowering_of_steps(manifest), _workspace(manifest, _OF_STEPS))


def memory_of_scoring(manifest: Mapping[str, Any], contract: Contract) -> dict[str, dict[str, Any]]:
    """Bytes while a program for scoring is loaded; see `memory_estimate`."""
    return memory_estimate(
        contract, _mapping(manifest.get("score_lowering")), _workspace(manifest, [SCORE_METHOD])
    )


def memory_estimate(
    contract: Contract, lowering: Mapping[str, Any], workspace: object = None
) -> dict[str, dict[str, Any]]:
    """Bytes that a run needs while one method is loaded, by engine and cause; null is what isn't known.

    Args:
        contract: of the method.
        lowering: its block of the manifest.
        workspace: what the export measured of XNNPACK's workspace.
    """
    weights, planned = lowering.get("constant_bytes"), lowering.get("planned_memory_bytes")
    return {
        engine: run_memory(contract, engine, _number(weights), _number(planned), _number(workspace)).to_json()
        for engine in RUNTIME_BYTES
    }


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _workspace(manifest: Mapping[str, Any], methods: Sequence[str]) -> int | None:
    """The larger of what an export measured for some methods, which share it; None if it didn't."""
    measured = _mapping(_mapping(manifest.get("verification")).get("workspace_bytes"))
    peaks = [measured[method] for method in methods if isinstance(measured.get(method), int)]
    return max(peaks, default=None)


def _lowering_of_steps(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Of all that is loaded for steps: a trunk has an arena beside the one of the step above it."""
    lowering, trunk = (_mapping(manifest.get(name)) for name in ("lowering", "trunk_lowering"))
    planned = [block.get("planned_memory_bytes") for block in (lowering, trunk)]
    if all(isinstance(count, int) for count in planned):
        lowering["planned_memory_bytes"] = sum(planned)
    return lowering


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
