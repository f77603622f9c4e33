"""A process in which ExecuTorch's own LLM runner generates when it is asked: what stock_runner.py measures.

    python scripts/bench/serve_runner.py FOLDER PROMPT NEW THREADS

FOLDER holds `program.pte` and `tokenizer.json`. The first line of the standard input is answered before these
are opened. Every other one asks for a generation, greedy, of NEW tokens after a prompt of PROMPT letters. The
answer is a line of seconds: of the prompt and of the tokens after the first one by the runner's statistics,
then the same by the clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch  # noqa: F401 loads the libraries that the runner links to
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

from device_runner.engines.torch_runtime import set_threads

LETTER = "a"


def generate(runner: Any, prompt: int, new: int) -> tuple[float, float, float, float]:
    """One generation; raises ValueError where it isn't of the tokens that were asked for."""
    times: list[float] = []
    told: list[Any] = []
    settings = GenerationConfig(max_new_tokens=new, temperature=0.0, echo=False)
    runner.reset()
    begin = time.perf_counter()
    runner.generate(
        LETTER * prompt,
        settings,
        lambda _: times.append(time.perf_counter()),
        lambda stats: told.append(json.loads(stats.to_json_string())),
    )
    (facts,) = told
    seen = (facts["prompt_tokens"], len(times), facts["generated_tokens"])
    if seen != (prompt, new, new - 1):
        raise ValueError(
            f"{seen} tokens of the prompt, written and decoded, must be {(prompt, new, new - 1)}"
        )
    unit = facts["SCALING_FACTOR_UNITS_PER_SECOND"]
    first = (facts["prompt_eval_end_ms"] - facts["inference_start_ms"]) / unit
    rest = (facts["inference_end_ms"] - facts["prompt_eval_end_ms"]) / unit
    return first, rest, times[0] - begin, times[-1] - times[0]


def main() -> None:
    """Generate for every line of the standard input."""
    # The runner writes the text to the standard output too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    folder, *numbers = sys.argv[1:]
    prompt, new, threads = map(int, numbers)
    set_threads(threads)
    sys.stdin.readline()
    print(0, file=answers, flush=True)
    runner = None
    for _ in sys.stdin:
        runner = runner or TextLLMRunner(f"{folder}/program.pte", f"{folder}/tokenizer.json")
        print(*generate(runner, prompt, new), file=answers, flush=True)


if __name__ == "__main__":
    main()
