"""What programs of trained models share: the adapter on quantized layers, and a check against the model.

In float32 the adapter is merged into the weights. On quantized weights it stays beside them as a constant:
merging first and quantizing then would round weights that the adapter was not trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from prge.errors import BundleError
from prge.formats.peft import PeftAdapter
from server_export.adapter.layers import convert_conv1d, replace_module
from server_export.quantize.quantization import (
    NO_LAYERS,
    BundleLayers,
    QuantizationReport,
    dequantize,
    quantize,
)

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


class FixedLoraLinear(nn.Module):
    """A frozen linear layer with one adapter that no longer changes; `lora_a` carries alpha / rank."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __init__(self, base: nn.Module, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("lora_a", lora_a)
        self.register_buffer("lora_b", lora_b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def attach_fixed(model: nn.Module, adapter: PeftAdapter) -> None:
    """Put a trained adapter beside the layers that it names."""
    convert_conv1d(model)
    for name in adapter.lora_a:
        lora_a = torch.from_numpy(adapter.lora_a[name]) * adapter.scale_of(name)
        lora_b = torch.from_numpy(adapter.lora_b[name])
        replace_module(model, name, FixedLoraLinear(model.get_submodule(name), lora_a, lora_b))


def quantized_and_checked(
    module: nn.Module,
    scheme: str,
    reference: torch.Tensor,
    eager: Callable[[], torch.Tensor],
    lower: Callable[[], torch.Tensor],
    layers: BundleLayers = NO_LAYERS,
) -> tuple[QuantizationReport, dict[str, float]]:
    """Quantize a module in place, lower it, and compare model, module and program; returns what was found.

    Args:
        module: of a model.
        scheme: quantization of the frozen weights.
        reference: what the untouched model answers to some rows, a row first.
        eager: what the module answers to them as it is then.
        lower: writes the program; returns what it answers to them in the engine.
        layers: as the bundle has them that the adapter was trained with.

    Raises:
        BundleError: they differ by more than is allowed.
    """
    exact = eager()
    check_exact("module", exact, reference)
    quantization = quantize(module, scheme, layers)
    expected = eager()
    answers = lower()
    if scheme == "fp32":
        return quantization, check_exact("program", answers, expected)
    dequantize(module)
    return quantization, check_quantized(answers, expected, eager(), exact)


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
            )
        checks |= {f"{name}_difference": found, f"{name}_tolerance": allowed}
    return checks
