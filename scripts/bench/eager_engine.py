"""A program in torch eager: the oracle that the engine and the estimators are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from prge.contract import Contract
from prge.engine import Array
from prge.errors import EngineError
from server_export.model.program import StackProgram
from server_export.model.reference import exact_answers


class _KeepDouble(TorchFunctionMode):
    """Ignores conversions from float64 to float32: models compute their norms in float32 otherwise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to_float = func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:2])
        if to_float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


class EagerEngine:
    """Runs a program module; implements `prge.engine.Engine`.

    Args:
        module: the program; it is converted to `dtype` in place.
        contract: of a method of the program; tangents come from `torch.func.jvp`.
        dtype: torch.float32, or torch.float64 for exact references; a quantized program takes float32 only.
    """

    def __init__(self, module: StackProgram, contract: Contract, dtype: torch.dtype = torch.float32) -> None:
        self._module = module.to(dtype)
        self._contract = contract
        self._dtype = dtype

    @property
    def contract(self) -> Contract:
        """Shapes, names and adapted modules of the program."""
        return self._contract

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the program once; output arrays have the contract's dtypes, or float64 in a float64 engine."""
        tensors = self._tensors(inputs)
        with torch.no_grad(), _KeepDouble():
            outputs = exact_answers(self._module, self._contract, tensors)
        names = (spec.name for spec in self._contract.outputs)
        return {name: output.numpy().copy() for name, output in zip(names, outputs, strict=True)}

    def gradients(self, inputs: Mapping[str, Array], weights: Array) -> dict[str, NDArray[Any]]:
        """Exact gradient of sum(weights * output) by every `lora_b` input of a stack contract, by input name.

        Args:
            inputs: as for `forward`.
            weights: of the output's shape.
        """
        tensors = self._tensors(inputs)
        names = [spec.name for spec in self._contract.inputs]
        trained = [tensor for name, tensor in zip(names, tensors, strict=True) if name.startswith("lora_b.")]
        for tensor in trained:
            tensor.requires_grad_(True)
        with torch.enable_grad(), _KeepDouble():
            output = self._module(*tensors)
            total = (output * torch.from_numpy(np.asarray(weights)).to(output.dtype)).sum()
            gradients: Sequence[torch.Tensor] = torch.autograd.grad(total, trained)
        return {
            name: gradient.numpy()
            for name, gradient in zip(
                (name for name in names if name.startswith("lora_b.")), gradients, strict=True
            )
        }

    def _tensors(self, inputs: Mapping[str, Array]) -> list[torch.Tensor]:
        """The inputs in order as fresh tensors of the engine's precision."""
        problems = []
        tensors = []
        for spec in self._contract.inputs:
            array = inputs.get(spec.name)
            if array is None:
                problems.append(f"{spec.name} is missing")
                continue
            allowed = (spec.dtype,) if spec.dtype == "int64" else (spec.dtype, "float64")
            if array.shape != spec.shape or array.dtype.name not in allowed:
                problems.append(
                    f"{spec.name} is {array.dtype} {array.shape}, must be {spec.dtype} {spec.shape}"
                )
                continue
            tensor = torch.from_numpy(np.array(array))
            tensors.append(tensor if spec.dtype == "int64" else tensor.to(self._dtype))
        if problems:
            raise EngineError("the inputs don't fit the program: " + "; ".join(problems))
        return tensors
