"""Compare generation by a bundle with ExecuTorch's LLM runner, and with reading the weights once.

    python scripts/bench/generate.py --models smollm2-135m tinyllama-1.1b --json generate.json

A model has random weights. The runner's program is that of `prge publish --format llm`, with the bundle's
quantized layers and adapter; its cache has exactly as many tokens as needed. A second program lacks the
adapter. Both engines generate equal lengths in turns, each in a process of its own; ratios are medians over
rounds. Prints JSON by model:

    tokens_over_stock, prefill_over_stock   tokens per second of one sequence, over those of the runner
    tokens_over_base, prefill_over_base     the same for the program without the adapter
    decode_over_bandwidth                   time of a token over the time to read all packed weights once
    batch8_over_1                           tokens per second of 8 sequences over those of one
    lookup_over_plain, _over_stock          tokens per second with drafts for a text that repeats its prompt,
                                            over those without drafts, and over the runner's
    lookup_over_plain_at_worst              the same for a text whose drafts are wrong
    anonymous_mb                            of the process that generates the end of `--context` tokens; its
                                            weights are mapped
    memory, stock_memory                    of the processes that are compared
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from processes import start_method
from reports import make_parser, measure_in_turns, median, report_models
from stock_runner import make_program, stock_runner
from timing import export

from prge.formats.bundle import open_bundle
from prge.formats.signatures import DECODE, FORWARD, PREFILL
from server_export.checkpoint.random_models import CONFIGURATIONS
from server_export.quantize.bundle_layers import rounded_layers_of

_SEQUENCES = 8


def bench(arguments: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Measure both engines on the model in a folder."""
    flags = ["--quantize", arguments.quantize, "--roles", FORWARD, PREFILL, DECODE]
    export(folder / "model", folder / "bundle", *flags, "--context", str(arguments.context))
    prompt, new, threads = arguments.prompt, arguments.new, arguments.threads
    bundle = open_bundle(folder / "bundle")
    common: dict[str, Any] = {"scheme": arguments.quantize, "layers": rounded_layers_of(bundle)}
    make_program(folder / "model", folder, prompt + new, adapter=bundle.adapter, **common)
    make_program(folder / "model", folder / "base", prompt + new, **common)
    with (
        start_method("generator", folder, 1, prompt, new, threads) as one,
        start_method("generator", folder, _SEQUENCES, prompt, new, threads) as eight,
        start_method("drafts", folder, prompt, new, threads) as drafts,
        stock_runner(folder, prompt, new, threads) as stock,
        stock_runner(folder / "base", prompt, new, threads) as base,
    ):
        for process in (one, eight, drafts):
            process.take_step()
        # The packed weights that a token needs; embeddings are not packed.
        packed = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
        bandwidth = Bandwidth(packed, threads)

        def rates() -> dict[str, float]:
            runners = {"stock": stock.measure(), "base": base.measure()}
            (first, rest), (_, decode_eight) = one.take_step(), eight.take_step()
            plain, lookup, *worst = drafts.take_step()
            rate, read_seconds = (new - 1) / rest, bandwidth.seconds()
            return {
                **{f"tokens_over_{name}": rate / each.decode for name, each in runners.items()},
                **{f"prefill_over_{name}": prompt / first / each.prefill for name, each in runners.items()},
                "decode_over_bandwidth": 1 / rate / read_seconds,
                "batch8_over_1": _SEQUENCES * (new - 1) / decode_eight / rate,
                "lookup_over_plain": plain / lookup,
                "lookup_over_stock": (new - 1) / lookup / runners["stock"].decode,
                "lookup_over_plain_at_worst": worst[0] / worst[1],
                "tokens_per_second": rate,
                "prefill_tokens_per_second": prompt / first,
                "packed_gb_per_second": packed / 1e9 / read_seconds,
            }

        rounds = [each["rates"] for each in measure_in_turns({"rates": rates}, arguments.repeats)]
        figures: dict[str, Any] = {name: median(rounds, name) for name in rounds[0]}
        figures |= {"memory": asdict(one.memory(1)), "stock_memory": asdict(stock.memory(1))}
    with start_method("generator", folder, 1, arguments.context - new, new, threads) as long:
        long.take_step()
        figures["anonymous_mb"] = long.memory(1).anonymous_mb
    return figures


class Bandwidth:
    """Measures the time in which several threads read a number of bytes, each an equal part."""

    def __init__(self, size: int, threads: int) -> None:
        self._parts = np.array_split(np.ones(size // 8, np.float64), threads)
        self._pool = ThreadPoolExecutor(threads)

    def seconds(self, times: int = 5) -> float:
        """Return the minimum over several measurements."""
        seconds = []
        for _ in range(times):
            begin = time.perf_counter()
            list(self._pool.map(np.sum, self._parts))
            seconds.append(time.perf_counter() - begin)
        return min(seconds)


def main() -> None:
    """Parse the flags, measure and print JSON."""
    parser = make_parser(__doc__, quantize="8da4w", prompt=128, new=128, context=1024, threads=2, repeats=7)
    models = ["smollm2-135m", "tinyllama-1.1b"]
    parser.add_argument("--models", nargs="+", choices=CONFIGURATIONS, default=models)
    report_models(parser.parse_args(), bench)


if __name__ == "__main__":
    main()
