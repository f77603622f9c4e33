"""`prge tune` on messages for a model without chat template, from rows to an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.verbs import prge
from tests.workshop import write_rows

pytestmark = [pytest.mark.whole, pytest.mark.timeout(600)]

ANIMALS = ("dog", "cat", "bird", "fish", "frog", "bear", "duck", "mouse")
THINGS = ("ball", "tree", "boat", "cake", "hat", "bell")


def messages(animal: str, thing: str) -> dict[str, object]:
    turns = (("user", f"What did the {animal} see?"), ("assistant", f"It saw a big {thing}. The end."))
    return {"messages": [{"role": role, "content": content} for role, content in turns], "id": animal}


@pytest.fixture(scope="module")
def tuned(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tuning of babyllama, whose tokenizer has no template and no line break."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [messages(animal, thing) for animal in ANIMALS for thing in THINGS]
    prge(
        "tune", "--model", shared / "models/babyllama", "--data", write_rows(folder / "a.jsonl", rows[12:]),
        "--test", write_rows(folder / "b.jsonl", rows[:12]), "--out", folder / "out", "--init", "random",
        "--steps", 60, "--learning-rate", 0.01, "--threads", 1, "--json", folder / "result.json",
    )  # fmt: skip
    return folder / "out"


def test_a_tuning_improves_the_score_of_uncut_test_rows(tuned: Path) -> None:
    result: dict[str, Any] = json.loads((tuned.parent / "result.json").read_text())
    assert result["score_after"]["perplexity"] < 0.7 * result["score_before"]["perplexity"]
    assert "cut_examples" not in result["score_after"]
    assert result["chosen"]["chat_template"]["value"] == "plain"
    assert "no chat template" in result["chosen"]["chat_template"]["why"]
    assert "the frozen model's loss" in result["chosen"]["prepend_bos"]["why"]
    assert result["next"] == f"prge chat {tuned}"
    assert result["samples"]["after"][0]["prompt"][-1]["role"] == "user"


def test_all_stages_have_one_date_and_columns_that_are_not_read_are_named(tuned: Path) -> None:
    actual = json.loads((tuned / "tune.json").read_text())["found"]
    for name in ("run/config.yaml", "settings/before.yaml", "settings/after.yaml"):
        assert yaml.safe_load((tuned / name).read_text())["date"] == actual["date"]
    assert any(note.endswith("a.jsonl: columns: messages; not read: id") for note in actual["rows"])


def test_an_answer_ends_with_the_learnt_end_token(tuned: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What did the dog see?"}]
    (tmp_path / "messages.json").write_text(json.dumps(messages))
    arguments = ["--messages", tmp_path / "messages.json"]
    answer = json.loads(prge("generate", tuned, *arguments, "--json", "--threads", 1).stdout)
    assert answer["reason"] == "stop"
    assert answer["text"].startswith("It saw") and answer["text"].endswith("end.")


def test_the_adapter_has_the_template_of_the_bundle(tuned: Path) -> None:
    template = (tuned / "adapter/chat_template.jinja").read_text()
    assert template == (tuned / "bundle/tokenizer/chat_template.jinja").read_text()
    assert "Assistant:" in template
