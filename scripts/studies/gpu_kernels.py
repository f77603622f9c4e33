"""Training of a small network in kernels of OpenCL (gpu_kernels.cl), for gpu_training.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
PARTS = ("copy_in", "compute", "copy_out")
# What a kernel for products does with its sums.
STORES = ("BIAS", "BIAS_RELU", "RELU_GRADIENT", "UPDATE")
NO_DEVICE = (
    "OpenCL was left out: pyopencl finds no device. For a GPU of NVIDIA, set the variable OCL_ICD_VENDORS to "
    "libnvidia-opencl.so.1, a library of its driver. Debian's pocl-opencl-icd computes on the processor."
)


class NoOpenCLError(Exception):
    """Says that OpenCL is missing, and what to install."""


class Call(NamedTuple):
    """A kernel, its buffers in order, those that it writes, its numbers, and its groups in x and y."""

    kernel: str
    buffers: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: tuple[int, ...]
    groups: tuple[int, int]


def plan_step(widths: Sequence[int], batch_size: int, matmul: str) -> list[Call]:
    """Return the kernels of a step: layers `w0`, `b0`, ..., values `h0`, ..., gradients `g1`, ..."""
    calls, last = list[Call](), len(widths) - 1

    def product(a: str, b: str, extra: str, c: str, store: str, sizes: tuple[int, ...]) -> None:
        groups = -(-sizes[1] // 16), -(-sizes[0] // 16)
        calls.append(Call(f"matmul_{matmul}", (a, b, extra, c), (c,), (*sizes, STORES.index(store)), groups))

    for i, (n, m) in enumerate(pairwise(widths)):
        store = "BIAS" if i == last - 1 else "BIAS_RELU"
        product(f"h{i}", f"w{i}", f"b{i}", f"h{i + 1}", store, (batch_size, m, n, n, 1, 1, n))
    outputs, sizes = ("losses", f"g{last}"), (batch_size, widths[-1])
    calls.append(Call("cross_entropy", (f"h{last}", "labels", *outputs), outputs, sizes, (1, batch_size)))
    for i in reversed(range(last)):
        n, m, g = widths[i], widths[i + 1], f"g{i + 1}"
        if i:
            product(g, f"w{i}", f"h{i}", f"g{i}", "RELU_GRADIENT", (batch_size, n, m, m, 1, n, 1))
        product(g, f"h{i}", g, f"w{i}", "UPDATE", (m, n, batch_size, 1, m, n, 1))
        calls.append(Call("update_bias", (g, f"b{i}"), (f"b{i}",), (batch_size, m), (-(-m // 256), 1)))
    return calls


class OpenCL:
    """The first GPU of OpenCL, or else its first device, with a queue and the kernels."""

    def __init__(self, rate: float) -> None:
        try:
            import pyopencl as cl
        except ImportError:
            raise NoOpenCLError("OpenCL was left out: pip install pyopencl.") from None
        try:
            devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
        except cl.Error:
            devices = []
        if not devices:
            raise NoOpenCLError(NO_DEVICE)
        device = min(devices, key=lambda each: not each.type & cl.device_type.GPU)
        self.name, self.is_gpu = device.name.strip(), bool(device.type & cl.device_type.GPU)
        self.shares_memory = bool(device.host_unified_memory)
        self.cl, self.context = cl, cl.Context([device])
        self.queue = cl.CommandQueue(self.context, properties=cl.command_queue_properties.PROFILING_ENABLE)
        options = [f"-DRATE={rate}f", *(f"-D{name}={i}" for i, name in enumerate(STORES))]
        source = Path(__file__).with_suffix(".cl").read_text(encoding="utf-8")
        self.program = cl.Program(self.context, source).build(options=options)


class OpenCLTrainer:
    """A network in kernels of OpenCL; see the docstring of gpu_training.py for `copying`."""

    def __init__(
        self,
        widths: Sequence[int],
        parameters: Sequence[Array],
        opencl: OpenCL,
        batch_size: int,
        matmul: str,
        copying: str,
    ) -> None:
        cl = opencl.cl
        names = [f"{letter}{i}" for i in range(len(widths) - 1) for letter in "wb"]
        self._weights = {name: values.copy() for name, values in zip(names, parameters, strict=True)}
        self._host: dict[str, Array] = {
            **self._weights,
            "labels": np.zeros(batch_size, np.int32),
            "losses": np.zeros(batch_size, np.float32),
        }
        for i, width in enumerate(widths):
            for letter in "hg":
                self._host[f"{letter}{i}"] = np.zeros((batch_size, width), np.float32)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        self._buffers = {
            name: cl.Buffer(opencl.context, flags, hostbuf=values) for name, values in self._host.items()
        }
        self._calls = []
        for call in plan_step(widths, batch_size, matmul):
            kernel = cl.Kernel(opencl.program, call.kernel)
            kernel.set_args(*map(self._buffers.get, call.buffers), *map(np.int32, call.numbers))
            self._calls.append((call, kernel))
        self._cl, self._queue, self._copying = cl, opencl.queue, copying
        self._events: list[tuple[str, Any]] = []

    def step(self, x: Array, labels: Array) -> float:
        """Take a step on a batch; return its mean loss."""
        self._host["h0"][:], self._host["labels"][:] = x, labels
        is_each_kernel = self._copying == "kernel"
        weights = self._weights if self._copying == "step" else ()
        self._write(() if is_each_kernel else ("h0", "labels", *weights))
        for call, kernel in self._calls:
            if is_each_kernel:  # weights are operands of their own update
                self._write(
                    name for name in call.buffers if name not in call.outputs or name in self._weights
                )
            size = tuple(16 * number for number in call.groups)
            event = self._cl.enqueue_nd_range_kernel(self._queue, kernel, size, (16, 16))
            self._events.append(("compute", event))
            self._read(call.outputs if is_each_kernel else ())
        self._read(() if is_each_kernel else ("losses", *weights))
        return float(self._host["losses"].mean())

    def _write(self, names: Iterable[str]) -> None:
        for name in dict.fromkeys(names):
            values = self._host[name]
            event = self._cl.enqueue_copy(self._queue, self._buffers[name], values, is_blocking=False)
            self._events.append(("copy_in", event))

    def _read(self, names: Iterable[str]) -> None:
        for name in names:
            event = self._cl.enqueue_copy(self._queue, self._host[name], self._buffers[name])
            self._events.append(("copy_out", event))

    def parameters(self) -> list[Array]:
        """Return the weight and the bias of each layer, the first layer first."""
        self._read(self._weights)
        return [*self._weights.values()]

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds that the device spent on copies and kernels since the last call."""
        self._queue.finish()
        seconds = dict.fromkeys(PARTS, 0.0)
        for part, event in self._events:
            seconds[part] += (event.profile.end - event.profile.start) * 1e-9
        self._events.clear()
        return seconds
