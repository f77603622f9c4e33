"""Which weight takes a slope back through a frozen layer: its bytes, its time and its gradient.

    python scripts/bench/way_back.py --models smollm2 babyllama stories260K --json way_back.json

`layers`, by scheme, widths and tokens, has every way back of one layer in the engine: the cosine of its slope
with the exact one (float64, the forward's dequantized weight), bytes of the program beyond the forward's for
each weight, and medians of ratios of seconds to a call of the forward layer, and to one of the exporter's way
back, the first. All of a layer take turns. `gradients`, by model and scheme, has cosines of an adapter's
gradient with the exact one through the same quantized layers: of all of it, and of its worst module. The
models are emulated in PyTorch, on rows that they draw themselves; `+ slopes` rounds slopes to int8 as the
engine does, the others round weights alone.

    int8, int4      the weight transposed and rounded once more: int8 by channel, int4 in groups of 32
    float32         the weight transposed
    forward's       the forward's constants as they are; a slope takes up the scales of int8 codes
    unpacked        the forward's int4 codes, an input, unpacked at every call for a float32 product
    float32 input   the forward's weight in float32, an input, packed at every call
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from emulation import INT8, ROUND, WAYS, cosine, gradient_figures, rounded
from reports import median, parser_of, report
from torch import nn

from device_runner.engines.torch_runtime import set_threads
from server_export.check.engine import loaded_method
from server_export.lower.program import write_program
from server_export.model.quantization import GROUP_SIZE, quantize_layers
from server_export.quiet import quiet_libraries

# Of SmolLM2-135M, Qwen2.5-1.5B, TinyLlama-1.1B and Llama-3.1-8B: in and out.
WIDTHS = ["576x1536", "1536x8960", "2048x5632", "4096x14336"]
SCHEMES = ["8da4w", "8da8w", "fp32"]
FEWEST_ROUNDS = 6


class Back(nn.Module):
    """A function of a slope [1, tokens, out], of constants, and of what else a call gives."""

    def __init__(self, function: Callable[..., torch.Tensor], *constants: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for number, constant in enumerate(constants):
            self.register_buffer(f"constant_{number}", constant)

    def forward(self, slope: torch.Tensor, *read: torch.Tensor) -> torch.Tensor:
        return self.function(slope, *self.buffers(), *read)


def by_codes(
    slope: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    """codes i8 [out, in] with scales [out]; ones, zeros and integer zeros [in]."""
    ones, zeros, zero_points = rest
    weight = ROUND.dequantize_per_channel.default(codes, ones, zero_points, 1, *INT8)
    # ExecuTorch knows codes of a product with a bias only.
    return torch.addmm(zeros, rounded((slope * scales)[0]), weight).unsqueeze(0)


def by_pairs(slope: torch.Tensor, pairs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """pairs of int4 codes u8 [out, groups, 16], the first the lower half; scales [out, groups, 1]."""
    both = pairs.float()
    high = torch.floor(both * (1 / 16))
    halves = (((half - 8) * scales).reshape(1, len(pairs), -1) for half in (both - high * 16, high))
    answers = [torch.bmm(slope, half).unsqueeze(-1) for half in halves]
    return torch.cat(answers, -1).reshape(*slope.shape[:2], -1)


def linear(weight: torch.Tensor, scheme: str) -> nn.Sequential:
    """A frozen layer with that weight [out, in], quantized."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    block = nn.Sequential(layer)
    if scheme != "fp32":
        quantize_layers(block, scheme)
    return block


