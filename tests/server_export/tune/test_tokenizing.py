"""Chat template and begin-of-sequence token, decided with a tiny model."""

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
    """Return an example of each text, whose last two tokens are targets."""
    examples = []
    for text in TEXTS:
        tokens = (*tokenizer.begin, *tokenizer.encode(text))
        positions = range(max(len(tokens) - 2, 1), len(tokens))
        targets = tuple(Target(position - 1, tokens[position], 1.0, 0) for position in positions)
        examples.append(Example(1, (TokenSequence(tokens, targets),), 1, None))
    return examples


def no_rows(tokenizer: Tokenizer) -> list[Example]:
    raise AssertionError("there is nothing to measure")


def test_losses_are_of_target_tokens_with_and_without_one_before_the_row(tmp_path: Path) -> None:
    """The losses equal those that transformers computes with labels."""
    model, tokenizer = make_model("llama"), make_tokenizer()
    rows = [
        (tokenizer.encode(text), prompt_length) for text, prompt_length in zip(TEXTS[:2], (9, 4), strict=True)
    ]
    expected = []
    for before in ([], [1]):
        losses = []
        for tokens, prompt_length in rows:
            labels = torch.tensor([[-100] * (len(before) + prompt_length) + tokens[prompt_length:]])
            loss = model(input_ids=torch.tensor([[*before, *tokens]]), labels=labels).loss
            losses += [float(loss)] * (len(tokens) - prompt_length)
        expected.append(sum(losses) / len(losses))
    save_model(tmp_path, "llama")
    scored = [
        ScoredRow(tuple(tokens), tuple((at - 1, tokens[at]) for at in range(prompt_length, len(tokens))))
        for tokens, prompt_length in rows
    ]
    assert frozen_losses(str(tmp_path), scored, 1) == pytest.approx(expected, rel=1e-4)


def test_a_window_of_a_long_row_has_context_before_its_targets() -> None:
    row = ScoredRow(tuple(range(100)), tuple((at, at + 1) for at in range(79, 99)))
    window = row.window(16)
    assert window.tokens == tuple(range(72, 88))
    assert window.targets == tuple((at - 72, at + 1) for at in range(79, 88))
    assert all(window.tokens[position] + 1 == token for position, token in window.targets)
    assert row.window(200).targets == row.targets
    text = ScoredRow(tuple(range(100)), tuple((at, at + 1) for at in range(99)))
    assert text.window(16) == ScoredRow(tuple(range(16)), tuple((at, at + 1) for at in range(16)))


def test_the_loss_is_of_the_correct_candidate() -> None:
    sequences = tuple(
        TokenSequence((5, 6, token), (Target(1, token, 1.0, candidate),))
        for candidate, token in enumerate((7, 8))
    )
    assert ScoredRow.of(Example(1, sequences, 2, 1)) == ScoredRow((5, 6, 8), ((1, 8),))
    one = TokenSequence((5, 6), (Target(1, 7, 1.0, 0), Target(1, 8, 1.0, 1)))
    assert ScoredRow.of(Example(1, (one,), 2, 1)) == ScoredRow((5, 6), ((1, 8),))


def test_losses_are_measured_if_the_tokenizer_has_the_token_and_adds_none(tmp_path: Path) -> None:
    decision = tokenizing(tmp_path).decide_bos(None, examples)
    assert isinstance(decision, Decision) and decision.name == "prepend_bos"
    assert "loss of target tokens" in decision.why and "after <s>" in decision.why


def test_a_model_that_doesnt_fit_into_memory_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "memory_info", lambda: {"MemAvailable": 100_000})
    decision = tokenizing(tmp_path).decide_bos(None, examples)
    assert decision is not None and (decision.value, decision.why[:22]) == ("auto", "the model is too large")


def test_nothing_is_measured_if_the_template_determines_how_rows_begin(tmp_path: Path) -> None:
    row = Example(1, (TokenSequence((1, 5, 6), (Target(1, 6, 1.0, 0),)),), 1, None)
    assert tokenizing(tmp_path).decide_bos(None, lambda _: [row]) is None


def test_nothing_is_measured_for_an_encoder_or_without_the_token(tmp_path: Path) -> None:
    assert tokenizing(tmp_path / "bert", "bert").decide_bos(None, no_rows) is None
    tokenizer = make_tokenizer()
    tokenizer.bos_token = None
    tokenizer_choice = tokenizing(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    assert tokenizer_choice.decide_bos(None, no_rows) is None


def test_the_devices_tokenizer_has_the_plain_template_which_begins_like_texts(tmp_path: Path) -> None:
    tokenizer_choice = tokenizing(tmp_path)
    assert not tokenizer_choice.has_template()
    tokenizer = tokenizer_choice.device_tokenizer("plain", "always")
    assert tokenizer.begin == (1,)
    assert tokenizer.chat_template is not None and "bos_token" in tokenizer.chat_template
    without = tokenizer_choice.device_tokenizer("plain", None).chat_template
    assert without is not None and "bos_token" not in without
