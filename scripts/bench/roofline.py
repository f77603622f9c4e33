"""What this machine allows: memory bandwidth, rates of matrix products, and the time they need by them.

A machine allows what it did at best, so the least of several times counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from limit import Product, matrix_products
from torch.export import ExportedProgram

from server_export.lower.lowering import lower

_CALLS = 60


@dataclass(frozen=True)
class ProductProgram:
    """A lowered program of matrix products, and the shapes of its inputs."""

    path: Path
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def write(cls, program: ExportedProgram, inputs: Sequence[torch.Tensor], path: Path) -> ProductProgram:
        """Lower a traced program to a file."""
        lower({"forward": program}).write(path)
        return cls(path, tuple(tuple(values.shape) for values in inputs))

    def load(self) -> Callable[[], float]:
        """The program in the engine, to be called for the seconds of one call on random numbers."""
        from executorch.extension.pybindings import _C

        program = _C._load_program(str(self.path))
        engine: Any = (program, program.load_method("forward"))  # the mapped file must outlive the method
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator) for shape in self.shapes]

        def call() -> float:
            start = time.perf_counter()
            engine[1].call(inputs, clone_outputs=False)
            return time.perf_counter() - start

        return call


@dataclass(frozen=True)
class Cost:
    """Floating point operations of a matrix product, bytes of its weight or 0."""

    operations: int
    weight_bytes: int


def memory_bandwidth(threads: int, megabytes: int = 128) -> float:
    """Bytes per second that this many threads read and write together, large arrays copied."""
    sources = [np.ones(megabytes << 18, np.float32) for _ in range(threads)]
    targets = [np.zeros_like(source) for source in sources]
    moved = 2 * sum(source.nbytes for source in sources)
    with ThreadPoolExecutor(threads) as pool:
        seconds = []
        for _ in range(9):
            start = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            seconds.append(time.perf_counter() - start)
    return moved / min(seconds)


@dataclass(frozen=True)
class LargestLayer:
    """A program's largest linear layer alone, its weight as near as it stays."""

    operations: int
    program: ProductProgram

    @classmethod
    def of(cls, program: ExportedProgram, folder: Path) -> LargestLayer:
        """Lower it to a file in `folder`."""

        def largest(products: list[Product]) -> list[Product]:
            layers = [product for product in products if product.weight_bytes]
            return [max(_repeated(layers), key=lambda product: product.operations)]

        single, inputs, (layer,) = matrix_products(program, largest)
        path = folder / "largest_layer.pte"
        return cls(layer.operations, ProductProgram.write(single, inputs, path))


def product_rates(layers: Sequence[LargestLayer]) -> list[float]:
    """Operations per second of every layer, measured in turns."""
    calls = [layer.program.load() for layer in layers]
    seconds = [[call() for call in calls] for _ in range(_CALLS)]
    return [
        layer.operations / min(column)
        for layer, column in zip(layers, zip(*seconds, strict=True), strict=True)
    ]


def least_seconds(products: Sequence[Cost], rate: float, bandwidth: float) -> float:
    """Time of products of which each is bound by its operations or by reading its weight."""
    return sum(max(product.operations / rate, product.weight_bytes / bandwidth) for product in products)


def possible_speedup(copies: int, one: float, together: float, call: float) -> float:
    """What one call with all copies can gain on a call for each.

    Args:
        copies: how many there are.
        one: least seconds of one copy's products.
        together: least seconds of the products of all copies.
        call: seconds that every call takes besides, whatever its size; less than nothing is noise.
    """
    return copies * (one + max(call, 0.0)) / (together + max(call, 0.0))


def _repeated(layers: Sequence[Product]) -> list[Product]:
    """Layers of a size that occurs more than once: a block's, not the vocabulary head."""
    sizes = [layer.weight_bytes for layer in layers]
    return [layer for layer in layers if sizes.count(layer.weight_bytes) > 1] or list(layers)
