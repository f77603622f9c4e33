"""How fast the engine is on this machine: two seconds of a model's products and of what lies between them.

Nothing is stored. What else the machine does is left out: the fast calls count. Layers that are larger than a
bound are measured at it: their rate no longer depends on it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from prge.costs import Outline, Work
from server_export.graph.softmax_parts import SOFTMAX_PARTS

_SECONDS = 2.0
_LARGEST_LAYER = 1 << 23
_MOST_TOKENS = 640
_ANSWERS = (8, 256)
_LARGEST_ANSWERS = 1 << 19
# Amounts that take milliseconds: threads that have to be woken cost a shorter call more than its work.
_LEAST = {"layers": 1 << 29, "products": 1 << 27, "passes": 1 << 24}
_MOST_TIMES = 16


@dataclass(frozen=True)
class Rates:
    """What the engine does in a second.

    As `prge.costs.Work`: multiply-accumulates of `layers` and `products`, numbers of `passes` and `answers`,
    calls of `methods` that compute nothing.
    """

    layers: float
    products: float
    passes: float
    answers: float
    methods: float

    def seconds(self, work: Work) -> float:
        """What one call of a method takes."""
        pairs = zip(asdict(work).values(), asdict(self).values(), strict=True)
        return float(sum(amount / rate for amount, rate in pairs))

    def to_json(self) -> dict[str, float]:
        """The rates by name."""
        return asdict(self)


class _Layers(nn.Module):
    """x f32 [rows, tokens, width] -> the same shape, through two frozen layers again and again."""

    def __init__(self, width: int, inner: int, times: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.down(self.up(x))
        return x


class _Products(nn.Module):
    """q, k f32 [rows x heads, tokens, head width] -> mixed values of that shape, without a softmax."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            q = torch.bmm(torch.bmm(q, k.transpose(1, 2)), k)
        return q


class _Passes(nn.Module):
    """x f32 -> the same shape, through eight operators that take numbers one by one, again and again.

    As in a block one of eight is no sum or product.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(self.times):
            y = torch.sigmoid(y) * x + x
            y = (y * x + x) * x
            y = (y * x + y) * x
        return y


class _Call(nn.Module):
    """x f32 [1] -> 2 x: what any call takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


class _Answers(nn.Module):
    """logits f32 [1, count, tokens], shift f32 and targets i64 [1, count, 1] -> what a head answers."""

    def forward(self, logits: torch.Tensor, shift: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts: torch.Tensor = SOFTMAX_PARTS(logits, shift, targets)
        return parts


class Calibration:
    """Small programs of a model's shapes, loaded in the engine with its default threads.

    Args:
        outline: the model, whose shapes are taken.
        scheme: of its frozen layers.
        rows: that a call computes.
        length: tokens of a row.
    """

    def __init__(self, outline: Outline, scheme: str, rows: int, length: int) -> None:
        from server_export.check.engine import loaded_method
        from server_export.lower.program import write_program
        from server_export.model.quantization import quantize_layers

        classes = outline.head.outputs if outline.head is not None else 2
        answers = max(_ANSWERS[0], min(_LARGEST_ANSWERS // classes, _ANSWERS[1]))
        rows = max(1, min(rows, _MOST_TOKENS // length))
        inner = outline.inner
        width = min(outline.width, max(32, _LARGEST_LAYER // inner // 32 * 32))
        heads = (rows * outline.heads, length, outline.head_width)
        tokens = rows * length
        amounts = {
            "layers": 2 * tokens * width * inner,
            "products": 2 * tokens * outline.heads * outline.head_width * length,
            "passes": 8 * tokens * inner,
        }
        times = {name: max(1, min(_LEAST[name] // amounts[name], _MOST_TIMES)) for name in amounts}
        layers = _Layers(width, inner, times["layers"]).eval().requires_grad_(False)
        if scheme != "fp32":
            quantize_layers(layers, scheme)
        modules: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
            "layers": (layers, (torch.randn(rows, length, width),)),
            "products": (_Products(times["products"]), (torch.randn(heads), torch.randn(heads))),
            "passes": (_Passes(times["passes"]), (torch.randn(rows, length, inner),)),
            "answers": (
                _Answers(),
                (
                    torch.randn(1, answers, classes),
                    torch.zeros(1, answers, 1),
                    torch.zeros(1, answers, 1, dtype=torch.int64),
                ),
            ),
            "methods": (_Call(), (torch.ones(1),)),
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "calibration.pte")
            write_program(path, modules)
            self._calls = {name: loaded_method(path, name, inputs) for name, (_, inputs) in modules.items()}
        self._amounts = {name: amount * times[name] for name, amount in amounts.items()}
        self._amounts |= {"answers": answers * classes, "methods": 1}
        self._seconds: dict[str, list[float]] = {name: [] for name in modules}
        for call in self._calls.values():
            call()

    def sample(self) -> None:
        """Time a call of each."""
        for name, call in self._calls.items():
            start = time.perf_counter()
            call()
            self._seconds[name].append(time.perf_counter() - start)

    def rates(self) -> Rates:
        """What the fast calls that were sampled come to, without what any call takes."""
        taken = {name: fast(seconds) for name, seconds in self._seconds.items()}
        call = taken["methods"]
        # A small model's products take little more than a call, and less on a machine that is busy meanwhile.
        less = {name: call if name != "methods" else 0.0 for name in taken}
        return Rates(**{n: self._amounts[n] / max(t - less[n], t / 10) for n, t in taken.items()})


def fast(seconds: Sequence[float]) -> float:
    """What a call takes when nothing else wants the processor: the fastest tenth begins there."""
    return sorted(seconds)[len(seconds) // 10]


def calibrate(outline: Outline, scheme: str, rows: int, length: int) -> Rates:
    """Measure the engine for two seconds; arguments as of `Calibration`."""
    calibration = Calibration(outline, scheme, rows, length)
    end = time.perf_counter() + _SECONDS
    calibration.sample()
    while time.perf_counter() < end:
        calibration.sample()
    return calibration.rates()
