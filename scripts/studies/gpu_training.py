"""Train small networks on the processor and on a GPU, and measure what copying costs.

    python scripts/studies/gpu_training.py [--json gpu.json] [--repeats 50] [--threads 4]

A study of phones (arXiv 2202.10100) reports that training is slower on their GPUs than on their processors,
and that moving data takes almost 91 % of the time. This program trains four networks by SGD in these rows:

    numpy, mnn, torch-cpu         on the processor; mnn is MNN's own trainer
    opencl-naive, opencl-tiled    matrix products without and with tiles in local memory (gpu_kernels.cl)
    torch-cuda                    PyTorch on a GPU of NVIDIA or AMD, with pinned host memory

The rows of a GPU have three values of `copying`:

    resident    the weights stay on the device; a batch is copied to it, and its loss back
    step        the weights also go in and out in every step
    kernel      the operands and the results of every kernel go in and out (OpenCL)

Weights and losses are compared with numpy in double precision. Seconds are medians: of the `step`, and the
device's own of `copy_in`, `compute` and `copy_out` within it. Those of torch-cuda include waits for the next
kernel. A software device, such as pocl, gets no seconds. The exit code is 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gpu_kernels import PARTS, Array, NoOpenCLError, OpenCL, OpenCLTrainer

NETWORKS = ((16, 16), (16, 16, 16, 16), (256, 256), (784, 256, 128, 16))
BATCH, RATE, CHECKED_STEPS, WARM_STEPS = 32, 0.1, 5, 10
# Bound of the largest error of a weight, relative to the largest change of its tensor in the checked steps.
TOLERANCE = 1e-4
NOTE = (
    "A discrete GPU copies over PCIe. A phone's GPU shares its memory with the processor, so copies cost "
    "something else there: ratios of one say nothing about the other."
)
COPYING = ("resident", "step", "kernel")


class Trainer(Protocol):
    """A network with ReLU between its layers, its loss and SGD; weights are (outputs, inputs)."""

    def step(self, x: Array, labels: Array) -> float:
        """Take a step on a batch; return its mean loss."""

    def parameters(self) -> list[Array]:
        """Return the weight and the bias of each layer, the first layer first."""

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds that the device spent on copies and kernels, if it measures them."""
        return {}


class NumpyTrainer(Trainer):
    """The network in numpy, in the precision of its parameters."""

    def __init__(self, widths: Sequence[int], parameters: Sequence[Array]) -> None:
        self._weights, self._biases = ([values.copy() for values in parameters[i::2]] for i in range(2))

    def step(self, x: Array, labels: Array) -> float:
        weights, biases = self._weights, self._biases
        hidden = [x.astype(weights[0].dtype)]
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            output = hidden[-1] @ weight.T + bias
            hidden.append(np.maximum(output, 0) if i < len(weights) - 1 else output)
        shifted = hidden[-1] - hidden[-1].max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        gradient = (np.exp(logs) - np.eye(logs.shape[1], dtype=logs.dtype)[labels]) / len(x)
        for i in reversed(range(len(weights))):
            lower = (gradient @ weights[i]) * (hidden[i] > 0) if i else gradient
            weights[i] -= RATE * (gradient.T @ hidden[i])
            biases[i] -= RATE * gradient.sum(0)
            gradient = lower
        return -float(logs[np.arange(len(x)), labels].mean())

    def parameters(self) -> list[Array]:
        return [values for pair in zip(self._weights, self._biases, strict=True) for values in pair]


class MnnTrainer(Trainer):
    """The network in MNN, with its layers, loss and optimizer."""

    def __init__(self, widths: Sequence[int], parameters: Sequence[Array]) -> None:
        import MNN

        self._expr, self._nn, self._classes = MNN.expr, MNN.nn, widths[-1]
        self._expr.lazy_eval(True)  # otherwise there is no graph, and no gradient
        self._layers = [MNN.nn.linear(n, m) for n, m in pairwise(widths)]
        self._network = MNN.nn.Module()
        for i, layer in enumerate(self._layers):
            setattr(self._network, f"layer{i}", layer)
        for variable, values in zip(self._variables(), parameters, strict=True):
            variable.write(values.reshape(variable.shape))
        self._optimizer = MNN.optim.SGD(self._network, RATE, 0.0, 0.0)

    def _variables(self) -> list[Any]:
        layers = [sorted(layer.parameters, key=lambda each: each.shape[0] == 1) for layer in self._layers]
        return [variable for layer in layers for variable in layer]

    def step(self, x: Array, labels: Array) -> float:
        expr = self._expr
        hidden = expr.const(x, [*x.shape], expr.NCHW)
        for i, layer in enumerate(self._layers):
            hidden = layer.forward(expr.relu(hidden) if i else hidden)
        classes = expr.const(labels.astype(np.int32), [len(labels)], expr.NCHW, expr.int)
        targets = expr.one_hot(classes, self._classes)
        loss = self._nn.loss.cross_entropy(expr.softmax(hidden, 1), targets)
        value = float(loss.read())
        self._optimizer.step(loss)
        return value

    def parameters(self) -> list[Array]:
        return [np.squeeze(variable.read()) for variable in self._variables()]


