"""Text by a bundle's speaker against ExecuTorch's own LLM runner, and against reading the weights once.

    python scripts/bench/generate.py --models smollm2-135m tinyllama-1.1b --json generate.json

A model has random weights, which are the bundle's and those of the program that `prge publish --format llm`
makes, with a cache of just the tokens that are needed. Both engines answer the same lengths in turns, each in
a process of its own; ratios are medians over rounds. Prints JSON by model:

    tokens_over_stock, prefill_over_stock   tokens a second, of one sequence, over those of the runner
    decode_over_bandwidth                   time of a token over that of reading all packed weights once
    batch8_over_1                           tokens a second of 8 sequences over those of one
    anonymous_mb                            of the process that writes the end of `--context` tokens; its
                                            weights are mapped
    memory, stock_memory                    of the processes that are compared
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import serve_speaker
from processes import Server, serving
from reports import circumstances, parser_of, report
from stock_runner import make_program, stock_runner
from timing import ROOT, export

from prge.files.signatures import DECODE, PREFILL, STACK
from server_export.model.random_models import CONFIGURATIONS, save_random_model

_SEQUENCES = 8


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Both engines on one model."""
    save_random_model(folder / "model", model, arguments.layers)
    flags = ["--quantize", arguments.quantize, "--roles", STACK, PREFILL, DECODE]
    export(folder / "model", folder / "bundle", *flags, "--context", str(arguments.context))
    prompt, new, threads = arguments.prompt, arguments.new, arguments.threads
    make_program(folder / "model", folder / "llm", arguments.quantize, prompt + new)
    rounds = []
    with (
        speaker(folder, 1, prompt, new, threads) as one,
        speaker(folder, _SEQUENCES, prompt, new, threads) as several,
        stock_runner(folder / "llm", prompt, new, threads) as stock,
    ):
        bandwidth = Bandwidth(_packed_bytes(folder), threads)
        for _ in range(arguments.repeats):
            theirs = stock.measure()
            first, rest = one.answer()
            _, of_several = several.answer()
            rate = (new - 1) / rest
            rounds.append(
                {
                    "tokens_over_stock": rate / theirs.decode_tokens_per_second,
                    "prefill_over_stock": prompt / first / theirs.prefill_tokens_per_second,
                    "decode_over_bandwidth": 1 / rate / bandwidth.seconds(),
                    "batch8_over_1": _SEQUENCES * (new - 1) / of_several / rate,
                    "tokens_per_second": rate,
                    "prefill_tokens_per_second": prompt / first,
                    "packed_gb_per_second": bandwidth.size / 1e9 / bandwidth.seconds(),
                }
            )
        figures: dict[str, Any] = {
            name: statistics.median(round[name] for round in rounds) for name in rounds[0]
        }
        figures |= {"memory": asdict(one.memory(1)), "stock_memory": asdict(stock.memory(1))}
    with speaker(folder, 1, arguments.context - new, new, threads) as long:
        figures["anonymous_mb"] = long.memory(1).anonymous_mb
    return figures


@contextmanager
def speaker(folder: Path, sequences: int, prompt: int, new: int, threads: int) -> Iterator[Server]:
    """A process with a bundle's speaker, open and warm."""
    words = [serve_speaker.__file__, folder, sequences, prompt, new, threads]
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with serving([sys.executable, *map(str, words)], environment, ROOT) as server:
        server.answer()
        server.answer()
        yield server


def _packed_bytes(folder: Path) -> int:
    """Bytes of the packed weights that a token needs: embeddings are packed nowhere."""
    return sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())


class Bandwidth:
    """How long as many threads as an engine's take to read so many bytes, each its part."""

    def __init__(self, size: int, threads: int) -> None:
        self.size = size
        self._parts = np.array_split(np.ones(size // 8, np.float64), threads)
        self._pool = ThreadPoolExecutor(threads)

    def seconds(self, times: int = 5) -> float:
        """The least of some times."""
        found = []
        for _ in range(times):
            begin = time.perf_counter()
            list(self._pool.map(np.sum, self._parts))
            found.append(time.perf_counter() - begin)
        return min(found)


def main() -> None:
    """Read the flags, measure, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=CONFIGURATIONS, default=["smollm2-135m", "tinyllama-1.1b"]
    )
    parser.add_argument("--quantize", default="8da4w")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as name:
            figures[model] = bench(arguments, model, Path(name))
    report({**figures, **circumstances(arguments)}, arguments.json)


if __name__ == "__main__":
    main()
