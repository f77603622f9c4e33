"""The `.pte` in the engine against the eager module on the same random inputs, at every export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from prge.contract import LORA_B_PREFIX, Contract
from prge.errors import BundleError
from server_export.check.process_memory import anonymous_bytes
from server_export.lower.lifting import interpret
from server_export.model.program import STEP_METHOD, BuiltProgram, example_inputs
from server_export.model.reference import exact_answers
from server_export.quiet import quiet_engine

# Of log-probabilities and pooled states, and of derivatives as a part of the largest one. Models of 12
# architectures differ by 1e-7 to 2e-5.
FP32_TOLERANCE = 1e-4
# Times the largest change of an answer that quantization itself makes. Engine and eager model round the same
# activations to int8, and a last bit of difference before the rounding flips a code; such flips measured 0.1
# to 0.6 of that change. A layer that is computed wrongly moves answers by many times as much.
QUANTIZED_TOLERANCE = 1.0


Answers = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Verification:
    """Largest difference between engine and eager model over all rows, and what is allowed.

    Of tangents and gradients the differences are parts of the largest one; null in a program without any.

    `workspace_bytes` is by method what the engine took to run it once, besides the program and its packed
    weights: XNNPACK's workspace, and what else it wrote to. Empty where the system doesn't tell.
    """

    max_absolute_difference: float
    tolerance: float
    rows: int
    tangent_difference: float | None = None
    tangent_tolerance: float | None = None
    workspace_bytes: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The manifest's `verification` block."""
        return asdict(self)


def run_program(
    path: Path,
    inputs: Sequence[torch.Tensor],
    method: str = STEP_METHOD,
    workspaces: dict[str, int] | None = None,
) -> Answers:
    """Outputs of a `.pte` in the stock engine; `workspaces` gets the memory that the call took.

    Raises:
        BundleError: the engine refuses the program or the inputs.
    """
    call = loaded_method(path, method, inputs)
    before = None if workspaces is None else anonymous_bytes()
    answers = call()
    after = None if before is None else anonymous_bytes()
    if workspaces is not None and before is not None and after is not None:
        workspaces[method] = max(0, after - before)
    return answers


def loaded_method(path: Path, method: str, inputs: Sequence[torch.Tensor]) -> Callable[[], Answers]:
    """A method of a `.pte` in the stock engine, to be called with the same inputs again and again.

    Raises:
        BundleError: the engine refuses the program, or, when it is called, the inputs.
    """
    from executorch.extension.pybindings import _C

    arguments = [tensor.contiguous() for tensor in inputs]
    with _refused(), quiet_engine():
        program = _C._load_program(str(path), program_verification=_C.Verification.InternalConsistency)
        loaded = program.load_method(method)

    def call() -> Answers:
        with _refused():
            return tuple(loaded.call(arguments))

    return call


@contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise BundleError(
            f"the engine refuses the program that was just lowered: {error}",
            remedy="please report it with the name of the model",
        ) from None


def run_step(
    run: Callable[[Sequence[torch.Tensor], str], Answers],
    built: BuiltProgram,
    inputs: Sequence[torch.Tensor],
    method: str = "",
) -> Answers:
    """Outputs of a step before it was cut, for its inputs, by `run(inputs, method)`; a trunk goes first.

    `method` is one of `built.steps`, by default the longest.
    """
    method = method or built.step_method
    if not built.has_trunk:
        return run(inputs, method)
    crossing = run(inputs[: 2 if built.contract.is_encoder else 1], built.trunk_method(built.steps[method]))
    return run((*crossing, *inputs[1:]), method)


def lengthened(
    inputs: Sequence[torch.Tensor], contract: Contract, longest: Contract
) -> tuple[torch.Tensor, ...]:
    """Inputs of a program, padded to those of the same program for longer rows."""
    return tuple(
        torch.nn.functional.pad(value, (0, above.shape[-1] - below.shape[-1]))
        for value, below, above in zip(inputs, contract.inputs, longest.inputs, strict=True)
    )


def verify(
    path: Path, built: BuiltProgram, programs: Mapping[str, torch.export.ExportedProgram]
) -> Verification:
    """Compare every method of a program in the engine with the module that it was lowered from.

    A step that was cut runs its trunk first and is compared with the module as a whole. A method for shorter
    rows is held against what the longest one answers for the same rows, padded.

    Derivatives are compared with PyTorch's own, those of a quantized module with its graph in eager mode.

    Raises:
        BundleError: they differ by more than the tolerance, an answer isn't finite, or the adapter makes no
            difference.
    """
    workspaces: dict[str, int] = {}
    seen: dict[str, Answers] = {}
    by_method = [
        _differences(path, built, method, contract, programs, workspaces, seen)
        for method, contract in built.contracts.items()
    ]
    answers = max((pairs[0] for pairs in by_method), key=_part_of_tolerance)
    tangent, allowed = max(
        (pair for pairs in by_method for pair in pairs[1:]), key=_part_of_tolerance, default=(None, None)
    )
    _check_adapter(path, built, seen[built.step_method])
    return Verification(*answers, built.contract.rows, tangent, allowed, workspaces)


