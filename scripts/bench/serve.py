"""A process that takes steps, or writes texts, when it is asked: what the benchmarks compare.

    python scripts/bench/serve.py METHOD FOLDER NUMBER...

`--learn` instead measures a server that learns, see learning.py.

Every line of the standard input is answered by a line of numbers. The first one asks for nothing: the process
has its libraries, and has opened nothing yet. Methods on the engine import what a device has, and no more.

    a method of ENGINE, pytorch-*   ROWS TOKENS THREADS QUERIES [MEMORY]: seconds and loss of a step of
                                    FOLDER's `bundle`, or in PyTorch of its `model`
    speaker       SEQUENCES PROMPT NEW THREADS: greedy texts by `bundle`; seconds of the prompts, and of the
                  tokens after the first ones, with the choice of each and its text. `llm` has a tokenizer
                  that ends no text
    drafts        PROMPT NEW THREADS: seconds of the tokens after the first one of a text that repeats its
                  prompt, token by token and with drafts, and the same of a text of few words in no order
    stock-runner  PROMPT NEW THREADS: a greedy text by ExecuTorch's own LLM runner on `llm`; the same
                  seconds by its statistics, then by the clock
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# The estimator of a step, and its memory: what is given, the weights of one block, or of all and no more.
ENGINE: dict[str, tuple[Any, str]] = {
    "blocks": ("exact", ""),
    "recomputed": ("exact", "weights"),
    "least": ("exact", "least"),
    "tangent": ("tangent", ""),
    "tangent-least": ("tangent", "least"),
    "prge": ("antithetic", ""),
    "prge-least": ("antithetic", "least"),
}
ADAPTED, RANK = ("q_proj", "v_proj"), 8
LETTER = "a"
Answers = Iterator[Sequence[float]]


def engine_steps(
    method: str, folder: Path, rows: int, tokens: int, threads: int, queries: int, memory: int | None = None
) -> Answers:
    """Steps of a bundle."""
    from timing import all_loaded, least_loaded, timed_step

    bundle = folder / "bundle"
    yield ()
    estimator, kind = ENGINE[method]
    loaded = {"least": least_loaded, "weights": all_loaded}[kind](bundle) if kind else memory
    step = timed_step(bundle, estimator, rows, tokens, threads, queries, loaded=loaded)
    while True:
        yield step.with_loss()


def pytorch_steps(method: str, folder: Path, rows: int, tokens: int, threads: int, *_: int) -> Answers:
    """Steps of PyTorch and PEFT."""
    dtype = "bfloat16" if "bf16" in method else "float32"
    yield from peft_steps(folder, dtype, rows, tokens, threads, RANK, ADAPTED, "checkpointing" in method)


def peft_steps(
    folder: Path,
    dtype: str,
    rows: int,
    tokens: int,
    threads: int,
    rank: int,
    layers: Sequence[str] | str,
    checkpointing: bool = False,
) -> Answers:
    """Steps of PyTorch on a folder's `model` with PEFT's LoRA and AdamW."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    yield ()
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, dtype))
    named = layers if isinstance(layers, str) else [*layers]
    tuned = get_peft_model(base, LoraConfig(r=rank, target_modules=named))
    tuned.train()
    if checkpointing:
        tuned.enable_input_require_grads()
        tuned.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(parameter for parameter in tuned.parameters() if parameter.requires_grad)
    torch.manual_seed(0)
    inputs = torch.randint(0, base.config.vocab_size, (rows, tokens))
    while True:
        begin = time.perf_counter()
        loss = tuned(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found = loss.item()
        yield time.perf_counter() - begin, found


def speaker_texts(method: str, folder: Path, count: int, prompt: int, new: int, threads: int) -> Answers:
    """Texts by a bundle's speaker."""
    import numpy as np
    from tokenizers import Tokenizer as Backend

    from device_runner.engines.generator import open_speaker
    from prge.data.tokenization.tokenizer import Tokenizer
    from prge.formats.bundle import open_bundle
    from prge.formats.peft import read_peft
    from prge.generation.sampling import SamplingSettings, TokenSampler
    from prge.generation.text_stream import TextStream

    tokenizer = Tokenizer(Backend.from_file(str(folder / "llm" / "tokenizer.json")))
    yield ()
    opened = open_bundle(folder / "bundle")
    speaker = open_speaker(opened, threads=threads, engine="native", slots=count)
    adapter = read_peft(opened.adapter, opened.chain.modules)
    prompts = np.random.default_rng(0).integers(0, speaker.vocabulary_size, (count, prompt)).tolist()
    while True:
        sequences = [speaker.open(adapter) for _ in range(count)]
        choices = {sequence: TokenSampler(SamplingSettings(temperature=0)) for sequence in sequences}
        texts = {sequence: TextStream(tokenizer) for sequence in sequences}
        begin = time.perf_counter()
        logits = {each: speaker.feed(each, tokens) for each, tokens in zip(sequences, prompts, strict=True)}
        first = time.perf_counter()
        for _ in range(new - 1):
            chosen = {sequence: choices[sequence].sample(found, ()) for sequence, found in logits.items()}
            for sequence, token in chosen.items():
                texts[sequence].push(token)
            logits = speaker.step(chosen)
        yield first - begin, time.perf_counter() - first
        for sequence in sequences:
            speaker.close(sequence)


def drafted_texts(method: str, folder: Path, prompt: int, new: int, threads: int) -> Answers:
    """Given texts by a bundle's speaker, with drafts and without."""
    import numpy as np
    from dictated import DictatedSpeaker, of_few_words, repeating
    from tokenizers import Tokenizer as Backend

    from device_runner.engines.generator import open_speaker
    from prge.data.tokenization.tokenizer import Tokenizer
    from prge.formats.bundle import open_bundle
    from prge.formats.peft import read_peft
    from prge.generation.loop import GenerationSettings, Generator, Request
    from prge.generation.prompts import Prompt

    tokenizer = Tokenizer(Backend.from_file(str(folder / "llm" / "tokenizer.json")))
    yield ()
    opened = open_bundle(folder / "bundle")
    speaker = DictatedSpeaker(open_speaker(opened, threads=threads, engine="native"))
    adapter = read_peft(opened.adapter, opened.chain.modules)
    generator, random = Generator(speaker, tokenizer), np.random.default_rng(0)
    while True:
        seconds = []
        for make in (repeating, of_few_words):
            speaker.text = make(speaker.vocabulary_size, prompt, new, random)
            asked = Prompt(tuple(speaker.text[:prompt]))
            for draft in ("off", "lookup"):
                settings = GenerationSettings(new, draft=draft)
                (answer,) = generator.generate([Request(asked, adapter, settings)])
                if list(answer.tokens) != speaker.text[prompt:]:
                    raise ValueError("the answer isn't the text that was given")
                seconds.append(answer.decode_seconds)
        generator.close()
        yield seconds


def runner_texts(method: str, folder: Path, prompt: int, new: int, threads: int) -> Answers:
    """Texts by ExecuTorch's runner; raises ValueError where one isn't of the tokens that were asked for."""
    import torch  # noqa: F401 loads the libraries that the runner links to
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    from device_runner.engines.torch_runtime import set_threads

    set_threads(threads)
    yield ()
    runner = TextLLMRunner(str(folder / "llm" / "program.pte"), str(folder / "llm" / "tokenizer.json"))
    settings = GenerationConfig(max_new_tokens=new, temperature=0.0, echo=False)
    while True:
        times: list[float] = []
        told: list[Any] = []
        runner.reset()
        begin = time.perf_counter()
        runner.generate(
            LETTER * prompt,
            settings,
            lambda _, times=times: times.append(time.perf_counter()),
            lambda stats, told=told: told.append(json.loads(stats.to_json_string())),
        )
        (facts,) = told
        seen = (facts["prompt_tokens"], len(times), facts["generated_tokens"])
        if seen != (prompt, new, new - 1):
            wanted = (prompt, new, new - 1)
            raise ValueError(f"{seen} tokens of the prompt, written and decoded, must be {wanted}")
        unit, prefilled = facts["SCALING_FACTOR_UNITS_PER_SECOND"], facts["prompt_eval_end_ms"]
        first, rest = prefilled - facts["inference_start_ms"], facts["inference_end_ms"] - prefilled
        yield first / unit, rest / unit, times[0] - begin, times[-1] - times[0]


def serve(make: Callable[[], Answers]) -> None:
    """Answer every line of the standard input."""
    # Libraries write to the standard output too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    found = make()
    for _ in sys.stdin:
        print(*next(found), file=answers, flush=True)


def main() -> None:
    """Serve the method that the command line names."""
    if "--learn" in sys.argv[1:2]:
        from learning import main as measure

        raise SystemExit(measure(sys.argv[2:]))
    method, folder, *numbers = sys.argv[1:]
    others: dict[str, Callable[..., Answers]] = {
        "speaker": speaker_texts,
        "drafts": drafted_texts,
        "stock-runner": runner_texts,
    }
    make = engine_steps if method in ENGINE else others.get(method, pytorch_steps)
    serve(lambda: make(method, Path(folder), *map(int, numbers)))


if __name__ == "__main__":
    main()
