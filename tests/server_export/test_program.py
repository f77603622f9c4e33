"""The program module against the plain transformers model with PEFT's LoRA on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("torch")

import torch
from tests.tiny_models import ARCHITECTURES, DECODERS, LENGTH, make_model

from server_export.loading import prepare_model
from server_export.program import BuiltProgram, build_program, example_inputs
from server_export.settings import ExportConfig

torch.set_num_threads(1)


def build(architecture: str, **changes: Any) -> BuiltProgram:
    settings = {"rank": 4, "copies": 3, "batch_size": 2, "sequence_length": LENGTH, "positions": 3, **changes}
    config = ExportConfig(model=architecture, out=Path("unused"), **settings)
    loaded = prepare_model(make_model(architecture), architecture, architecture in DECODERS)
    return build_program(config, loaded)


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
