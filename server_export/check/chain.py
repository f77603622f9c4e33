"""The programs of a chain in the engine against the graphs that they were lowered from, at every export."""

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

# Largest difference, as a part of the largest number. Float blocks of all architectures differ by less than
# 1e-5. Engine and graph round the same activations to int8, where a last bit of difference flips a code.
FLOAT_TOLERANCE = 1e-4
QUANTIZED_TOLERANCE = 5e-2
# Where activations are rounded, tokens between two experts may get the other: so many numbers are compared.
_ALIKE = 0.9
_REMEDY = "export it with --quantize fp32, and please report it with the name of the model"


@dataclass(frozen=True)
class ChainVerification:
    """Largest difference of any output, by role, as a part of the output's largest number.

    `model` is what the blocks were compared with before they were lowered.
    """

    differences: dict[str, float]
    tolerance: float
    model: ModelComparison | None = None

    def to_json(self) -> dict[str, Any]:
        """The manifest's `verification` block."""
        return asdict(self)


def verify_chain(chain: ModelChain, lowered: LoweredChain, folder: Path, scheme: str) -> ChainVerification:
    """Run every role of every type of block on the weights of one of its blocks, in the engine and in PyTorch.

    Raises:
        Refusal: they differ by more than the tolerance, or an output isn't finite (`differs-from-graph`).
    """
    tolerance = FLOAT_TOLERANCE if scheme == "fp32" else QUANTIZED_TOLERANCE
    differences: dict[str, float] = {}
    done = count_parts(len(lowered.programs))
    for number, program in enumerate(lowered.programs):
        # The last of a type: the programs were lowered with none's weights.
        place = max(index for index, block in enumerate(lowered.blocks) if block.program == number)
        tensors = lowered.lowered[number].with_constants(chain.tensors(place))
        weights = folder / lowered.blocks[place].weights
        chooses = chain.blocks[place].experts is not None and scheme != "fp32"
        share = _ALIKE if chooses else 1.0
        for role, method in lowered.lowered[number].methods.items():
            inputs = _example(chain, method.example_shapes(), lowered.blocks[place].tables)
            with torch.no_grad():
                expected = method.block.call(inputs, tensors)
            found = _engine(folder / program.file, weights, role, [*inputs.values()])
            for ours, (name, theirs) in zip(found, expected.items(), strict=True):
                difference = _difference(ours, theirs, share)
                if not difference <= tolerance:
                    raise Refusal(
                        "differs-from-graph",
                        f"{program.file} computes {name} in the role {role} otherwise than the model's "
                        f"graph: they differ by {difference:.3g} of the largest number, {scheme} allows "
                        f"{tolerance:.3g}",
                        remedy=_REMEDY,
                    )
                differences[role] = max(difference, differences.get(role, 0.0))
        check_specs(folder / program.file, program)
        done()
    return ChainVerification(differences, tolerance)


def check_specs(path: Path, described: BlockProgram) -> None:
    """Compare the specs of a program's methods with its metadata.

    Raises:
        Refusal: an input or output has other sizes, or another dtype (`other-tensors`).
    """
    from executorch.runtime import Runtime

    with quiet_engine():
        program = Runtime.get().load_program(path)
    for role, method in described.methods.items():
        found = program.metadata(role)
        for specs, count, tensor in (
            (method.input_specs, found.num_inputs(), found.input_tensor_meta),
            (method.output_specs, found.num_outputs(), found.output_tensor_meta),
        ):
            expected = [(spec.sizes, np.dtype(spec.dtype).itemsize * math.prod(spec.sizes)) for spec in specs]
            tensors = [(tuple(each.sizes()), each.nbytes()) for each in map(tensor, range(count))]
            if tensors != expected:
                raise Refusal(
                    "other-tensors",
                    f"{described.file} has other tensors in the role {role} than the program that it was "
                    f"lowered from: {tensors}, must be {expected}",
                    remedy=_REMEDY,
                )


def _difference(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> float:
    """Largest difference of all numbers, or of this share of them that differ least."""
    if ours.numel() != theirs.numel() or not bool(torch.isfinite(ours).all()):
        return float("inf")
    differences = (ours.reshape(theirs.shape) - theirs).abs().flatten().sort().values
    largest = differences[math.ceil(share * len(differences)) - 1]
    return float(largest) / max(float(theirs.abs().max()), 1e-30)


def _example(
    chain: ModelChain, shapes: Mapping[str, tuple[int, ...]], tables: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Random inputs of these shapes, by name."""
    generator = torch.Generator().manual_seed(0)
    values = dict[str, torch.Tensor]()
    tokens = shapes["tokens"][-1] if "tokens" in shapes else shapes["hidden_states"][-2]
    for name, shape in shapes.items():
        if name in ("tokens", "targets"):
            most = len(chain.head_rows[0]) if name == "targets" else chain.vocabulary_size
            values[name] = torch.randint(0, most, shape, generator=generator)
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
    from executorch.extension.pybindings import _C

    try:
        with quiet_engine():
            module = _C._load_for_executorch(str(program), str(weights))
            return list(module.run_method(role, [tensor.contiguous() for tensor in inputs]))
    except RuntimeError as error:
        raise Refusal(
            "refused-by-engine",
            f"the engine refuses {program.name} in the role {role}: {error}",
            remedy="please report it with the name of the model",
        ) from None