class TorchTrainer(Trainer):
    """The network in PyTorch; on a GPU, host memory is pinned, and events measure the time."""

    def __init__(self, widths: Sequence[int], parameters: Sequence[Array], device: str, copying: str) -> None:
        import torch

        self._torch, self._is_gpu = torch, device == "cuda"
        batch: list[Array] = [np.zeros((BATCH, widths[0]), "f4"), np.zeros(BATCH, "i8"), np.zeros((), "f4")]
        host = [torch.from_numpy(each.copy()) for each in (*batch, *parameters)]
        self._host = [each.pin_memory() for each in host] if self._is_gpu else host
        self._device = [each.to(device, copy=True) for each in host]
        self._parameters = [each.requires_grad_() for each in self._device[3:]]
        copied = [*range(3, len(host))] if copying == "step" else []
        self._inputs, self._outputs = [0, 1, *copied], [2, *copied]

    def step(self, x: Array, labels: Array) -> float:
        torch, functional, self._events = self._torch, self._torch.nn.functional, list[Any]()
        for tensor, values in zip(self._host, (x, labels), strict=False):
            tensor.copy_(torch.from_numpy(values))
        self._mark()
        self._copy(self._host, self._device, self._inputs)
        hidden = self._device[0]
        for i in range(0, len(self._parameters), 2):
            hidden = functional.linear(hidden.relu() if i else hidden, *self._parameters[i : i + 2])
        loss = functional.cross_entropy(hidden, self._device[1])
        gradients = torch.autograd.grad(loss, self._parameters)
        with torch.no_grad():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=RATE)
            self._device[2].copy_(loss)
        self._mark()
        self._copy(self._device, self._host, self._outputs)
        if self._is_gpu:
            torch.cuda.synchronize()
        return float(self._host[2])

    def _copy(self, sources: list[Any], targets: list[Any], indices: Sequence[int]) -> None:
        with self._torch.no_grad():
            for i in indices:
                targets[i].copy_(sources[i], non_blocking=True)
        self._mark()

    def _mark(self) -> None:
        if self._is_gpu:
            self._events.append(self._torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    def parameters(self) -> list[Array]:
        return [parameter.detach().cpu().numpy() for parameter in self._parameters]

    def pop_seconds(self) -> dict[str, float]:
        seconds = [begin.elapsed_time(end) * 1e-3 for begin, end in pairwise(self._events)]
        return dict(zip(PARTS, seconds, strict=self._is_gpu))


Make = Callable[[Sequence[int], Sequence[Array]], Trainer]


def make_rows(threads: int, missing: list[str]) -> Iterator[tuple[dict[str, Any], Make]]:
    """Yield descriptions and trainers of rows; append a sentence to `missing` for each that can't run."""
    processor = {"copying": "none", "device_type": "cpu", "device": processor_name(), "timed": True}
    yield {"row": "numpy", **processor}, NumpyTrainer
    try:
        import MNN

        MNN.expr.set_thread_number(threads)
        yield {"row": "mnn", **processor}, MnnTrainer
    except ImportError:
        missing.append("MNN was left out: pip install MNN.")
    try:
        import torch

        torch.set_num_threads(threads)
        yield {"row": "torch-cpu", **processor}, partial(TorchTrainer, device="cpu", copying="resident")
        if not torch.cuda.is_available():
            missing.append("torch-cuda was left out: PyTorch has no GPU.")
        for copying in COPYING[:2] if torch.cuda.is_available() else ():
            gpu = {"device_type": "gpu", "device": torch.cuda.get_device_name(), "timed": True}
            trainer = partial(TorchTrainer, device="cuda", copying=copying)
            yield {"row": "torch-cuda", "copying": copying, **gpu}, trainer
    except ImportError:
        missing.append("PyTorch was left out: pip install torch.")
    try:
        opencl = OpenCL(RATE)
    except NoOpenCLError as error:
        missing.append(str(error))
        return
    device = {"device_type": "gpu" if opencl.is_gpu else "cpu", "device": opencl.name}
    device |= {"shares_memory": opencl.shares_memory, "timed": opencl.is_gpu}
    for matmul, copying in product(("naive", "tiled"), COPYING):
        make = partial(OpenCLTrainer, opencl=opencl, batch_size=BATCH, matmul=matmul, copying=copying)
        yield {"row": f"opencl-{matmul}", "copying": copying, **device}, make


def processor_name() -> str:
    """Return the name of the processor."""
    text = file.read_text() if (file := Path("/proc/cpuinfo")).exists() else ""
    match = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def measure(
    description: Mapping[str, Any], make: Make, widths: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Return a row with its error and, if it is correct and the device is no software, its seconds."""
    random, start = np.random.default_rng(0), list[Array]()
    for n, m in pairwise(widths):
        start += [random.standard_normal((m, n)) * (2 / n) ** 0.5, random.standard_normal(m) * 0.1]
    start = [values.astype(np.float32) for values in start]
    x = random.standard_normal((CHECKED_STEPS, BATCH, widths[0])).astype(np.float32)
    labels = random.integers(0, widths[-1], (CHECKED_STEPS, BATCH))
    trainer, oracle = make(widths, start), NumpyTrainer(widths, [values.astype(float) for values in start])
    losses = [(trainer.step(*batch), oracle.step(*batch)) for batch in zip(x, labels, strict=True)]
    errors = [abs(value / expected - 1) for value, expected in losses]
    for values, expected, begin in zip(trainer.parameters(), oracle.parameters(), start, strict=True):
        errors.append(np.abs(values - expected).max() / np.abs(expected - begin).max())
    network, error = "-".join(map(str, widths)), float(np.max(errors))
    row = {"network": network, **description, "error": error, "correct": error <= TOLERANCE}
    if row.pop("timed") and row["correct"]:
        row["seconds"] = median_seconds(trainer, x[0], labels[0], repeats)
    return row


def median_seconds(trainer: Trainer, x: Array, labels: Array, repeats: int) -> dict[str, float]:
    """Return the median seconds of a step and of its parts."""
    rounds = []
    for _ in range(WARM_STEPS + repeats):
        trainer.pop_seconds()
        begin = time.perf_counter()
        trainer.step(x, labels)
        seconds = time.perf_counter() - begin
        rounds.append({"step": seconds, **trainer.pop_seconds()})
    return {part: statistics.median(each[part] for each in rounds[WARM_STEPS:]) for part in rounds[0]}


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Compare the rows of a GPU with the processor's fastest and with resident weights."""
    timed = [row for row in rows if "seconds" in row]
    steps = {(row["network"], row["row"], row["copying"]): row["seconds"]["step"] for row in timed}
    for row in timed:
        if row["device_type"] == "gpu":
            network, seconds = row["network"], row["seconds"]
            fastest = min(steps[key] for key in steps if key[0] == network and key[2] == "none")
            row["step_over_processor"] = seconds["step"] / fastest
            row["step_over_resident"] = seconds["step"] / steps[network, row["row"], "resident"]
            row["copy_share"] = (seconds["copy_in"] + seconds["copy_out"]) / seconds["step"]


def main() -> int:
    """Measure all rows, print them, and write them to a file; return the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    parser.add_argument("--repeats", type=int, default=50, help="timed steps")
    parser.add_argument("--threads", type=int, default=min(4, os.cpu_count() or 1), help="of MNN and PyTorch")
    arguments, missing = parser.parse_args(), list[str]()
    rows = [
        measure(description, make, widths, arguments.repeats)
        for description, make in make_rows(arguments.threads, missing)
        for widths in NETWORKS
    ]
    compare(rows)
    print(*map(json.dumps, rows), *missing, NOTE, sep="\n")
    if arguments.json:
        settings = {"tolerance": TOLERANCE, **vars(arguments)}
        content = {"rows": rows, "missing": missing, "note": NOTE, "settings": settings}
        arguments.json.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    return int(not all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
