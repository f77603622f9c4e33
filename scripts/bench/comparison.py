"""Measure the cost of comparing an export with the model, and the smallest weight change that it detects.

    python scripts/bench/comparison.py --models smollm2-135m tinyllama-1.1b --json comparison.json

A model is an architecture with random weights. Its blocks are compared with transformers' model as in every
export, then with one changed weight, by a factor of eight more each time, until the comparison fails. Prints
JSON: by model `difference` and `allowed`, `seconds`, `processor_seconds`, `peak_mb` of the comparison and
`before_mb` of the process after it has traced the model; by changed weight its standard `deviation`, the
first change that was `noticed`, and the `message` that an export would end with.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from reports import make_parser, report_models

from prge.errors import Refusal
from prge.system.memory import PeakMemory, release_freed_memory
from server_export.check.model import ModelComparison, compare_with_model
from server_export.checkpoint.random_models import CONFIGURATIONS
from server_export.checkpoint.weights import CheckpointWeights
from server_export.model.chain import ModelChain
from server_export.settings import ExportConfig
from server_export.source import open_source

_CHANGED = ("o_proj.weight", "down_proj.weight", "q_proj.weight")
_STEP, _LARGEST = 8.0, 16.0


class _ChangedWeights(CheckpointWeights):
    """Weights of a checkpoint with one changed number."""

    def __init__(self, weights: CheckpointWeights, name: str, change: float) -> None:
        vars(self).update(vars(weights))
        self._name, self._change = name, change

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """See `CheckpointWeights`."""
        tensor = super().read(name, rows)
        if name == self._name:
            tensor = tensor.clone()
            tensor[tensor.shape[0] // 3, tensor.shape[1] // 3] += self._change
        return tensor


def _compare(chain: ModelChain, model: Path) -> ModelComparison:
    return compare_with_model(chain, str(model), None)


def _measure(chain: ModelChain, model: Path) -> dict[str, Any]:
    release_freed_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
    before, begin, processor = PeakMemory().peak, time.monotonic(), time.process_time()
    comparison = _compare(chain, model)
    return {
        "difference": comparison.difference,
        "allowed": comparison.allowed,
        "seconds": time.monotonic() - begin,
        "processor_seconds": time.process_time() - processor,
        "before_mb": (before or 0) / 1e6,
        "peak_mb": (PeakMemory().peak or 0) / 1e6,
    }


def _find_noticed_change(chain: ModelChain, model: Path, name: str) -> dict[str, Any]:
    """Return the first change of one weight of the blocks that ends an export."""
    deviation = float(chain.weights.read(name).std())
    change = _STEP * deviation
    while change < _LARGEST:
        changed = replace(chain, weights=_ChangedWeights(chain.weights, name, change))
        try:
            _compare(changed, model)
        except Refusal as refusal:
            return {"deviation": deviation, "noticed": change, "code": refusal.code, "message": str(refusal)}
        change *= _STEP
    return {"deviation": deviation, "noticed": None}


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Measure one comparison, then change weights of a middle layer in turn."""
    torch.set_num_threads(arguments.threads)
    config = ExportConfig(str(folder / "model"), folder / "bundle", quantize=arguments.quantize)
    source = open_source(config).with_weights()
    chain = source.chain(config.quantize, source.longest)
    figures = _measure(chain, folder / "model")
    names = [
        name.removeprefix("model.").replace(".base.", ".") for block in chain.blocks for name in block.weights
    ]
    for ending in _CHANGED:
        matching = [name for name in names if name.endswith(ending)]
        if matching:
            name = matching[len(matching) // 2]
            figures[name] = _find_noticed_change(chain, folder / "model", name)
    return figures


def main() -> None:
    """Parse the flags, compare and print JSON."""
    parser = make_parser(__doc__, quantize="8da4w", threads=1)
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=["tinyllama-1.1b"])
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
