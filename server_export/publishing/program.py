"""Manifests of published programs, and comparisons of their outputs with the model's.

In float32, the adapter is merged into the weights. With quantized weights, the adapter is a constant of its
own: quantizing merged weights would round weights that the adapter was not trained with.
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
# Format of the manifest of a program; manifests of bundles have another number.
_FORMAT = 1
# Largest allowed difference of float32 outputs, in units of their standard deviation or 1. Tiny models of 12
# architectures and stories260K differ by less than 1e-5.
FLOAT_TOLERANCE = 1e-4
# Largest allowed differences of a quantized program's outputs: from the quantized model's, relative to the
# effect of rounding activations; and from the float model's, relative to the effect of quantization. Tiny
# models differ by less than 1e-4 of the first and by 1 of the second. In deeper models, differences in last
# bits flip codes, until rounding errors are independent and differ by sqrt(2) of their size: babyllama
# differs by 0.54 and 0.85 in int8, by 1.22 and 0.98 in int4.
FLIPPED, CHANGED = 2.0, 1.5


@dataclass(frozen=True)
class BuiltProgram:
    """A program whose outputs were compared with the model's.

    Attributes:
        program_type: `inference` or `llm`.
        facts: further entries of the manifest.
        quantization: quantization of the weights.
        checks: differences and tolerances.
    """

    program_type: str
    facts: Mapping[str, Any]
    quantization: QuantizationReport
    checks: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the program's part of the manifest."""
        return {
            "format": _FORMAT,
            "type": self.program_type,
            **self.facts,
            "quantization": self.quantization.to_json(),
            "verification": {**self.checks, "rows": ROWS},
        }


def check_exact(name: str, outputs: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Compare float32 outputs, and return the largest difference and the tolerance for the manifest.

    Args:
        name: what computed the outputs, for the error message.
        outputs: the outputs.
        expected: the expected outputs.

    Raises:
        BundleError: the difference exceeds the tolerance, or an output isn't finite.
    """
    difference = float((outputs - expected).abs().max())
    tolerance = FLOAT_TOLERANCE * max(1.0, float(expected.std()))
    if not difference <= tolerance:
        raise BundleError(
            f"Outputs of the {name} differ from the expected ones by {difference:.3g}; {tolerance:.3g} is "
            "allowed.",
            remedy="Please report the problem with the name of the model.",
            code="differs-from-model",
        )
    return {"max_absolute_difference": difference, "tolerance": tolerance}


def check_quantized(
    outputs: torch.Tensor, expected: torch.Tensor, unrounded: torch.Tensor, exact: torch.Tensor
) -> dict[str, float]:
    """Compare outputs of a quantized program, and return differences and tolerances for the manifest.

    Differences are root mean squares in units of the outputs' standard deviation. The largest difference
    would mean little: engine and eager model round activations, where a difference in the last bit flips a
    code.

    Args:
        outputs: outputs of the program in the engine, with rows as the first dimension.
        expected: outputs of the quantized model in eager mode.
        unrounded: outputs of the quantized model without rounding of activations.
        exact: outputs of the model before quantization.

    Raises:
        BundleError: a difference exceeds its tolerance, or an output isn't finite.
    """
    unit = exact.std().clamp_min(FLOAT_TOLERANCE)

    def difference(left: torch.Tensor, right: torch.Tensor) -> float:
        return float((left - right).square().mean().sqrt() / unit)

    checks: dict[str, float] = {}
    for name, other, allowed in (
        ("quantized", expected, FLIPPED * difference(expected, unrounded)),
        ("float", exact, CHANGED * difference(expected, exact)),
    ):
        distance, allowed = difference(outputs, other), allowed + FLOAT_TOLERANCE
        if not distance <= allowed:
            raise BundleError(
                f"The program's outputs differ from the {name} model's by {distance:.3g} of a standard "
                f"deviation; {allowed:.3g} is allowed.",
                remedy="Publish it with --quantize fp32, or report the problem with the name of the model.",
                code=f"differs-from-{name}-model",
            )
        checks |= {f"{name}_difference": distance, f"{name}_tolerance": allowed}
    return checks
