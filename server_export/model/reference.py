"""What a program answers, by PyTorch itself: the reference that graphs and engines are held against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from prge.contract import LORA_B_PREFIX, Contract
from server_export.model.loss import answer_slopes


def exact_answers(
    module: nn.Module, contract: Contract, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The outputs of a contract from the eager module, tangents by `torch.func.jvp`, gradients by autograd.

    Args:
        module: a program module that takes any number of copies. Not quantized if the contract has
            derivatives: rounding has none.
        contract: of the program.
        inputs: in the contract's order.
    """
    count = len(contract.modules)
    if contract.is_exact:
        return _with_gradients(module, contract, inputs)
    if not contract.is_tangent:
        leading = inputs[:-count]
        if contract.shared_rows:
            leading = [rows.repeat(contract.copies, 1) for rows in leading]
        with torch.no_grad():
            return (module(*leading, *inputs[-count:]),)
    leading, factors = inputs[: -3 * count], inputs[-2 * count :]
    # A copy for every row, since every row has directions of its own.
    lora_b = tuple(
        matrix.expand(contract.rows, -1, -1).contiguous() for matrix in inputs[-3 * count : -2 * count]
    )
    directions = tuple(
        u.unsqueeze(3) * v.unsqueeze(2) for u, v in zip(factors[::2], factors[1::2], strict=True)
    )

    def along(*tangents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        answer_and_tangents: tuple[torch.Tensor, torch.Tensor] = torch.func.jvp(
            lambda *copies: module(*leading, *copies), lora_b, tangents
        )
        return answer_and_tangents

    # All queries at once: the answer, which they share, has no dimension for them.
    answer, tangents = torch.func.vmap(along, out_dims=(None, 0))(*directions)
    return answer.detach(), tangents.detach()


def _with_gradients(
    module: nn.Module, contract: Contract, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    first = next(index for index, spec in enumerate(contract.inputs) if spec.name.startswith(LORA_B_PREFIX))
    last = first + len(contract.modules)
    adapter = [matrix.detach().clone().requires_grad_() for matrix in inputs[first:last]]
    with torch.enable_grad():
        answer = module(*inputs[:first], *(matrix.unsqueeze(0) for matrix in adapter))
        slopes = answer_slopes(contract, answer.detach(), inputs[last:])
        gradients = torch.autograd.grad(answer, adapter, slopes)
    return answer.detach(), *gradients
