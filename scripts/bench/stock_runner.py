"""Generation by ExecuTorch's own LLM runner, with the program that `prge publish --format llm` makes.

    python scripts/bench/stock_runner.py --model smollm2-135m --quantize 8da4w --json runner.json

A model has random weights, and nothing ends its answers. To compare the runner with another engine:

    program = make_program(model_folder, folder, "8da4w", length=512)
    with stock_runner(program, prompt=128, new=64, threads=2) as runner:
        for _ in range(rounds):
            generation = runner.measure()  # then a round of the other engine
        anonymous_mb = runner.memory().anonymous_mb - runner.idle.anonymous_mb

Prints JSON: medians of `prefill_tokens_per_second`, of a prompt up to its first new token, and of
`decode_tokens_per_second`, of the tokens after that; the process's memory, and that before it opened the
program, when it held its libraries alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import serve_runner
from processes import Peak, Server, serving, watched
from reports import circumstances, parser_of, report
from timing import ROOT

from server_export.model.random_models import CONFIGURATIONS, save_random_model

# The statistics have milliseconds.
_AGREEMENT, _TICKS = 0.05, 0.003


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
    idle: Peak

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

    def memory(self, generations: int = 2) -> Peak:
        """What generating takes, the program with it."""
        return self.server.memory(generations)


def make_program(model: Path, folder: Path, scheme: str, length: int) -> Path:
    """Make the runner's program of a model folder, in a process of its own; returns `folder`.

    Its tokenizer knows one letter, which is token 0, and a name for every other token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    code = (
        "import sys; from stock_runner import _make_program; "
        "_make_program(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))"
    )
    words = [sys.executable, "-c", code, str(model), str(folder), scheme, str(length)]
    paths = f"{ROOT}:{Path(__file__).parent}"
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": paths}, stdout=sys.stderr)
    return folder


def _make_program(model: str, folder: str, scheme: str, length: int) -> None:
    from server_export.model.loading import load_model
    from server_export.publishing.llm import LlmSpec, build_llm
    from server_export.quiet import quiet_libraries

    quiet_libraries()
    loaded = load_model(model)
    words = loaded.config.vocab_size
    # No token ends a text: the one that does is beyond the vocabulary.
    build_llm(Path(folder), loaded, LlmSpec(length, scheme, None, (words,)))
    vocabulary = {serve_runner.LETTER: 0} | {f"<{number}>": number for number in range(1, words)}
    bytes_of_words = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False}
    content = {"version": "1.0", "added_tokens": [], "model": bytes_of_words}
    Path(folder, "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def stock_runner(program: Path, prompt: int, new: int, threads: int) -> Iterator[StockRunner]:
    """The runner with a program of `make_program` open and warm, for prompts and answers of these tokens."""
    words = [sys.executable, serve_runner.__file__, str(program), *map(str, (prompt, new, threads))]
    with serving(words, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, ROOT) as server:
        with watched(server.process.pid) as idle:
            server.answer()
        server.answer()
        yield StockRunner(server, prompt, new, idle)


def main() -> None:
    """Read the flags, measure, print JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=CONFIGURATIONS, default="smollm2-135m")
    parser.add_argument("--quantize", default="8da4w")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        save_random_model(Path(name, "model"), arguments.model, arguments.layers)
        program = make_program(Path(name, "model"), Path(name, "llm"), arguments.quantize, arguments.length)
        with stock_runner(program, arguments.prompt, arguments.new, arguments.threads) as runner:
            generations = [asdict(runner.measure()) for _ in range(arguments.repeats)]
            figures: dict[str, Any] = {
                rate: statistics.median(generation[rate] for generation in generations)
                for rate in generations[0]
            }
            figures |= {"memory": asdict(runner.memory()), "idle": asdict(runner.idle)}
    report({**figures, **circumstances(arguments)}, arguments.json)


if __name__ == "__main__":
    main()
