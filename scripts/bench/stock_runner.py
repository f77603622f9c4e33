"""Measure generation by ExecuTorch's LLM runner, with the program of `prge publish --format llm`.

make_program(model_folder, folder, length=192, scheme="8da4w")
with stock_runner(folder, prompt=128, new=64, threads=2) as runner:
    for _ in range(rounds):
        generation = runner.measure()  # then a round of the other engine
    anonymous_mb = runner.memory().anonymous_mb - runner.idle.anonymous_mb
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import Server, start_method
from serve import LETTER

from prge.formats.peft import read_lora
from prge.system.processes import MemoryPeak, watch_memory
from server_export.checkpoint.loading import load_model
from server_export.publishing.llm import LlmSpec, build_llm
from server_export.publishing.module_quantization import attach_adapter
from server_export.quantize.quantization import NO_LAYERS, BundleLayers
from server_export.quiet_libraries import quiet_libraries

# The statistics have a resolution of milliseconds.
_AGREEMENT, _TICKS = 0.05, 0.003
_LOOKED_SECONDS = 0.05


@dataclass(frozen=True)
class Generation:
    """Tokens per second of the prompt and of the tokens after the first one, by the clock."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class StockRunner:
    """The runner in a process of its own; `idle` is the process's memory before it opens the program."""

    server: Server
    prompt: int
    new: int
    idle: MemoryPeak

    def measure(self) -> Generation:
        """Generate once and return the rates.

        Raises:
            ValueError: the runner's statistics disagree with the clock.
        """
        *reported, first, decode = self.server.take_step()
        for measured, reported_seconds in zip((first, decode), reported, strict=True):
            if abs(reported_seconds - measured) > _AGREEMENT * measured + _TICKS:
                raise ValueError(f"the runner reports {reported_seconds} seconds, the clock {measured}")
        return Generation(self.prompt / first, (self.new - 1) / decode)

    def memory(self, generations: int = 2) -> MemoryPeak:
        """Return the peak memory of generating, including the program."""
        return self.server.memory(generations)


def make_program(
    model: Path,
    folder: Path,
    length: int,
    *,
    scheme: str,
    layers: BundleLayers = NO_LAYERS,
    adapter: Path | None = None,
) -> None:
    """Write the runner's program for a model folder to the folder `llm` in `folder`.

    Every call reads a cache of `length` tokens, prompt and completion: the shortest is the fastest. The
    program's tokenizer has one letter, token 0, and a name for every other token. `layers` are the quantized
    layers of a bundle, and `adapter` is an adapter that the program has.
    """
    llm = folder / "llm"
    llm.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    loaded = load_model(str(model))
    if adapter is not None:
        attach_adapter(loaded.model, read_lora(adapter))
    vocabulary_size = loaded.config.vocab_size
    # No token ends a text: the end-of-sequence id is beyond the vocabulary.
    build_llm(llm, loaded, LlmSpec(length, scheme, None, (vocabulary_size,)), layers)
    vocabulary = {LETTER: 0} | {f"<{number}>": number for number in range(1, vocabulary_size)}
    bpe_model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False}
    content = {"version": "1.0", "added_tokens": [], "model": bpe_model}
    (llm / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def stock_runner(folder: Path, prompt: int, new: int, threads: int) -> Iterator[StockRunner]:
    """Start the runner with the program in a folder's `llm`, open and warm, for texts of these lengths."""
    with start_method("stock-runner", folder.resolve(), prompt, new, threads) as server:
        with watch_memory(server.process.pid) as idle:
            time.sleep(_LOOKED_SECONDS)
        server.take_step()
        yield StockRunner(server, prompt, new, idle)