def ways_back(scheme: str, weight: Any) -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Modules by name, and what a call of each gives besides the slope; `weight` [out, in] is quantized."""
    if scheme == "fp32":
        product = Back(lambda slope, matrix: torch.mm(slope[0], matrix).unsqueeze(0), weight)
        return {"float32": (linear(weight.t(), "fp32"), ()), "forward's": (product, ())}
    values = weight.dequantize()
    ways: Any = {"int8": (linear(values.t(), "8da8w"), ())}
    if scheme == "8da8w":
        zeros = torch.zeros(weight.shape[1])
        rest = (torch.ones_like(zeros), zeros, zeros.long())
        return {**ways, "forward's": (Back(by_codes, weight.qdata, weight.scale.flatten(), *rest), ())}
    unsigned = (weight.qdata + 8).view(torch.uint8)
    pairs = (unsigned[:, ::2] | unsigned[:, 1::2] << 4).reshape(len(values), -1, GROUP_SIZE // 2)
    return {
        **ways,
        "int4": (linear(values.t(), "8da4w"), ()),
        "unpacked": (Back(by_pairs), (pairs, weight.scale.float().unsqueeze(-1))),
        "float32 input": (Back(torch.bmm), (values.unsqueeze(0),)),
    }


def layer_figures(scheme: str, widths: str, tokens: int, budget: float) -> dict[str, dict[str, float]]:
    """Every way back of a layer with random weights; timed for `budget` seconds."""
    torch.manual_seed(0)
    width_in, width_out = map(int, widths.split("x"))
    layer = linear(torch.randn(width_out, width_in) * width_in**-0.5, scheme)
    weight: Any = layer[0].weight.data
    x, slope = torch.randn(1, tokens, width_in), torch.randn(1, tokens, width_out)
    exact = slope.double() @ (weight if scheme == "fp32" else weight.dequantize()).double()
    calls, figures = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, "forward.pte")
        write_program(alone, {"forward": (layer, (x,))})
        calls["forward"] = loaded_method(alone, "forward", (x,))
        for name, (module, read) in ways_back(scheme, weight).items():
            # One file has both: a constant that both read is in it once.
            path, given = Path(folder, f"{name}.pte"), (slope, *read)
            write_program(path, {"forward": (layer, (x,)), "back": (module, given)})
            calls[name] = loaded_method(path, "back", given)
            figures[name] = {
                "cosine": cosine(calls[name]()[0], exact),
                "bytes_a_weight": (path.stat().st_size - alone.stat().st_size) / weight.numel(),
            }
        rounds, end = list[dict[str, float]](), time.monotonic() + budget
        while len(rounds) < FEWEST_ROUNDS or time.monotonic() < end:
            rounds.append({name: seconds(call) for name, call in calls.items()})
    del rounds[0]  # warmed caches up
    exporter = next(iter(figures))
    for name, found in figures.items():
        found["milliseconds"] = 1e3 * median(rounds, name)
        found["over_forward"] = median(rounds, name, over="forward")
        found["over_exporter"] = median(rounds, name, over=exporter)
    return figures


def seconds(call: Callable[[], Any]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Read the flags, measure, print JSON."""
    parser = parser_of(__doc__, seq_lens=[64, 256], threads=1)
    parser.add_argument("--models", nargs="*", default=[], help="folders or hub ids of decoders")
    parser.add_argument("--quantize", nargs="*", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--widths", nargs="*", default=WIDTHS, help="of a layer, as 576x1536")
    parser.add_argument("--batch-size", type=int, default=4, help="rows of a gradient")
    parser.add_argument("--seconds", type=float, default=10, help="to time a layer's ways for")
    arguments = parser.parse_args()
    quiet_libraries()
    set_threads(arguments.threads)
    tokens, budget = arguments.seq_lens, arguments.seconds
    layers = {
        scheme: {w: {n: layer_figures(scheme, w, n, budget) for n in tokens} for w in arguments.widths}
        for scheme in arguments.quantize
    }
    gradients = {
        model: {scheme: gradient_figures(model, scheme, arguments.batch_size, tokens[0]) for scheme in WAYS}
        for model in arguments.models
    }
    report({"layers": layers, "gradients": gradients}, arguments)


if __name__ == "__main__":
    main()
