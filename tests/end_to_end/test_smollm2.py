"""SmolLM2-135M-Instruct from its GGUF file: scores and completions equal those of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.verbs import prge
from tests.workshop import FolderBuilder, write_rows

pytestmark = [pytest.mark.whole, pytest.mark.timeout(1800)]

TEXTS: list[dict[str, object]] = [
    {"text": "The ferry leaves the island at seven in the morning."},
    {"text": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"},
]
COMPLETIONS: list[dict[str, object]] = [
    {"prompt": "The capital of Italy is", "completion": " Rome."},
    {"prompt": "Two plus three makes", "completion": " five, as everybody knows.<|endoftext|>"},
]
CHATS: list[dict[str, object]] = [
    {
        "messages": [
            {"role": "user", "content": "Which animal barks?"},
            {"role": "assistant", "content": "A dog."},
            {"role": "user", "content": "And which one meows?"},
            {"role": "assistant", "content": "A cat, of course."},
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": "What colour is snow?"},
            {"role": "assistant", "content": "White"},
        ]
    },
]


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> tuple[Any, Any]:
    """Return transformers' dequantized model in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = {"pretrained_model_name_or_path": smollm2.parent, "gguf_file": smollm2.name}
    return AutoModelForCausalLM.from_pretrained(**file, dtype=torch.float32), AutoTokenizer.from_pretrained(
        **file
    )


@pytest.fixture(scope="module")
def bundle(smollm2: Path, made_once: FolderBuilder) -> Path:
    """Return an unquantized bundle that scores and generates."""

    def fill(folder: Path) -> None:
        arguments = [
            "--quantize", "fp32", "--roles", "forward", "prefill", "decode", "--sequence-length", 128,
        ]  # fmt: skip
        prge("export", "--model", smollm2, "--out", folder / "bundle", "--rank", 4, *arguments)

    return made_once("smollm2", fill) / "bundle"


def of_text(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Return tokens of a text or of a prompt with completion, and which of them are targets."""
    prompt = tokenizer(row["prompt"]).input_ids if "prompt" in row else []
    answer = tokenizer(row.get("text", row.get("completion"))).input_ids
    answer += [] if answer[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def of_chat(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Return tokens of a chat; the tokens that an answer adds to its prompt are targets."""
    messages = row["messages"]

    def rendered(count: int, **more: bool) -> list[int]:
        tokens: list[int] = tokenizer.apply_chat_template(messages[:count], **more)["input_ids"]
        return tokens

    tokens = rendered(len(messages))
    learnt = [False] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = len(rendered(index, add_generation_prompt=True)), len(rendered(index + 1))
            learnt[start:end] = [True] * (end - start)
    return tokens, learnt


@pytest.mark.parametrize(
    ("rows", "encode"),
    [(TEXTS, of_text), (COMPLETIONS, of_text), (CHATS, of_chat)],
    ids=["texts", "completions", "chats"],
)
def test_scores_equal_those_of_transformers(
    reference: tuple[Any, Any], bundle: Path, tmp_path: Path, rows: Sequence[dict[str, object]], encode: Any
) -> None:
    import torch

    model, tokenizer = reference
    sums, counts = [], []
    for row in rows:
        tokens, learnt = encode(tokenizer, row)
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        chosen = -logprobs[range(len(tokens) - 1), tokens[1:]][torch.tensor(learnt[1:])]
        sums.append(float(chosen.double().sum()))
        counts.append(len(chosen))
    result = tmp_path / "result.json"
    done = prge("eval", bundle, "--data", write_rows(tmp_path / "rows.jsonl", rows), "--json", result)
    record = json.loads(result.read_text())
    assert f"target tokens: {sum(counts)} of " in done.stdout
    mean = sum(total / count for total, count in zip(sums, counts, strict=True)) / len(rows)
    assert record["loss"] == pytest.approx(mean, rel=1e-4)
    assert record["perplexity"] == pytest.approx(math.exp(sum(sums) / sum(counts)), rel=1e-4)


def test_answers_equal_those_of_transformers(reference: tuple[Any, Any], bundle: Path) -> None:
    model, tokenizer = reference
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    expected = output[0, inputs["input_ids"].shape[1] :].tolist()
    arguments = ["--chat", "--prompt", question[0]["content"], "--max-tokens", 16, "--json"]
    answer = json.loads(prge("generate", bundle, *arguments).stdout)
    tokens = [token for token in expected if token != tokenizer.eos_token_id]
    assert answer["text"].strip() == tokenizer.decode(tokens).strip()
    assert "Paris" in answer["text"]
    assert answer["reason"] == "stop"


def test_the_manifest_describes_the_quantization_of_the_file(bundle: Path) -> None:
    source = json.loads((bundle / "manifest.json").read_text())["model"]["source"]
    assert source["description"] == "Q4_1 with Q8_0 embedding"


def test_gradients_of_a_quantized_bundle_have_the_direction_of_autograds(
    reference: tuple[Any, Any], smollm2: Path, tmp_path: Path
) -> None:
    """The rows are texts, where most tokens' probabilities are too small for int8 next to the target's."""
    import numpy as np
    import torch

    from device_runner.engines.opening import open_engine
    from prge.engine import Target, TokenSequence
    from prge.formats.bundle import open_bundle
    from prge.formats.peft import read_peft, scaled_lora_a
    from prge.objectives.examples import Example
    from prge.training.estimators.exact import Exact
    from prge.training.estimators.protocol import Step
    from server_export.calibrate.rows import TEXT
    from server_export.oracle import TorchEngine

    arguments = ["--quantize", "8da8w", "--roles", "forward", "backward", "--sequence-length", 128]
    prge("export", "--model", smollm2, "--out", tmp_path / "bundle", "--rank", 4, *arguments)
    bundle = open_bundle(tmp_path / "bundle")
    model, tokenizer = reference
    tokens = tokenizer(TEXT.read_text()).input_ids[:120]
    targets = tuple(Target(at, token, 1 / 119, 0) for at, token in enumerate(tokens[1:]))
    example = Example(1, (TokenSequence(tuple(tokens), targets),), 1, None)
    adapter = read_peft(bundle.adapter, bundle.chain.modules)
    step = Step(adapter, [example], 0, 0)
    lora_a = {name: torch.from_numpy(matrix) for name, matrix in scaled_lora_a(bundle.adapter).items()}
    engines = open_engine(bundle, "backward").engine, TorchEngine(model, bundle.chain.model, lora_a)
    actual, expected = (Exact().measure(engine, step).gradient for engine in engines)
    assert actual is not None and expected is not None
    cosine = actual @ expected / np.linalg.norm(actual) / np.linalg.norm(expected)
    assert cosine > 0.95
    assert np.linalg.norm(actual) == pytest.approx(np.linalg.norm(expected), rel=0.1)
