"""A process that takes a step, or generates a text, for each line of input; benchmarks compare its methods.

    python scripts/bench/serve.py METHOD FOLDER NUMBER...

`--learn` instead measures a server that learns, see learning.py.

For every line of the standard input the process prints a line of numbers. The first line only waits until the
libraries are imported; nothing is opened yet. Methods on the engine import only what a device has.

    a method of ENGINE, pytorch-*   ROWS TOKENS THREADS QUERIES [MEMORY]: seconds and loss of a step of
                                    FOLDER's `bundle`, or in PyTorch of its `model`
    generator     SEQUENCES PROMPT NEW THREADS: greedy completions by `bundle`; seconds of the prompts, and of
                  the tokens after the first ones, including sampling and decoding. `llm` has a tokenizer
                  without end-of-sequence token
    drafts        PROMPT NEW THREADS: seconds of the tokens after the first one of a text that repeats its
                  prompt, token by token and with drafts, and the same for a text of few words in random order
    stock-runner  PROMPT NEW THREADS: a greedy completion by ExecuTorch's LLM runner on `llm`; the same
                  seconds by its statistics, then by the clock
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# The estimator of a step and its memory bound: the given one, all weights only, or the minimum.
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
LEARNING_RATE = 1e-3
LETTER = "a"
Measurements = Iterator[Sequence[float]]


def engine_steps(
    method: str, folder: Path, rows: int, tokens: int, threads: int, queries: int, memory: int | None = None
) -> Measurements:
    """Run steps of a bundle."""
    from timing import all_weights_bytes, minimum_loaded_bytes, timed_step

    bundle = folder / "bundle"
    yield ()
    estimator, bound = ENGINE[method]
    loaded = {"least": minimum_loaded_bytes, "weights": all_weights_bytes}[bound](bundle) if bound else memory
    step = timed_step(bundle, estimator, rows, tokens, threads, queries, loaded=loaded)
    while True:
        yield step.with_loss()


def pytorch_steps(method: str, folder: Path, rows: int, tokens: int, threads: int, *_: int) -> Measurements:
    """Run steps of PyTorch and PEFT."""
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
    *,
    batches: Sequence[Sequence[Sequence[int]]] | None = None,
    alpha: int = 8,
) -> Measurements:
    """Run steps of PyTorch on a folder's `model` with PEFT's LoRA and AdamW.

    Args:
        folder: folder with the model.
        dtype: type of the model's weights.
        rows: rows of a step.
        tokens: tokens of a row.
        threads: threads of PyTorch.
        rank: rank of the adapter.
        layers: adapted layers, or `all-linear`.
        checkpointing: whether activations are computed again in the backward pass.
        batches: rows of tokens of each step, in turns; None: random rows, the same ones in each step.
        alpha: LoRA alpha.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    yield ()
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, dtype))
    modules = layers if isinstance(layers, str) else [*layers]
    tuned = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules))
    tuned.train()
    if checkpointing:
        tuned.enable_input_require_grads()
        tuned.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, weight_decay=0.0)
    torch.manual_seed(0)
    inputs_of_steps = (
        [torch.randint(0, base.config.vocab_size, (rows, tokens))]
        if batches is None
        else [torch.tensor(batch) for batch in batches]
    )
    for inputs in itertools.cycle(inputs_of_steps):
        begin = time.perf_counter()
        loss = tuned(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_value = loss.item()
        yield time.perf_counter() - begin, loss_value


def generated_texts(
    method: str, folder: Path, count: int, prompt: int, new: int, threads: int
) -> Measurements:
    """Generate completions with a bundle."""
    import numpy as np
    from tokenizers import Tokenizer as Backend

    from device_runner.engines.generator import open_generation_engine
    from prge.data.tokenization.tokenizer import Tokenizer
    from prge.formats.bundle import open_bundle
    from prge.formats.peft import read_peft
    from prge.generation.sampling import SamplingSettings, TokenSampler
    from prge.generation.text_stream import TextStream

    tokenizer = Tokenizer(Backend.from_file(str(folder / "llm" / "tokenizer.json")))
    yield ()
    bundle = open_bundle(folder / "bundle")
    engine = open_generation_engine(bundle, threads=threads, engine="native", slots=count)
    adapter = read_peft(bundle.adapter, bundle.chain.modules)
    prompts = np.random.default_rng(0).integers(0, engine.vocabulary_size, (count, prompt)).tolist()
    while True:
        sequences = [engine.open(adapter) for _ in range(count)]
        samplers = {sequence: TokenSampler(SamplingSettings(temperature=0)) for sequence in sequences}
        texts = {sequence: TextStream(tokenizer) for sequence in sequences}
        begin = time.perf_counter()
        logits = {each: engine.feed(each, tokens) for each, tokens in zip(sequences, prompts, strict=True)}
        first = time.perf_counter()
        for _ in range(new - 1):
            tokens_by_sequence = {
                sequence: samplers[sequence].sample(row, ()) for sequence, row in logits.items()
            }
            for sequence, token in tokens_by_sequence.items():
                texts[sequence].push(token)
            logits = engine.step(tokens_by_sequence)
        yield first - begin, time.perf_counter() - first
        for sequence in sequences:
            engine.close(sequence)


def drafted_texts(method: str, folder: Path, prompt: int, new: int, threads: int) -> Measurements:
    """Generate given texts by teacher forcing, with drafts and without."""
    import numpy as np
    from teacher_forcing import TeacherForcedEngine, of_few_words, repeating
    from tokenizers import Tokenizer as Backend

    from device_runner.engines.generator import open_generation_engine
    from prge.data.tokenization.tokenizer import Tokenizer
    from prge.formats.bundle import open_bundle
    from prge.formats.peft import read_peft
    from prge.generation.loop import GenerationSettings, Generator, Request
    from prge.generation.prompts import Prompt

    tokenizer = Tokenizer(Backend.from_file(str(folder / "llm" / "tokenizer.json")))
    yield ()
    bundle = open_bundle(folder / "bundle")
    engine = TeacherForcedEngine(open_generation_engine(bundle, threads=threads, engine="native"))
    adapter = read_peft(bundle.adapter, bundle.chain.modules)
    generator, random = Generator(engine, tokenizer), np.random.default_rng(0)
    while True:
        seconds = []
        for make in (repeating, of_few_words):
            engine.text = make(engine.vocabulary_size, prompt, new, random)
            prompt_tokens = Prompt(tuple(engine.text[:prompt]))
            for draft in ("off", "lookup"):
                settings = GenerationSettings(new, draft=draft)
                (completion,) = generator.generate([Request(prompt_tokens, adapter, settings)])
                if list(completion.tokens) != engine.text[prompt:]:
                    raise ValueError("the completion differs from the given text")
                seconds.append(completion.decode_seconds)
        generator.close()
        yield seconds


def runner_texts(method: str, folder: Path, prompt: int, new: int, threads: int) -> Measurements:
    """Generate with ExecuTorch's runner; raises ValueError if the token counts are wrong."""
    import torch  # noqa: F401 loads the libraries that the runner links to
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    from device_runner.engines.torch_runtime import set_threads

    set_threads(threads)
    yield ()
    runner = TextLLMRunner(str(folder / "llm" / "program.pte"), str(folder / "llm" / "tokenizer.json"))
    settings = GenerationConfig(max_new_tokens=new, temperature=0.0, echo=False)
    while True:
        times: list[float] = []
        statistics: list[Any] = []
        runner.reset()
        begin = time.perf_counter()
        runner.generate(
            LETTER * prompt,
            settings,
            lambda _, times=times: times.append(time.perf_counter()),
            lambda stats, statistics=statistics: statistics.append(json.loads(stats.to_json_string())),
        )
        (facts,) = statistics
        counts = (facts["prompt_tokens"], len(times), facts["generated_tokens"])
        if counts != (prompt, new, new - 1):
            expected = (prompt, new, new - 1)
            raise ValueError(f"{counts} prompt, new and decoded tokens were counted, expected {expected}")
        unit, prefilled = facts["SCALING_FACTOR_UNITS_PER_SECOND"], facts["prompt_eval_end_ms"]
        first, decode = prefilled - facts["inference_start_ms"], facts["inference_end_ms"] - prefilled
        yield first / unit, decode / unit, times[0] - begin, times[-1] - times[0]


def serve(make: Callable[[], Measurements]) -> None:
    """Print a line of numbers for every line of the standard input."""
    # Libraries also write to the standard output.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    results = make()
    for _ in sys.stdin:
        print(*next(results), file=output, flush=True)


def main() -> None:
    """Serve the method of the command line."""
    if "--learn" in sys.argv[1:2]:
        from learning import main as measure

        raise SystemExit(measure(sys.argv[2:]))
    method, folder, *numbers = sys.argv[1:]
    others: dict[str, Callable[..., Measurements]] = {
        "generator": generated_texts,
        "drafts": drafted_texts,
        "stock-runner": runner_texts,
    }
    make = engine_steps if method in ENGINE else others.get(method, pytorch_steps)
    serve(lambda: make(method, Path(folder), *map(int, numbers)))


if __name__ == "__main__":
    main()
