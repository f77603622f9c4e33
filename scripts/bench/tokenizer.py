"""Measure the memory of a tokenizer, which a run holds while it reads rows and frees before it trains.

    python scripts/bench/tokenizer.py --tokenizer TOKENIZER.json --tokens 128256 151936 262144

TOKENIZER.json has the type BPE. It gets random merges until it has as many tokens as the tokenizers of Llama
3, Qwen2.5 and Gemma 3. Prints JSON by number of tokens: resident memory of the process in MB, with mapped
pages: `before`, `reading` (the peak) and `freed`.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import tempfile
from pathlib import Path

from reports import make_parser, report

import device_runner.run  # noqa: F401  a run has imported this before it reads rows
from prge.data.tokenization.tokenizer_check import read_tokenizer
from prge.system.memory import PeakMemory, release_freed_memory, resident_bytes

LONGEST = 14  # characters of a new token
TEXTS = 1000


def main() -> None:
    """Measure every number of tokens in a process of its own."""
    parser = make_parser(__doc__, tokens=[128_256, 151_936, 262_144])
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    arguments = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in arguments.tokens:
            path = grown(arguments.tokenizer, count, Path(folder))
            with multiprocessing.get_context("spawn").Pool(1) as processes:
                figures[f"{count}"] = processes.apply(measure, (path,))
    report(figures, arguments)


def grown(tokenizer: Path, count: int, folder: Path) -> Path:
    """Write a tokenizer with random merges in addition, and return its path."""
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    names, generator = [*vocabulary], random.Random(0)
    end = 1 + max(*vocabulary.values(), *(token["id"] for token in content["added_tokens"]))
    while end < count:
        pair = generator.sample(names, 2)
        name = "".join(pair)
        if len(name) <= LONGEST and name not in vocabulary:
            vocabulary[name], end = end, end + 1
            merges.append(pair)
    path = folder / f"{count}.json"
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def measure(path: Path) -> dict[str, float]:
    """Return the memory of this process before, while and after it encodes texts with a tokenizer."""
    before = resident_bytes() or 0
    tokenizer = read_tokenizer(path.read_bytes(), path)
    for number in range(TEXTS):
        tokenizer.encode(f"A sentence of text, number {number}.")
    reading = PeakMemory().peak or 0
    del tokenizer
    release_freed_memory()
    freed = resident_bytes() or 0
    return {"before": before / 1e6, "reading": reading / 1e6, "freed": freed / 1e6}


if __name__ == "__main__":
    main()
