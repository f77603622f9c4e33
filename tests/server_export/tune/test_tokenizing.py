"""What rows ask of a tokenizer, measured on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prge.data.tokenization.tokenizer import Tokenizer
from prge.engine import Target, TokenSequence
from prge.objectives.examples import Example
from server_export.check.estimation import estimate
from server_export.settings import EstimateConfig
from server_export.tune import tokenizing as module
from server_export.tune.decisions import Decision
from server_export.tune.tokenizing import ScoredRow, Tokenizing, frozen_losses
from tests.tiny_models import make_model, make_tokenizer, save_model

TEXTS = ("is this so? yes", "a b c d e", "x")


def tokenizing(folder: Path, architecture: str = "llama") -> Tokenizing:
    save_model(folder, architecture)
    return Tokenizing(str(folder), estimate(EstimateConfig(model=str(folder))))


def examples(tokenizer: Tokenizer) -> list[Example]:
    """Of each text the last two tokens are learnt."""
    found = []
    for text in TEXTS:
        tokens = (*tokenizer.begin, *tokenizer.encode(text))
        places = range(max(len(tokens) - 2, 1), len(tokens))
        targets = tuple(Target(place - 1, tokens[place], 1.0, 0) for place in places)
        found.append(Example(1, (TokenSequence(tokens, targets),), 1, None))
    return found


def no_rows(tokenizer: Tokenizer) -> list[Example]:
    raise AssertionError("there is nothing to measure")


def test_losses_are_of_target_tokens_with_and_without_one_before_the_row(tmp_path: Path) -> None:
    """As transformers computes them with labels."""
    model, tokenizer = make_model("llama"), make_tokenizer()
    rows = [(tokenizer.encode(text), asked) for text, asked in zip(TEXTS[:2], (9, 4), strict=True)]
    expected = []
    for before in ([], [1]):
        losses = []
        for tokens, asked in rows:
            labels = torch.tensor([[-100] * (len(before) + asked) + tokens[asked:]])
            loss = model(input_ids=torch.tensor([[*before, *tokens]]), labels=labels).loss
            losses += [float(loss)] * (len(tokens) - asked)
        expected.append(sum(losses) / len(losses))
    save_model(tmp_path, "llama")
    scored = [
        ScoredRow(tuple(tokens), tuple((at - 1, tokens[at]) for at in range(asked, len(tokens))))
        for tokens, asked in rows
    ]
    assert frozen_losses(str(tmp_path), scored, 1) == pytest.approx(expected, rel=1e-4)


def test_of_a_long_row_what_is_before_its_targets_is_read() -> None:
    row = ScoredRow(tuple(range(100)), tuple((at, at + 1) for at in range(79, 99)))
    found = row.window(16)
    assert found.tokens == tuple(range(72, 88))
    assert found.targets == tuple((at - 72, at + 1) for at in range(79, 88))
    assert all(found.tokens[place] + 1 == token for place, token in found.targets)
    assert row.window(200).targets == row.targets
    text = ScoredRow(tuple(range(100)), tuple((at, at + 1) for at in range(99)))
    assert text.window(16) == ScoredRow(tuple(range(16)), tuple((at, at + 1) for at in range(16)))


def test_of_candidates_the_right_one_is_judged() -> None:
    sequences = tuple(
        TokenSequence((5, 6, token), (Target(1, token, 1.0, candidate),))
        for candidate, token in enumerate((7, 8))
    )
    assert ScoredRow.of(Example(1, sequences, 2, 1)) == ScoredRow((5, 6, 8), ((1, 8),))
    one = TokenSequence((5, 6), (Target(1, 7, 1.0, 0), Target(1, 8, 1.0, 1)))
    assert ScoredRow.of(Example(1, (one,), 2, 1)) == ScoredRow((5, 6), ((1, 8),))


def test_it_is_measured_where_the_tokenizer_has_the_token_and_adds_none(tmp_path: Path) -> None:
    found = tokenizing(tmp_path).decide_bos(None, examples)
    assert isinstance(found, Decision) and found.name == "prepend_bos"
    assert "loss of target tokens" in found.why and "after <s>" in found.why


def test_a_model_that_doesnt_fit_into_memory_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "memory_info", lambda: {"MemAvailable": 100_000})
    found = tokenizing(tmp_path).decide_bos(None, examples)
    assert found is not None and (found.value, found.why[:22]) == ("auto", "the model is too large")


def test_rows_whose_template_says_how_they_begin_are_not_measured(tmp_path: Path) -> None:
    row = Example(1, (TokenSequence((1, 5, 6), (Target(1, 6, 1.0, 0),)),), 1, None)
    assert tokenizing(tmp_path).decide_bos(None, lambda _: [row]) is None


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
    tokenizer = found.device_tokenizer("plain", "always")
    assert tokenizer.begin == (1,)
    assert tokenizer.chat_template is not None and "bos_token" in tokenizer.chat_template
    without = found.device_tokenizer("plain", None).chat_template
    assert without is not None and "bos_token" not in without
