"""Generation by ExecuTorch's own LLM runner, with the program that `prge publish --format llm` makes.

make_program(model_folder, folder / "llm", "8da4w", length=192)
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

from processes import Server, serving
from serve import LETTER

from prge.system.processes import MemoryPeak, watch_memory
from server_export.checkpoint.loading import load_model
from server_export.publishing.llm import LlmSpec, build_llm
from server_export.quiet_libraries import quiet_libraries

# The statistics have milliseconds.
_AGREEMENT, _TICKS = 0.05, 0.003
_LOOKED_SECONDS = 0.05


@dataclass(frozen=True)
class Generation:
    """Rates of one generation, by the clock."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@dataclass(frozen=True)
class StockRunner:
    """The runner in a process of its own. `idle` is the memory of that before it opened the program."""

    server: Server
    prompt: int
    new: int
    idle: MemoryPeak

    def measure(self) -> Generation:
        """Generate once.

        Raises:
            ValueError: the runner's statistics aren't what the clock says.
        """
        *told, first, rest = self.server.answer()
        for ours, theirs in zip((first, rest), told, strict=True):
            if abs(theirs - ours) > _AGREEMENT * ours + _TICKS:
                raise ValueError(f"the runner tells of {theirs} seconds, the clock of {ours}")
        return Generation(self.prompt / first, (self.new - 1) / rest)

    def memory(self, generations: int = 2) -> MemoryPeak:
        """What generating takes, the program with it."""
        return self.server.memory(generations)


def make_program(model: Path, folder: Path, scheme: str, length: int) -> None:
    """Make the runner's program of a model folder.

    A cache of `length` tokens, prompt and answer, is read by every call: the shortest is the fastest. The
    program's tokenizer knows one letter, which is token 0, and a name for every other token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    loaded = load_model(str(model))
    words = loaded.config.vocab_size
    # No token ends a text: the one that does is beyond the vocabulary.
    build_llm(folder, loaded, LlmSpec(length, scheme, None, (words,)))
    vocabulary = {LETTER: 0} | {f"<{number}>": number for number in range(1, words)}
    bytes_of_words = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False}
    content = {"version": "1.0", "added_tokens": [], "model": bytes_of_words}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def stock_runner(folder: Path, prompt: int, new: int, threads: int) -> Iterator[StockRunner]:
    """The runner with the program in a folder's `llm`, open and warm, for texts of these lengths."""
    with serving("stock-runner", folder.resolve(), prompt, new, threads) as server:
        with watch_memory(server.process.pid) as idle:
            time.sleep(_LOOKED_SECONDS)
        server.answer()
        yield StockRunner(server, prompt, new, idle)
