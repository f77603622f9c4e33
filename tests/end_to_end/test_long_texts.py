"""The loss of a trained model on long texts in chunks equals transformers' loss on the whole texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import prge
from prge.formats.bundle import open_bundle
from tests.compilers import needs_compiler
from tests.workshop import write_rows

pytestmark = [needs_compiler, pytest.mark.whole]

LENGTH, TEXTS = 900, 2


def test_the_loss_of_long_texts_equals_that_of_transformers(shared: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shared / "models/babyllama", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    passages = json.loads((shared / "data/wikitext/wikitext_1000.json").read_text())
    tokens = tokenizer.encode("\n".join(passages[:40])).ids
    texts = [tokenizer.decode(tokens[LENGTH * n : LENGTH * (n + 1)]) for n in range(TEXTS)]
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])

    bundle = tmp_path / "bundle"
    prge.export(model=str(model), out=bundle, quantize="fp32", sequence_length=1024, roles=("forward",))
    assert open_bundle(bundle).chain.bounds.chunk < LENGTH - 100
    result = prge.evaluate(bundle=bundle, data=rows)

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    losses = []
    for text in texts:
        row = torch.tensor([[*tokenizer.encode(text).ids, tokenizer.token_to_id("</s>")]])
        assert row.shape[1] > LENGTH - 100
        with torch.no_grad():
            losses.append(float(whole(row, labels=row).loss))
    assert result["loss"] == pytest.approx(np.mean(losses), rel=2e-6)
