"""The program module against the plain transformers model with PEFT's LoRA on it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("torch")

import torch

from prge.errors import BundleError, ConfigError
from server_export.model import attention
from server_export.model.program import BuiltProgram, example_inputs
from tests.server_export.programs import build
from tests.tiny_models import ARCHITECTURES, LENGTH, VOCABULARY, WINDOW, make_model

torch.set_num_threads(1)


def peft_model(built: BuiltProgram, architecture: str, lora_b: dict[str, torch.Tensor]) -> Any:
    """The same model with PEFT's own LoRA layers holding the program's matrices."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=built.rank,
        lora_alpha=int(built.alpha),
        target_modules=built.target_modules,
        fan_in_fan_out=built.had_conv1d,
    )
    model = get_peft_model(make_model(architecture), config).eval()
    adapted = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    assert list(adapted) == [module.name for module in built.contract.modules]
    with torch.no_grad():
        for name, module in adapted.items():
            module.lora_A["default"].weight.copy_(built.lora_a[name])
            module.lora_B["default"].weight.copy_(lora_b[name].T)
    return model


def expected_rows(built: BuiltProgram, architecture: str, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    contract = built.contract
    named = dict(zip((spec.name for spec in contract.inputs), inputs, strict=True))
    answers = []
    for copy in range(contract.copies):
        rows = slice(copy * contract.batch_size, (copy + 1) * contract.batch_size)
        lora_b = {module.name: named[module.input_name][copy] for module in contract.modules}
        model = peft_model(built, architecture, lora_b)
        tokens = named["tokens"][rows]
        with torch.no_grad():
            if contract.is_encoder:
                mask = named["attention_mask"][rows]
                states = model(input_ids=tokens, attention_mask=mask).last_hidden_state
                answers.append((states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))
                continue
            positions, targets = named["positions"][rows], named["targets"][rows]
            # What comes after the last asked position is padding to the plain model.
            mask = (torch.arange(tokens.shape[1]) <= positions.max(1, keepdim=True).values).long()
            logits = model(input_ids=tokens, attention_mask=mask).logits
            logprobs = torch.log_softmax(logits, -1)
            answers.append(logprobs[torch.arange(len(tokens)).unsqueeze(1), positions, targets])
    return torch.cat(answers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_program_is_the_model_with_peft_lora_in_every_copy(architecture: str) -> None:
    built = build(architecture)
    inputs = example_inputs(built.contract, lora_b_scale=0.5)
    if architecture == "roberta":
        # RoBERTa numbers positions by the tokens that aren't padding, so padded rows must hold that token.
        tokens, mask = inputs[0], inputs[1]
        tokens[tokens == 1] = 5
        tokens[mask == 0] = 1
    with torch.no_grad():
        actual = built.module(*inputs)
    torch.testing.assert_close(actual, expected_rows(built, architecture, inputs), atol=1e-4, rtol=0)
    copies = actual.reshape(built.contract.copies, -1)
    assert not torch.allclose(copies[0], copies[1], atol=1e-2)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_every_linear_layer_can_be_adapted(architecture: str) -> None:
    built = build(architecture, target_modules="all-linear")
    inputs = example_inputs(built.contract, lora_b_scale=0.2)
    with torch.no_grad():
        actual = built.module(*inputs)
    torch.testing.assert_close(actual, expected_rows(built, architecture, inputs), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
        {
            "rope_type": "longrope",
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_kinds_of_rotary_positions(rope: dict[str, Any]) -> None:
    build(
        "llama", model={"rope_parameters": {"rope_theta": 10000.0, **rope}}
    )  # compares with the plain model


def test_verbalizer_reads_the_label_words_only() -> None:
    built = build("llama", label_tokens=(7, 90))
    full = build("llama")
    inputs = list(example_inputs(full.contract))
    inputs[2] = inputs[2] % 2
    with torch.no_grad():
        actual = built.module(*inputs)
        asked = torch.tensor([7, 90])[inputs[2]]
        other = torch.tensor([90, 7])[inputs[2]]
        right, wrong = (full.module(inputs[0], inputs[1], t, *inputs[3:]) for t in (asked, other))
    assert built.contract.readout == "verbalizer"
    expected = right - torch.logaddexp(right, wrong)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_decoder_with_pooled_readout_stays_causal() -> None:
    built = build("llama", readout="pooled", pooling="first")
    tokens, mask, *lora_b = example_inputs(built.contract)
    with torch.no_grad():
        before = built.module(tokens, mask, *lora_b)
        tokens[:, 1:] = (tokens[:, 1:] + 1) % VOCABULARY
        after = built.module(tokens, mask, *lora_b)
    torch.testing.assert_close(before, after)


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_padding_changes_nothing(architecture: str) -> None:
    built = build(architecture)
    tokens, mask, *lora_b = example_inputs(built.contract)
    with torch.no_grad():
        before = built.module(tokens, mask, *lora_b)
        tokens[mask == 0] = 9
        after = built.module(tokens, mask, *lora_b)
    torch.testing.assert_close(before, after)


def test_sliding_window_mask() -> None:
    mask = attention.causal_mask(LENGTH, WINDOW, torch.float32)
    for query in range(LENGTH):
        seen = [key for key in range(LENGTH) if mask[query, key] == 0]
        assert seen == list(range(max(0, query - WINDOW + 1), query + 1))


def test_rows_longer_than_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 62 positions"):
        build("roberta", sequence_length=63)


def test_encoder_has_no_logprobs() -> None:
    with pytest.raises(ConfigError, match="is an encoder"):
        build("bert", readout="logprobs")


def test_model_that_the_program_does_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "causal_mask", lambda length, window, dtype: torch.zeros(length, length))
    with pytest.raises(BundleError, match="doesn't compute what the model LlamaForCausalLM computes"):
        build("llama")
