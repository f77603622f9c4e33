"""A process in which a bundle's speaker generates when it is asked: what generate.py measures.

    python scripts/bench/serve_speaker.py FOLDER SEQUENCES PROMPT NEW THREADS

FOLDER holds `bundle`, and `llm` with a tokenizer that ends no text. The first line of the standard input is
answered before the bundle is opened. Every other one asks for greedy answers of NEW tokens after SEQUENCES
prompts of PROMPT tokens. The answer is a line of seconds: of the prompts, and of the tokens after the first
ones, with the choice of each and its text.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Backend

from device_runner.engines.speaking import ChainSpeaker, open_speaker
from prge.files.bundle import open_bundle
from prge.files.peft import read_peft
from prge.rows.tokenizer import Tokenizer
from prge.text.choice import Choice, ChoiceSettings
from prge.text.decoding import TextStream


def generate(
    speaker: ChainSpeaker, bundle: Path, tokenizer: Tokenizer, count: int, prompt: int, new: int
) -> tuple[float, float]:
    """Answers to so many prompts: seconds of these, and of what follows."""
    opened = open_bundle(bundle)
    adapter = read_peft(opened.adapter, opened.chain.modules, opened.adapter)
    sequences = [speaker.open(adapter) for _ in range(count)]
    prompts = np.random.default_rng(0).integers(0, speaker.vocabulary_size, (count, prompt))
    choices = {sequence: Choice(ChoiceSettings(temperature=0)) for sequence in sequences}
    texts = {sequence: TextStream(tokenizer) for sequence in sequences}
    begin = time.perf_counter()
    logits = {
        sequence: speaker.feed(sequence, tokens.tolist())
        for sequence, tokens in zip(sequences, prompts, strict=True)
    }
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(new - 1):
        chosen = {sequence: choices[sequence].choose(found, ()) for sequence, found in logits.items()}
        for sequence, token in chosen.items():
            texts[sequence].push(token)
        logits = speaker.step(chosen)
    rest = time.perf_counter() - begin
    for sequence in sequences:
        speaker.close(sequence)
    return first, rest


def main() -> None:
    """Generate for every line of the standard input."""
    folder, *numbers = sys.argv[1:]
    count, prompt, new, threads = map(int, numbers)
    bundle, speaker = Path(folder, "bundle"), None
    tokenizer = Tokenizer(Backend.from_file(str(Path(folder, "llm", "tokenizer.json"))))
    sys.stdin.readline()
    print(0, flush=True)
    for _ in sys.stdin:
        speaker = speaker or open_speaker(open_bundle(bundle), threads, "native", slots=count)
        print(*generate(speaker, bundle, tokenizer, count, prompt, new), flush=True)


if __name__ == "__main__":
    main()
