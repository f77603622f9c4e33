"""Modules as methods of one program, in the stock engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from server_export.check.engine import bind_method
from server_export.lower.program import write_program
from server_export.quantize.quantization import quantize_layers
from tests.refusals import refusal

torch.set_num_threads(1)
X = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Layers that share their input, and a layer that reads the outputs of all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute attention of x f32 [1, tokens, 64]; returns the same shape."""
        weights = torch.softmax(torch.bmm(self.q(x), self.k(x).transpose(1, 2)), -1)
        return self.o(torch.bmm(weights, self.v(x)))


@pytest.mark.parametrize(("scheme", "tolerance"), [("fp32", 1e-5), ("8da8w", 2e-3), ("8da4w", 2e-3)])
def test_methods_compute_what_their_modules_do(tmp_path: Path, scheme: str, tolerance: float) -> None:
    whole, path = Attention().eval().requires_grad_(False), tmp_path / "program.pte"
    if scheme != "fp32":
        quantize_layers(whole, scheme)
    inputs = {"whole": (X,), "layer": (X[:, :2],)}
    modules = {"whole": whole, "layer": whole.o}
    write_program(path, {name: (module, inputs[name]) for name, module in modules.items()})
    calls = {name: bind_method(path, name, inputs[name]) for name in modules}
    for name in ("whole", "layer", "whole"):
        (output,) = calls[name]()
        torch.testing.assert_close(output, modules[name](*inputs[name]), atol=tolerance, rtol=0)


def test_a_program_that_the_engine_refuses_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "program.pte"
    write_program(path, {"forward": (nn.ReLU().eval(), (X,))})
    with refusal("engine-refuses-program"):
        bind_method(path, "forward", (X[:, :2],))()
    path.write_bytes(path.read_bytes()[:100])
    with refusal("engine-refuses-program"):
        bind_method(path, "forward", (X,))


def test_data_dependent_control_flow_is_not_traced(tmp_path: Path) -> None:
    class DataDependent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with refusal("not-traceable"):
        write_program(tmp_path / "program.pte", {"forward": (DataDependent().eval(), (X,))})
