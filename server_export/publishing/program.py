"""What programs of trained models share: their manifest's facts, and checks against the model.

In float32 the adapter is merged into the weights. On quantized weights it stays beside them as a constant:
merging first and quantizing then would round weights that the adapter was not trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from prge.errors import BundleError
from server_export.quantize.quantization import QuantizationReport

PROGRAM, METHOD = "program.pte", "forward"
ROWS = 3
# Of a manifest that describes no bundle: those have another number.
_FORMAT = 1
# Of float32 answers, in units of their deviation or 1. Tiny models of 12 architectures and stories260K differ
# by less than 1e-5.
FLOAT_TOLERANCE = 1e-4
# Of a quantized program's answers: by how much of what rounding activations changes they may differ from the
# quantized model's, and by how much of what quantization changes from the float model's. Tiny models differ
# by less than 1e-4 of the first and by 1 of the second. In deeper ones last bits flip codes, until errors of
# rounding are independent and differ by sqrt(2) of their size: babyllama differs by 0.54 and 0.85 in int8, by
# 1.22 and 0.98 in int4.
FLIPPED, CHANGED = 2.0, 1.5


@dataclass(frozen=True)
class Built:
    """What is known of a program that was held against its model; `facts` are those of its kind."""

    kind: str
    facts: Mapping[str, Any]
    quantization: QuantizationReport
    checks: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Its part of the manifest."""
        return {
            "format": _FORMAT,
            "kind": self.kind,
            **self.facts,
            "quantization": self.quantization.to_json(),
            "verification": {**self.checks, "rows": ROWS},
        }


def check_exact(name: str, answers: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Largest difference of float32 answers, and what is allowed, as the manifest has them.

    Raises:
        BundleError: they differ by more, or aren't finite.
    """
    difference = float((answers - expected).abs().max())
    tolerance = FLOAT_TOLERANCE * max(1.0, float(expected.std()))
    if not difference <= tolerance:
        raise BundleError(
            f"the {name} and what it was made of differ by {difference:.3g}, allowed is {tolerance:.3g}",
            remedy="report it with the name of the model",
            code="differs-from-model",
        )
    return {"max_absolute_difference": difference, "tolerance": tolerance}


def check_quantized(
    answers: torch.Tensor, expected: torch.Tensor, smooth: torch.Tensor, exact: torch.Tensor
) -> dict[str, float]:
    """Differences of a quantized program's answers, and what is allowed, as the manifest has them.

    All are root mean squares in units of the answers' deviation: engine and eager model round the same
    activations, so that a last bit that differs may flip a code, and the largest difference says little.

    Args:
        answers: of the program in the engine, a row first.
        expected: of the quantized model in eager mode.
        smooth: of the same without rounding of activations.
        exact: of the model before it was quantized.

    Raises:
        BundleError: they differ by more, or aren't finite.
    """
    unit = exact.std().clamp_min(FLOAT_TOLERANCE)

    def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours - theirs).square().mean().sqrt() / unit)

    checks: dict[str, float] = {}
    for name, other, allowed in (
        ("quantized", expected, FLIPPED * difference(expected, smooth)),
        ("float", exact, CHANGED * difference(expected, exact)),
    ):
        found, allowed = difference(answers, other), allowed + FLOAT_TOLERANCE
        if not found <= allowed:
            raise BundleError(
                f"the program's answers differ from the {name} model's by {found:.3g} of a deviation, "
                f"allowed is {allowed:.3g}",
                remedy="publish it with --quantize fp32, or report it with the name of the model",
                code=f"differs-from-{name}-model",
            )
        checks |= {f"{name}_difference": found, f"{name}_tolerance": allowed}
    return checks
