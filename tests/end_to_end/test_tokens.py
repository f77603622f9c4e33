"""Loss and targets of rows equal those that transformers computes from their tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.verbs import prge
from tests.workshop import write_rows

ROWS: dict[str, list[dict[str, object]]] = {
    "texts": [{"text": "<s>aa</s>bb no"}, {"text": "a yes</s>"}, {"text": "b"}],
    "completions": [
        {"prompt": "<s>aa</s>", "completion": " yes"},
        {"prompt": "bb", "completion": " no</s>"},
        {"prompt": "a", "completion": "b</s> yes"},
    ],
}


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("arguments", [(), ("--control-tokens", "text"), ("--no-append-eos",)], ids=str)
def test_loss_and_targets_equal_those_of_transformers(
    workshop: Path, tmp_path: Path, form: str, arguments: tuple[str, ...]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(workshop / "model")
    model = AutoModelForCausalLM.from_pretrained(workshop / "model", dtype=torch.float32)

    def ids(text: object) -> list[int]:
        result: list[int] = tokenizer(text, split_special_tokens="text" in arguments).input_ids
        return result

    losses, targets = [], 0
    for row in ROWS[form]:
        prompt = ids(row["prompt"]) if "prompt" in row else []
        answer = ids(row["text"] if "text" in row else row["completion"])
        if "--no-append-eos" not in arguments and answer[-1] != tokenizer.eos_token_id:
            answer.append(tokenizer.eos_token_id)
        tokens = torch.tensor([prompt + answer])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        if tokens.shape[1] < 2:
            continue
        count = int((labels[0, 1:] != -100).sum())
        with torch.no_grad():
            losses.append((float(model(input_ids=tokens, labels=labels).loss), count))
        targets += count
    rows = ROWS[form][: len(losses)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    done = prge("eval", workshop / "bundle", "--data", data, "--json", tmp_path / "a.json", *arguments)
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["loss"] == pytest.approx(sum(loss for loss, _ in losses) / len(losses), rel=1e-4)
    whole = sum(loss * count for loss, count in losses) / targets
    assert record["perplexity"] == pytest.approx(math.exp(whole), rel=1e-4)
    assert f"target tokens: {targets} of " in done.stdout
    treatment = "read as the characters that they are" if "text" in arguments else "read as control tokens"
    assert f"control tokens written in texts, {treatment}: " in done.stdout