def _part_of_tolerance(pair: tuple[float, float]) -> float:
    difference, tolerance = pair
    return difference / tolerance


def _differences(
    path: Path,
    built: BuiltProgram,
    method: str,
    contract: Contract,
    programs: Mapping[str, torch.export.ExportedProgram],
    workspaces: dict[str, int],
    seen: dict[str, Answers],
) -> list[tuple[float, float]]:
    """Difference and tolerance of every output of one method.

    Its engine's memory goes to `workspaces`, what the engine answered to `seen`.
    """
    inputs = example_inputs(contract)
    longest = built.longest(method)
    padded = lengthened(inputs, contract, longest)

    def eager(inputs: Sequence[torch.Tensor], method: str) -> Answers:
        with torch.no_grad():
            return interpret(programs[method], inputs)

    def engine(inputs: Sequence[torch.Tensor], method: str) -> Answers:
        return run_program(path, inputs, method, workspaces)

    if (contract.is_tangent or contract.is_exact) and built.float_answers:
        expected = run_step(eager, built, padded)
    else:
        expected = exact_answers(built.module, longest, padded)
    actual = run_step(engine, built, inputs, method) if method in built.steps else engine(inputs, method)
    seen[method] = actual
    # Of gradients the largest over all modules: that of one may be next to nothing.
    largest = max((float(derivative.abs().max()) for derivative in expected[1:]), default=1.0)
    pairs = []
    for index, (spec, ours, theirs) in enumerate(zip(contract.outputs, actual, expected, strict=True)):
        if ours.shape != theirs.shape or not bool(torch.isfinite(ours).all()):
            raise BundleError(
                f"the lowered program's output {spec.name} {tuple(ours.shape)} has numbers that aren't "
                f"finite, or another shape than {tuple(theirs.shape)}",
                remedy="export it with --quantize fp32, and please report it",
            )
        unit = largest if index else 1.0
        difference = float((ours - theirs).abs().max()) / max(unit, 1e-30)
        tolerance = FP32_TOLERANCE
        if built.float_answers:
            change = float((built.float_answers[method][index] - theirs).abs().max()) / max(unit, 1e-30)
            tolerance += QUANTIZED_TOLERANCE * change
        if difference > tolerance:
            raise BundleError(
                f"the lowered program differs from the model by {difference:.3g} in {spec.name}, "
                f"{built.quantization.scheme} allows {tolerance:.3g}",
                remedy="export it with --quantize fp32, and please report it",
            )
        pairs.append((difference, tolerance))
    return pairs


def _check_adapter(path: Path, built: BuiltProgram, answers: Answers) -> None:
    """Raise BundleError unless the adapter moves the answers of every copy or along every direction.

    `answers` are the step's in the engine to `example_inputs`.
    """
    contract = built.contract
    if contract.is_tangent:
        _, tangents = answers
        dead = [query for query in range(contract.queries) if not bool(tangents[query].any())]
        if dead:
            raise BundleError(
                f"the tangents {dead} of the lowered program are zero",
                remedy="choose target modules that the output depends on",
            )
    elif contract.is_exact:
        _, *gradients = answers
        if not any(bool(gradient.any()) for gradient in gradients):
            raise BundleError(
                "the gradient of the lowered program is zero",
                remedy="choose target modules that the output depends on",
            )
    elif contract.copies > 1:
        same = [
            value
            if spec.name.startswith(LORA_B_PREFIX) or contract.shared_rows
            else value[: contract.batch_size].repeat(contract.copies, 1)
            for spec, value in zip(contract.inputs, example_inputs(contract), strict=True)
        ]
        outputs = run_step(lambda values, method: run_program(path, values, method), built, same)[0]
        by_copy = outputs.reshape(contract.copies, -1)
        dead = [copy for copy in range(1, contract.copies) if torch.equal(by_copy[copy], by_copy[0])]
        if dead:
            raise BundleError(
                f"the copies {dead} of the lowered program return what copy 0 returns, though their lora_b "
                "differ",
                remedy="choose target modules that the output depends on",
            )
