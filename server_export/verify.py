"""The `.pte` in the engine against the eager module on the same random inputs, at every export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from prge.errors import BundleError
from server_export.program import BuiltProgram, example_inputs
from server_export.quiet import quiet_engine

# Of log-probabilities and pooled states. Models of 12 architectures differ by 1e-7 to 2e-5.
FP32_TOLERANCE = 1e-4
# Times the largest change of an answer that quantization itself makes. Engine and eager model round the same
# activations to int8, and a last bit of difference before the rounding flips a code; such flips measured 0.1
# to 0.6 of that change. A layer that is computed wrongly moves answers by many times as much.
QUANTIZED_TOLERANCE = 1.0


@dataclass(frozen=True)
class Verification:
    """Largest difference between engine and eager model over all rows, and what is allowed."""

    max_absolute_difference: float
    tolerance: float
    rows: int

    def to_json(self) -> dict[str, Any]:
        """The manifest's `verification` block."""
        return asdict(self)


def run_program(path: Path, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """First output of a `.pte` in the stock engine.

    Raises:
        BundleError: the engine refuses the program or the inputs.
    """
    from executorch.extension.pybindings import _C

    try:
        with quiet_engine():
            program = _C._load_program(str(path), program_verification=_C.Verification.InternalConsistency)
            method = program.load_method("forward")
            output: torch.Tensor = method.call([tensor.contiguous() for tensor in inputs])[0]
    except RuntimeError as error:
        raise BundleError(
            f"the engine refuses the program that was just lowered: {error}",
            remedy="please report it with the name of the model",
        ) from None
    return output


def verify(path: Path, built: BuiltProgram) -> Verification:
    """Compare the program in the engine with the module that it was lowered from.

    Raises:
        BundleError: they differ by more than the tolerance, an answer isn't finite, or the copies' `lora_b`
            make no difference.
    """
    contract = built.contract
    inputs = example_inputs(contract)
    with torch.no_grad():
        expected = built.module(*inputs)
    actual = run_program(path, inputs)
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
        raise BundleError(
            f"the lowered program answers {tuple(actual.shape)} with numbers that aren't finite, "
            f"or another shape than {tuple(expected.shape)}",
            remedy="export it with --quantize fp32, and please report it",
        )
    difference = float((actual - expected).abs().max())
    tolerance = FP32_TOLERANCE
    if built.float_answers is not None:
        tolerance += QUANTIZED_TOLERANCE * float((built.float_answers - expected).abs().max())
    if difference > tolerance:
        raise BundleError(
            f"the lowered program differs from the model by {difference:.3g}, "
            f"{built.quantization.scheme} allows {tolerance:.3g}",
            remedy="export it with --quantize fp32, and please report it",
        )
    _check_copies(path, contract, inputs)
    return Verification(difference, tolerance, contract.rows)


def _check_copies(path: Path, contract: Any, inputs: Sequence[torch.Tensor]) -> None:
    """Same rows in every copy: answers must differ between copies through `lora_b` alone."""
    if contract.copies == 1:
        return
    same = [
        value if spec.name.startswith("lora_b.") else value[: contract.batch_size].repeat(contract.copies, 1)
        for spec, value in zip(contract.inputs, inputs, strict=True)
    ]
    answers = run_program(path, same).reshape(contract.copies, -1)
    dead = [copy for copy in range(1, contract.copies) if torch.equal(answers[copy], answers[0])]
    if dead:
        raise BundleError(
            f"the copies {dead} of the lowered program answer what copy 0 answers though their lora_b differ",
            remedy="choose target modules that the answer depends on",
        )
