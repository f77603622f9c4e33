"""What rows ask of a tokenizer, measured on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prge.rows.tokenizer import Tokenizer
from server_export.check.estimation import estimate
from server_export.settings import EstimateConfig
from server_export.tune import tokenizing as module
from server_export.tune.decisions import Decision
from server_export.tune.tokenizing import Sequences, Tokenizing, frozen_losses
from tests.tiny_models import make_model, make_tokenizer, save_model

TEXTS = ("is this so? yes", "a b c d e", "x")


def tokenizing(folder: Path, architecture: str = "llama") -> Tokenizing:
    save_model(folder, architecture)
    return Tokenizing(str(folder), estimate(EstimateConfig(model=str(folder))))


def sequences(tokenizer: Tokenizer) -> Sequences:
    return [[*tokenizer.begin, *tokenizer.encode(text)] for text in TEXTS]


def no_rows(tokenizer: Tokenizer) -> Sequences:
    raise AssertionError("there is nothing to measure")


def test_losses_are_of_the_same_tokens_with_and_without_one_before(tmp_path: Path) -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    rows = [tokenizer.encode(text) for text in TEXTS]
    expected = []
    for before in ([], [1]):
        losses = []
        for row in rows:
            tokens = torch.tensor([[*before, *row[:9]]])
            scores = model(input_ids=tokens).logits[0].log_softmax(-1)
            at = range(len(before) + 1, tokens.shape[1])
            losses += [-float(scores[place - 1, tokens[0, place]]) for place in at]
        expected.append(sum(losses) / len(losses))
    save_model(tmp_path, "llama")
    found = frozen_losses(str(tmp_path), rows, [[1, *row] for row in rows], most=9)
    assert found == pytest.approx(expected, rel=1e-4)


def test_it_is_measured_where_the_tokenizer_has_the_token_and_adds_none(tmp_path: Path) -> None:
    found = tokenizing(tmp_path).decide_bos(None, sequences)
    assert isinstance(found, Decision) and found.name == "prepend_bos"
    assert "with the token" in found.why


def test_a_model_that_doesnt_fit_into_memory_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "memory_info", lambda: {"MemAvailable": 100_000})
    found = tokenizing(tmp_path).decide_bos(None, sequences)
    assert found is not None and (found.value, found.why[:22]) == ("auto", "the model is too large")


def test_rows_whose_template_says_how_they_begin_are_not_measured(tmp_path: Path) -> None:
    assert tokenizing(tmp_path).decide_bos(None, lambda _: [[1, 5, 6]]) is None


def test_a_tokenizer_without_the_token_and_an_encoder_are_not_measured(tmp_path: Path) -> None:
    assert tokenizing(tmp_path / "bert", "bert").decide_bos(None, no_rows) is None
    tokenizer = make_tokenizer()
    tokenizer.bos_token = None
    found = tokenizing(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    assert found.decide_bos(None, no_rows) is None


def test_the_plain_template_is_the_devices_and_begins_as_texts_do(tmp_path: Path) -> None:
    found = tokenizing(tmp_path)
    assert not found.has_template()
    tokenizer = found.on_device("plain", "always")
    assert tokenizer.begin == (1,)
    assert tokenizer.chat_template is not None and "bos_token" in tokenizer.chat_template
    without = found.on_device("plain", None).chat_template
    assert without is not None and "bos_token" not in without
