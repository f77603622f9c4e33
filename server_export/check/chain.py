"""Verify the programs of a chain: every export compares engine outputs with those of the lowered graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prge.errors import Refusal
from prge.formats.chain import TABLE, BlockProgram
from server_export.check.model import ModelComparison
from server_export.lower.chain import LoweredChain
from server_export.model.chain import ModelChain
from server_export.progress import count_parts
from server_export.quiet_libraries import quiet_engine

# Largest allowed difference, relative to the largest value. Float blocks of all tested architectures differ
# by less than 1e-5. Engine and graph round activations to int8, where a difference in the last bit flips a
# code.
FLOAT_TOLERANCE = 1e-4
QUANTIZED_TOLERANCE = 5e-2
# Rounded activations may route a token to another of two almost equal experts, so only the closest share of
# the values is compared.
_COMPARED_SHARE = 0.9
_REMEDY = "Export the model with --quantize fp32, and please report the problem with the name of the model."


@dataclass(frozen=True)
class ChainVerification:
    """The result of a verification.

    Attributes:
        differences: largest difference of any output, relative to the output's largest value, by role.
        tolerance: largest allowed difference.
        model: comparison of the blocks with transformers' model, before they were lowered.
    """

    differences: dict[str, float]
    tolerance: float
    model: ModelComparison | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's `verification` block."""
        return asdict(self)


def verify_chain(chain: ModelChain, lowered: LoweredChain, folder: Path, scheme: str) -> ChainVerification:
    """Run every role of every block type with the weights of one of its blocks, in the engine and in PyTorch.

    Args:
        chain: the blocks of the model.
        lowered: their programs.
        folder: folder of the bundle.
        scheme: quantization of the frozen weights.

    Raises:
        Refusal: outputs differ by more than the tolerance, or aren't finite (`differs-from-graph`).
    """
    tolerance = FLOAT_TOLERANCE if scheme == "fp32" else QUANTIZED_TOLERANCE
    differences: dict[str, float] = {}
    done = count_parts(len(lowered.programs))
    for number, program in enumerate(lowered.programs):
        # The last block of the type. Any would do, since a program is lowered without weights.
        index = max(index for index, block in enumerate(lowered.blocks) if block.program == number)
        tensors = lowered.lowered[number].with_constants(chain.tensors(index))
        weights = folder / lowered.blocks[index].weights
        routes_rounded = chain.blocks[index].experts is not None and scheme != "fp32"
        share = _COMPARED_SHARE if routes_rounded else 1.0
        for role, method in lowered.lowered[number].methods.items():
            inputs = _example(chain, method.example_shapes(), lowered.blocks[index].tables)
            with torch.no_grad():
                expected = method.block.call(inputs, tensors)
            outputs = _engine(folder / program.file, weights, role, [*inputs.values()])
            for output, (name, expected_output) in zip(outputs, expected.items(), strict=True):
                difference = _difference(output, expected_output, share)
                if not difference <= tolerance:
                    raise Refusal(
                        "differs-from-graph",
                        f"The output {name} of {program.file} in the role {role} differs from the model's "
                        f"graph by {difference:.3g} of its largest value; {scheme} allows {tolerance:.3g}.",
                        remedy=_REMEDY,
                    )
                differences[role] = max(difference, differences.get(role, 0.0))
        check_specs(folder / program.file, program)
        done()
    return ChainVerification(differences, tolerance)


def check_specs(path: Path, described: BlockProgram) -> None:
    """Compare the described inputs and outputs of a program with the program's own metadata.

    Args:
        path: file of the program.
        described: description of the program for the manifest.

    Raises:
        Refusal: an input or output has another shape or dtype (`other-tensors`).
    """
    from executorch.runtime import Runtime

    with quiet_engine():
        program = Runtime.get().load_program(path)
    for role, method in described.methods.items():
        metadata = program.metadata(role)
        for specs, count, tensor in (
            (method.input_specs, metadata.num_inputs(), metadata.input_tensor_meta),
            (method.output_specs, metadata.num_outputs(), metadata.output_tensor_meta),
        ):
            expected = [(spec.sizes, np.dtype(spec.dtype).itemsize * math.prod(spec.sizes)) for spec in specs]
            tensors = [(tuple(each.sizes()), each.nbytes()) for each in map(tensor, range(count))]
            if tensors != expected:
                raise Refusal(
                    "other-tensors",
                    f"The tensors of {described.file} in the role {role} are {tensors}, but the graph that "
                    f"it was lowered from has {expected}.",
                    remedy=_REMEDY,
                )


def _difference(output: torch.Tensor, expected: torch.Tensor, share: float) -> float:
    """Return the largest difference, relative to the largest expected value, of the closest share of values.

    Infinite if an output isn't finite, or has another number of elements.
    """
    if output.numel() != expected.numel() or not bool(torch.isfinite(output).all()):
        return float("inf")
    differences = (output.reshape(expected.shape) - expected).abs().flatten().sort().values
    largest = differences[math.ceil(share * len(differences)) - 1]
    return float(largest) / max(float(expected.abs().max()), 1e-30)


def _example(
    chain: ModelChain, shapes: Mapping[str, tuple[int, ...]], tables: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return random inputs of these shapes, by name."""
    generator = torch.Generator().manual_seed(0)
    values = dict[str, torch.Tensor]()
    tokens = shapes["tokens"][-1] if "tokens" in shapes else shapes["hidden_states"][-2]
    for name, shape in shapes.items():
        if name in ("tokens", "targets"):
            limit = len(chain.head_rows[0]) if name == "targets" else chain.vocabulary_size
            values[name] = torch.randint(0, limit, shape, generator=generator)
        elif name == "ones":
            values[name] = torch.ones(shape)
        elif name == "padding_mask":
            values[name] = torch.zeros(shape)
        elif name.startswith(TABLE):
            table = chain.tables.all[tables[int(name.removeprefix(TABLE))]]
            values[name] = table.of(tokens).expand(shape)
        else:
            values[name] = torch.randn(shape, generator=generator) * 0.3
    return values


def _engine(program: Path, weights: Path, role: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a method in the engine, and return its outputs; raises Refusal (`refused-by-engine`)."""
    from executorch.extension.pybindings import _C

    try:
        with quiet_engine():
            module = _C._load_for_executorch(str(program), str(weights))
            return list(module.run_method(role, [tensor.contiguous() for tensor in inputs]))
    except RuntimeError as error:
        raise Refusal(
            "refused-by-engine",
            f"The engine refuses to run {program.name} in the role {role}: {error}",
            remedy="Please report the problem with the name of the model.",
        ) from None
