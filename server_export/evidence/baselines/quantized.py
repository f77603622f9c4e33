"""Train int8 weights, with gradients scaled as if the weights were floats.

This is the quantization-aware scaling of Lin et al., "On-Device Training Under 256KB Memory", arXiv
2206.15472. The trained parameters are the codes: W = s_W W_codes for each output channel, and
b = s_W s_x b_codes; the scales are fixed. Relative to the codes, their gradient is too small by the scale
squared, so it is divided by that: s_W^2 for weights, (s_W s_x)^2 for biases. The optimizer is SGD without
momentum.

Choices made here: scales span the largest value of an output channel and the largest input on some training
rows; inputs and outputs of layers stay floats, where the paper's graph is int8 throughout, so that s_x is
only the unit of biases; codes are rounded after every step, stochastically because most steps are smaller
than half a code, and weights stay within -127 to 127. Norms, embeddings and head stay frozen floats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from prge.objectives.examples import Example
from server_export.adapter.layers import replace_module
from server_export.evidence.baselines.backpropagation import Backpropagation
from server_export.evidence.baselines.layers import Linears, block_linears, merge_layers, record_inputs
from server_export.evidence.baselines.method import StepResult
from server_export.evidence.baselines.problem import ModelProblem
from server_export.evidence.baselines.settings import BaselineSettings

LARGEST_CODE = 127
# Training rows on which the scales of layer inputs are measured.
CALIBRATION_ROWS = 16


class QuantizedLinear(nn.Module):
    """A linear layer whose parameters are int8 codes stored as float32, with scaled gradients.

    Args:
        layer: the layer to quantize; its values are copied.
        input_scale: s_x, above 0; with s_W the unit of the bias codes, which have 32 bits in the paper.
    """

    scale: torch.Tensor

    def __init__(self, layer: nn.Linear, input_scale: float) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp_min(1e-12) / LARGEST_CODE
        self.input_scale = input_scale
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter(torch.round(weight / scale.unsqueeze(1)))
        self.weight.register_hook(lambda gradient: gradient / self.scale.square().unsqueeze(1))
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(torch.round(layer.bias.detach().float() / (scale * input_scale)))
            self.bias.register_hook(lambda gradient: gradient / (self.scale * self.input_scale).square())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [..., in]; return [..., out]."""
        # Scaling after the product saves no second copy of the weight for the backward pass.
        product = F.linear(x, self.weight) * self.scale
        return product if self.bias is None else product + self.bias * (self.scale * self.input_scale)

    @torch.no_grad()
    def round_codes(self, generator: torch.Generator) -> None:
        """Round the codes stochastically to integers and clamp weights to 8 bits."""
        for codes in self.parameters():
            codes.add_(torch.rand(codes.shape, generator=generator)).floor_()
        self.weight.clamp_(-LARGEST_CODE, LARGEST_CODE)


class QuantizedTraining(Backpropagation):
    """Train the codes of some layers with SGD."""

    def __init__(
        self,
        problem: ModelProblem,
        settings: BaselineSettings,
        layers: Sequence[QuantizedLinear],
        prior_passes: int,
    ) -> None:
        trained = [parameter for layer in layers for parameter in layer.parameters()]
        super().__init__(problem, settings, trained, prior_passes)
        self.layers = layers
        self._generator = torch.Generator().manual_seed(problem.seed)

    def step(self, examples: Sequence[Example], learning_rate: float) -> StepResult:
        """Take one step of SGD and round the codes."""
        result = super().step(examples, learning_rate)
        for layer in self.layers:
            layer.round_codes(self._generator)
        return result


def prepare(problem: ModelProblem, settings: BaselineSettings) -> QuantizedTraining:
    """Quantize the linear layers of the problem's blocks in place and return their training.

    Raises:
        ConfigError: the model has no list of blocks.
    """
    layers = merge_layers(block_linears(problem.model))
    examples = problem.train[:CALIBRATION_ROWS]
    scales = input_scales(problem, layers, examples)
    quantized = [QuantizedLinear(layer, scales[name]) for name, layer in layers.items()]
    for name, layer in zip(layers, quantized, strict=True):
        replace_module(problem.model, name, layer)
    return QuantizedTraining(problem, settings, quantized, problem.forward_passes(examples))


def input_scales(problem: ModelProblem, layers: Linears, examples: Sequence[Example]) -> dict[str, float]:
    """Return the scale of every layer's inputs, from the largest input on some examples."""
    with record_inputs(layers, lambda x: x.abs().max().item()) as largest, torch.no_grad():
        problem.loss(examples)
    return {name: max(value, 1e-12) / LARGEST_CODE for name, value in largest.items()}
