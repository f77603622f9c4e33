"""The text part of a multimodal checkpoint is trained, and its adapter loads by the commands of its card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.compilers import needs_compiler
from tests.tiny_models import VOCABULARY, make_tokenizer
from tests.verbs import prge

pytestmark = [needs_compiler, pytest.mark.whole]

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def write_checkpoint(folder: Path) -> Any:
    """Write a tiny model of images and texts with random weights, and its tokenizer."""
    from transformers import AutoModelForMultimodalLM, Gemma3Config

    torch.manual_seed(0)
    text = {**_SIZES, **_WORDS, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    model = AutoModelForMultimodalLM.from_config(Gemma3Config(text_config=text, vision_config=_SIZES))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model.eval()


def test_a_text_part_is_trained_and_its_adapter_loads_with_peft(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "model")
    rows = [{"prompt": f"{number} is", "completion": " yes" if number % 2 else " no"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = ("--rank", 2, "--sequence-length", 16, "--roles", "forward", "backward")
    output = prge("export", "--model", tmp_path / "model", "--out", tmp_path / "bundle", *settings).stdout
    assert "checkpoint (gemma3). Only its text part (gemma3_text) is exported" in output
    run = ("run", "--bundle", tmp_path / "bundle", "--train", tmp_path / "rows.jsonl", "--steps", 3)
    prge(*run, "--learning-rate", 0.1, "--out", tmp_path / "run")
    prge("publish", tmp_path / "run", "--bundle", tmp_path / "bundle", "--out", tmp_path / "adapter")

    code = re.findall(r"```python\n(.*?)```", (tmp_path / "adapter/README.md").read_text(), re.DOTALL)[0]
    code = code.replace("<folder of the base model>", str(tmp_path / "model"))
    result: dict[str, Any] = {}
    exec(code.replace("<this folder>", str(tmp_path / "adapter")), result)

    # Load the same adapter into the whole model.
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    tokens = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = whole(input_ids=tokens).logits
        for name, lora_a in tensors.items():
            if ".lora_A." in name:
                change = (
                    config["lora_alpha"] / config["r"] * tensors[name.replace("lora_A", "lora_B")] @ lora_a
                )
                layer = name.removeprefix("base_model.model.model.").partition(".lora_A")[0]
                whole.model.language_model.get_submodule(layer).weight += change
        expected = whole(input_ids=tokens).logits
        logits = result["model"](input_ids=tokens).logits
    assert float((expected - before).abs().max()) > 1e-3
    assert torch.allclose(logits, expected, atol=1e-4)
