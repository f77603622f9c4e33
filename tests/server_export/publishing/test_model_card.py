"""A model card shows how an adapter was trained, and no names of the user's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from prge.generation.prompts import Prompts
from server_export.checkpoint.base_model import BaseModel
from server_export.checkpoint.tokenization import device_tokenizer
from server_export.publishing.model_card import CardFacts, model_card, read_run_summary
from tests.tiny_models import VOCABULARY, make_tokenizer

COMMIT = "0123456789" * 4
HUB = BaseModel("some/model", COMMIT)
SETTINGS = {
    "bundle": "/home/somebody/bundle",
    "train": "diagnoses.jsonl",
    "dev": "letters of 2024.csv",
    "task": "divorces",
    "out": "secret",
    "learning_rate": "0.03",
    "queries": "4",
    "epsilon": "0.05",
    "share_directions": "False",
    "optimizer": "adam",
}


def card(
    estimator: str | None = None, base: BaseModel = HUB, changes: Mapping[str, Any] | None = None, **run: Any
) -> str:
    facts = {
        "run": {"status": "completed", "settings": {**SETTINGS, "estimator": estimator}, **run},
        "train": {
            "steps": 7,
            "forward_passes": 1400,
            "training_rows": 90,
            "before": {"step": 0, "loss": 0.69, "accuracy": 0.5},
            "best": {"step": 5, "loss": 0.4, "accuracy": 0.75},
            "last_evaluation": {"accuracy": 0.75, "of": "letters of 2024"},
        },
    }
    return model_card(
        CardFacts(
            head_layer="",
            has_own_classes=False,
            name="adapter",
            base=base,
            is_encoder=False,
            pooling=None,
            has_head=False,
            adapter={"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
            run=facts if estimator or run else {},
            bundle_sha256="ab" * 32,
            step=5,
            **{"format": "peft", **(changes or {})},
        )
    )


@pytest.mark.parametrize("format", ["peft", "merged", "gguf", "llm"])
def test_the_token_that_texts_begin_with_is_in_the_prompt(format: str) -> None:
    text = card(changes={"format": format, "bos_token": "<s>"})
    assert ("Texts began with the token `<s>` in training" in text) == (format != "llm")
    assert "Texts began" not in card(changes={"format": format})
    if format == "gguf":
        assert '-p "<s>Once upon a time"' in text
    elif format != "llm":
        [line] = [line for line in text.splitlines() if line.startswith("tokens = ")]
        tokenizer = make_tokenizer()
        tokens = eval(line.removeprefix("tokens = "), {"torch": torch, "tokenizer": tokenizer})
        device = device_tokenizer(tokenizer, "always", VOCABULARY)
        assert tokens.tolist() == [[*Prompts(device).encode_text("Once upon a time").tokens]]


@pytest.mark.parametrize(
    ("estimator", "tag", "sentence"),
    [
        (
            "tangent",
            "forward-mode-differentiation",
            "exact derivatives of the loss",
        ),
        ("antithetic", "zeroth-order", "arXiv 2409.15520"),
        ("fzoo", "zeroth-order", "arXiv 2506.09034"),
        ("exact", "backpropagation", "Exact gradients"),
    ],
)
def test_the_estimator_is_described(estimator: str, tag: str, sentence: str) -> None:
    text = card(estimator)
    tags = {line[2:] for line in text.split("---")[1].splitlines() if line.startswith("- ")}
    assert tags == {"lora", "prge", tag}
    assert sentence in text
    assert ("forward passes only" in text) == (estimator != "exact")
    assert ("| epsilon" in text) == (estimator in ("antithetic", "fzoo"))
    assert ("| queries" in text) == (estimator != "exact")


def test_preferences_are_described_by_their_objective() -> None:
    assert "It was trained on preferences, by DPO with beta 0.1." in card(
        "exact", objective={"name": "dpo", "beta": 0.1}
    )
    for other in (None, {"name": "| spells", "beta": 1}, {"name": ["dpo"]}, "dpo"):
        assert "preferences" not in card("exact", objective=other)


def test_unknown_facts_are_left_out() -> None:
    text = card()
    assert "zeroth-order" not in text and "trained by" not in text and "forward" not in text
    assert "by `prge baseline --method lora`" in card(method="lora")


@pytest.mark.parametrize("estimator", ["tangent", "exact"])
def test_no_file_of_the_user_is_named(estimator: str) -> None:
    text = card(estimator)
    for private in ("diagnoses", "letters", "divorces", "secret", "somebody"):
        assert private not in text
    for fact in ("| learning rate | 0.03 |", "| steps ", "| last evaluation accuracy | 0.75 |"):
        assert fact in text


def test_a_hub_model_is_loaded_at_its_commit_and_a_folder_by_no_name() -> None:
    text = card("tangent")
    assert f'from_pretrained("some/model", revision="{COMMIT}")' in text
    assert "base_model: some/model" in text
    text = card("tangent", BaseModel("/home/somebody/llama", None, "cd" * 32))
    assert 'from_pretrained("<folder of the base model>")' in text
    assert f"LoRA adapter of the model with the SHA-256 {'cd' * 32}, trained by prge." in text
    assert "base_model:" not in text and "somebody" not in text and "llama" not in text
    assert "| base model sha256 " in text
    assert "llama" not in card("tangent", BaseModel("models/llama"))


def test_a_hub_id_without_a_commit_is_shown_if_it_comes_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--some--model"
    for file, content in (("refs/main", COMMIT), (f"snapshots/{COMMIT}/config.json", "{}")):
        (stored / file).parent.mkdir(parents=True)
        (stored / file).write_text(content)
    text = card("tangent", BaseModel("some/model"))
    assert "base_model: some/model\n" in text and 'from_pretrained("some/model")' in text
    for name in ("some/other", "a//b", "../model", "/some/model", ""):
        assert "base_model" not in card("tangent", BaseModel(name))


def test_a_card_shows_the_amount_of_training_and_the_step_of_the_adapter() -> None:
    text = card("tangent", quantization={"scheme": "8da4w"})
    for expected in (
        "7 steps on 90 training examples, of which the adapter is that after step 5; ",
        "; 1,400 sequences computed, where a backward pass counts as two; frozen weights in 8da4w.",
        "On development rows: accuracy 0.5 before, 0.75 at best.",
    ):
        assert expected in text


def test_all_estimators_of_a_run_are_described() -> None:
    text = card(
        "exact", estimators=[{"since": 0, "estimator": "tangent"}, {"since": 4, "estimator": "exact"}]
    )
    assert text.index("From step 0 on: Tangents") < text.index("From step 4 on: Exact gradients")
    assert "- forward-mode-differentiation\n- backpropagation\n" in text
    assert "tangent, then exact |" in text


@pytest.mark.parametrize("estimators", [[], "exact", [1], [{"since": "0", "estimator": ["exact"]}]])
def test_invalid_estimators_are_left_out(estimators: Any) -> None:
    assert "trained by" not in card(estimators=estimators)


@pytest.mark.parametrize("content", ["", "[1]", "[" * 9999, '{"run": NaN}'])
def test_a_damaged_summary_is_empty(tmp_path: Any, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    assert read_run_summary(tmp_path) == {}
    assert read_run_summary(None) == {}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": "peft"}, "With the original weights of the base model answers can differ"),
        ({"format": "gguf"}, "`prge publish --format merged` writes a model with the weights"),
        ({"format": "merged", "trained_scheme": "8da4w"}, "The weights here are those, as floats"),
        ({"format": "merged", "trained_scheme": "8da4w", "weights": "original"}, "into the original weights"),
        ({"format": "merged"}, "into the original weights"),
        (
            {"format": "llm", "scheme": "8da8w"},
            "The weights here are in 8da8w, with which answers can differ",
        ),
        ({"format": "llm", "scheme": "8da4w"}, ""),
    ],
)
def test_a_card_shows_which_weights_the_adapter_was_trained_with(
    changes: Mapping[str, Any], sentence: str
) -> None:
    text = " ".join(card("exact", changes=changes, quantization={"scheme": "8da4w"}).split())
    trained_against = (
        "trained and scored against frozen weights that are rounded to 8da4w, in an engine that rounds"
    )
    assert (trained_against in text) == bool(sentence) and sentence in text
    assert trained_against not in " ".join(card("exact").split())
