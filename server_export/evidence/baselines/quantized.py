"""Training of int8 weights, with gradients scaled to what they would be of floats.

Lin et al., "On-Device Training Under 256KB Memory", arXiv 2206.15472, its quantization-aware scaling. The
trained parameters are the codes, W = s_W W_codes by output channel and b = s_W s_x b_codes; scales are fixed.
A gradient of codes is too small against its codes by the scale squared and is divided by it: of weights by
s_W^2, of biases by (s_W s_x)^2. Then plain SGD, without momentum.

Chosen here: scales span the largest value of an output channel and the largest input on some training rows;
inputs and outputs of layers stay floats, where the paper's graph has int8 throughout, so that s_x is no more
than the unit of biases; codes are rounded after every step, stochastically because most steps are smaller
than half a code, and weights stay within -127 to 127. With `latent` the parameters take the steps as floats
and the forward rounds them, straight through, as in the published code. Norms, embeddings and head stay
frozen floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from prge.learning.examples import Example
from server_export.evidence.baselines.backpropagation import Backpropagation
from server_export.evidence.baselines.layers import block_linears, require_trainable_weights
from server_export.evidence.baselines.method import Problem, StepResult
from server_export.evidence.baselines.methods import Optimizer
from server_export.evidence.baselines.settings import BaselineSettings
from server_export.model.lora_fa import replace_module

LARGEST_CODE = 127


class QuantizedLinear(nn.Module):
    """A linear layer whose parameters are int8 codes, held as float32.

    Args:
        layer: the layer to quantize; its values are copied.
        input_scale: s_x, above 0; with s_W the unit of the bias codes, which have 32 bits in the paper.
        latent: round the codes in the forward, with the gradient passed straight through.
    """

    scale: torch.Tensor
    input_scale: torch.Tensor

    def __init__(self, layer: nn.Linear, input_scale: float, *, latent: bool = False) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp_min(1e-12) / LARGEST_CODE
        self.latent = latent
        self.register_buffer("scale", scale)
        self.register_buffer("input_scale", torch.tensor(input_scale, device=scale.device))
        self.weight = nn.Parameter(torch.round(weight / scale.unsqueeze(1)))
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(torch.round(layer.bias.detach().float() / (scale * input_scale)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        codes = self.weight
        if self.latent:
            codes = codes + (torch.round(codes) - codes).detach()
        # The scale after the product: no second copy of the weight is saved for the backward.
        product = F.linear(x, codes) * self.scale
        return product if self.bias is None else product + self.bias * (self.scale * self.input_scale)

    def scale_gradients(self) -> None:
        """Divide the gradients of the codes by their squared units."""
        if self.weight.grad is not None:
            self.weight.grad /= self.scale.square().unsqueeze(1)
        if self.bias is not None and self.bias.grad is not None:
            self.bias.grad /= (self.scale * self.input_scale).square()

    @torch.no_grad()
    def round_codes(self, generator: torch.Generator | None) -> None:
        """Make codes integers again, stochastically with a generator, and keep weights within 8 bits."""
        for codes in (self.weight, self.bias):
            if codes is None or self.latent:
                continue
            if generator is None:
                codes.round_()
            else:
                codes.add_(torch.rand(codes.shape, generator=generator, device=codes.device)).floor_()
        self.weight.clamp_(-LARGEST_CODE, LARGEST_CODE)


class QuantizedTraining(Backpropagation):
    """SGD on codes."""

    def __init__(self, problem: Problem, settings: BaselineSettings, prior_rows: int) -> None:
        self.layers = [module for module in problem.model.modules() if isinstance(module, QuantizedLinear)]
        parameters = [parameter for layer in self.layers for parameter in layer.parameters()]
        super().__init__(problem, parameters, Optimizer("sgd"), prior_rows)
        self._settings = settings
        self._generator = torch.Generator(self.layers[0].scale.device).manual_seed(problem.seed)

    def shape_gradients(self) -> None:
        """Scale the gradients of the codes."""
        if self._settings.scaling:
            for layer in self.layers:
                layer.scale_gradients()

    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """One step of SGD after which the codes are rounded."""
        result = super().step(examples, learning_rate)
        generator = self._generator if self._settings.rounding == "stochastic" else None
        for layer in self.layers:
            layer.round_codes(generator)
        return result


def prepare(problem: Problem, settings: BaselineSettings) -> QuantizedTraining:
    """Quantize the linear layers of the problem's blocks, in place, and train them.

    Raises:
        ConfigError: the model has no list of blocks, or its weights can't be trained.
    """
    layers = {name: layer for block in block_linears(problem.model) for name, layer in block.items()}
    require_trainable_weights(list(layers.values()))
    examples = problem.train[: settings.calibration_rows]
    for name, scale in input_scales(problem, layers, examples).items():
        replace_module(
            problem.model, name, QuantizedLinear(layers[name], scale, latent=settings.rounding == "latent")
        )
    return QuantizedTraining(problem, settings, problem.rows(examples))


def input_scales(
    problem: Problem, layers: Mapping[str, nn.Linear], examples: Sequence[Example]
) -> dict[str, float]:
    """The scale of every layer's inputs, from the largest on some examples."""
    largest = dict.fromkeys(layers, 0.0)

    def note(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            largest[name] = max(largest[name], args[0].abs().max().item())

        return hook

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            problem.loss(examples)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: max(value, 1e-12) / LARGEST_CODE for name, value in largest.items()}
