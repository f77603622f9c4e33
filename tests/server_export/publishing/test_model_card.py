"""A card tells how an adapter was trained, and nothing of the files that it was trained with."""

from __future__ import annotations

from typing import Any

import pytest

from server_export.model.base import BaseModel
from server_export.publishing.model_card import CardFacts, model_card, read_run

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
    "epsilon": "0.01",
    "share_directions": "False",
    "baseline": "clean",
    "optimizer": "adam",
}


def card(estimator: str | None = None, base: BaseModel = HUB, **run: Any) -> str:
    facts = {
        "run": {"status": "completed", "settings": {**SETTINGS, "estimator": estimator}, **run},
        "train": {"steps": 7, "last_evaluation": {"accuracy": 0.75, "of": "letters of 2024"}},
    }
    return model_card(
        CardFacts(
            name="adapter",
            format="peft",
            base=base,
            is_encoder=False,
            pooling=None,
            has_head=False,
            adapter={"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
            run=facts if estimator or run else {},
            bundle_sha256="ab" * 32,
        )
    )


@pytest.mark.parametrize(
    ("estimator", "tag", "words"),
    [
        ("tangent", "forward-mode-differentiation", "exact derivatives along random directions"),
        ("antithetic", "zeroth-order", "arXiv 2409.15520"),
        ("one-sided", "zeroth-order", "one-sided differences"),
        ("exact", "backpropagation", "exact gradients"),
    ],
)
def test_the_estimator_is_told_as_it_is(estimator: str, tag: str, words: str) -> None:
    text = card(estimator)
    tags = {line[2:] for line in text.split("---")[1].splitlines() if line.startswith("- ")}
    assert tags == {"lora", "prge", tag}
    assert words in text
    assert ("forward passes only" in text) == (estimator != "exact")
    assert ("| epsilon" in text) == (estimator in ("antithetic", "one-sided"))
    assert ("| queries" in text) == (estimator != "exact")
    assert ("| baseline" in text) == (estimator == "one-sided")


def test_what_is_not_known_is_not_claimed() -> None:
    text = card()
    assert "zeroth-order" not in text and "trained by" not in text and "forward" not in text
    assert "by `prge baseline --method lora`" in card(method="lora")


@pytest.mark.parametrize("estimator", ["tangent", "exact"])
def test_no_file_of_the_users_is_named(estimator: str) -> None:
    text = card(estimator)
    for private in ("diagnoses", "letters", "divorces", "secret", "somebody"):
        assert private not in text
    for fact in ("| learning rate            | 0.03 |", "| steps ", "| last evaluation accuracy | 0.75 |"):
        assert fact in text


def test_a_hub_model_is_loaded_at_its_commit_and_a_folder_by_no_name() -> None:
    text = card("tangent")
    assert f'from_pretrained("some/model", revision="{COMMIT}")' in text
    assert "base_model: some/model" in text
    text = card("tangent", BaseModel("/home/somebody/llama", None, "cd" * 32))
    assert 'from_pretrained("<folder of llama>")' in text
    assert "base_model:" not in text and "somebody" not in text
    assert "| base model sha256 " in text


@pytest.mark.parametrize("content", ["", "[1]", "[" * 9999, '{"run": NaN}'])
def test_a_damaged_summary_tells_nothing(tmp_path: Any, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    assert read_run(tmp_path) == {}
    assert read_run(None) == {}
