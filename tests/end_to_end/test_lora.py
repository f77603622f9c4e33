"""LoRA with both matrices trained, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prge.data.example_building import load_examples
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.formats.bundle import open_bundle
from prge.formats.peft import PeftAdapter, read_lora
from tests.end_to_end.test_exact import arguments_of, losses
from tests.tiers import second_tier
from tests.verbs import prge
from tests.workshop import write_rows


def both(bundle: Path, run: Path) -> tuple[PeftAdapter, PeftAdapter]:
    """Return the initial and the trained adapter of a run."""
    return read_lora(bundle / "adapter"), read_lora(run / "final")


@pytest.mark.parametrize("estimator", ["exact", *second_tier("tangent", "antithetic")])
def test_both_matrices_learn(workshop: Path, lora_bundle: Path, tmp_path: Path, estimator: str) -> None:
    arguments = arguments_of(workshop, lora_bundle, tmp_path / "run")
    arguments[arguments.index("exact")] = estimator
    prge(*arguments)
    before, *_, after = losses(tmp_path / "run")
    assert after < (0.2 if estimator == "exact" else 0.99) * before
    start, result = both(lora_bundle, tmp_path / "run")
    assert start.lora_a.keys() == result.lora_a.keys()
    for name in start.lora_a:
        assert not np.array_equal(start.lora_a[name], result.lora_a[name]), name
        assert result.lora_b[name].any(), name
    assert json.loads((tmp_path / "run/run.json").read_text())["train"]["trained_values"] == sum(
        matrix.size for matrices in (result.lora_a, result.lora_b) for matrix in matrices.values()
    )


def test_lora_plus_moves_lora_b_further(workshop: Path, lora_bundle: Path, tmp_path: Path) -> None:
    """The first step of Adam has the size of the learning rate, whatever the gradient."""
    for ratio in (1, 8):
        arguments = arguments_of(workshop, lora_bundle, tmp_path / f"{ratio}", steps=1)
        prge(*arguments, "--loraplus-lr-ratio", ratio)
    (start, plain), (_, plus) = (both(lora_bundle, tmp_path / f"{ratio}") for ratio in (1, 8))
    for name in start.lora_b:
        np.testing.assert_allclose(plus.lora_b[name], 8 * plain.lora_b[name], rtol=1e-5)
        assert np.array_equal(plus.lora_a[name], plain.lora_a[name])


def test_a_lora_adapter_generates_and_is_trained_further(
    workshop: Path, lora_bundle: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    prge(*arguments_of(workshop, lora_bundle, run))
    written = {}
    for bundle in (lora_bundle, workshop / "bundle"):
        arguments = ["--prompt", "aa bb", "--adapter", run, "--max-tokens", 4, "--json"]
        written[bundle.name] = json.loads(prge("generate", "--bundle", bundle, *arguments).stdout)["tokens"]
    # For generation, programs with constant lora_a take it as an input.
    assert written["lora"] == written["bundle"]
    prge(*arguments_of(workshop, lora_bundle, tmp_path / "on", steps=2), "--adapter", run)
    refused = prge(
        *arguments_of(workshop, workshop / "bundle", tmp_path / "no"), "--adapter", run, check=False
    )
    output = refused.stderr
    assert refused.returncode == 2 and "lora_A" in output and "--start-adapter" in output


def test_a_foreign_adapter_is_scored_like_in_peft_and_trained_further(
    workshop: Path, lora_bundle: Path, tmp_path: Path
) -> None:
    """An adapter of some modules, of a lower rank, another scale and bfloat16, works in every verb."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(workshop / "model", dtype=torch.float32)
    model: Any = get_peft_model(base, LoraConfig(r=1, lora_alpha=3, target_modules=["q_proj"])).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (0.3 * torch.randn_like(parameter)).bfloat16()
    model.save_pretrained(tmp_path / "theirs")
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    rows = [
        {"prompt": f"{first} {first}", "completion": f" {second} aa"} for first in "ab" for second in "cd"
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    bundle = open_bundle(lora_bundle)
    examples, _ = load_examples(data, load_bundle_tokenizer(bundle), bundle.chain.model)
    losses_of_tokens = []
    for example in examples:
        (sequence,) = example.sequences
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([sequence.tokens])).logits[0], -1)
        losses_of_tokens += [-float(logprobs[each.position, each.token]) for each in sequence.targets]

    arguments = ["--bundle", lora_bundle, "--adapter", tmp_path / "theirs"]
    prge("eval", *arguments, "--data", data, "--json", tmp_path / "scores.json")
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["perplexity"] == pytest.approx(np.exp(np.mean(losses_of_tokens)), rel=1e-4)
    prge("generate", *arguments, "--prompt", "aa bb", "--max-tokens", 2)
    prge("run", *arguments, "--train", data, "--out", tmp_path / "run", "--steps", 2)
    trained = read_lora(tmp_path / "run/final")
    assert len(trained.lora_b) == len(bundle.chain.modules)
    assert all(matrix.any() for matrix in trained.lora_b.values())


def test_settings_that_need_lora_are_refused_without_it(workshop: Path, tmp_path: Path) -> None:
    refused = prge(
        *arguments_of(workshop, workshop / "bundle", tmp_path / "run"), "--loraplus-lr-ratio", 4, check=False
    )
    output = refused.stderr
    assert (
        refused.returncode == 2
        and "--loraplus-lr-ratio is 4" in output
        and "export with --adapter lora" in output
    )
