"""A checkpoint with its own classification head: scored with it, trained, published, and other classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prge.formats.bundle import open_bundle
from prge.formats.peft import read_arrays
from server_export.export import ExportConfig, export
from tests.tiny_models import make_tokenizer
from tests.tiny_types import make_classifier
from tests.verbs import prge
from tests.workshop import FolderBuilder

torch.set_num_threads(1)

LABELS = ("bad", "good", "so-so")
TEXTS = [f"{word} {number}" for number in range(8) for word in ("a film", "no", "yes yes", "food")]


@pytest.fixture(scope="module")
def folder(made_once: FolderBuilder) -> Path:
    """Return a folder with `model` and `bundle`."""

    def make(folder: Path) -> None:
        model = make_classifier("bert", len(LABELS))
        model.config.id2label = dict(enumerate(LABELS))
        model.config.label2id = {label: number for number, label in enumerate(LABELS)}
        model.save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        settings: dict[str, Any] = {"rank": 2, "sequence_length": 16, "roles": ["forward", "backward"]}
        export(ExportConfig(str(folder / "model"), folder / "bundle", **settings))

    return made_once("own-head", make)


def logits_of(model: Any, texts: list[str] = TEXTS) -> torch.Tensor:
    """Return transformers' logits, [texts, classes]."""
    tokenizer = make_tokenizer()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([tokenizer(text)["input_ids"]])).logits for text in texts])


def base(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()


def rows(folder: Path, classes: list[str] | list[int]) -> list[object]:
    """Write rows with named classes, in the task's own order, and return arguments of a verb."""
    order = [*range(1, len(classes)), 0]
    labelled = [{"text": text, "label": classes[number % len(classes)]} for number, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in labelled))
    label_words = ", ".join(f'"{classes[n]}": " word{n}"' for n in order)
    (folder / "task.yaml").write_text(f'name: own\ntemplate: "{{text}}"\nlabel_words: {{{label_words}}}\n')
    return ["--task", folder / "task.yaml"]


@pytest.mark.parametrize("classes", [["Bad", "good", "so-so"], [0, 1, 2]], ids=str)
def test_rows_of_the_heads_classes_are_scored_like_in_transformers(
    folder: Path, tmp_path: Path, classes: list[Any]
) -> None:
    arguments = ["--bundle", folder / "bundle", "--data", tmp_path / "rows.jsonl", *rows(tmp_path, classes)]
    prge("eval", *arguments, "--json", tmp_path / "eval.json", "--predictions", tmp_path / "lines.jsonl")
    expected = logits_of(base(folder))
    result = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([line["scores"] for line in result], expected, atol=1e-4)
    right = expected.argmax(-1) == torch.arange(len(TEXTS)) % len(LABELS)
    assert json.loads((tmp_path / "eval.json").read_text())["accuracy"] == pytest.approx(
        float(right.float().mean())
    )


def test_a_checkpoints_own_head_is_trained_replayed_and_published(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    task = rows(tmp_path, list(LABELS))
    run = tmp_path / "run"
    arguments = ["--bundle", folder / "bundle", "--train", tmp_path / "rows.jsonl", *task, "--out", run]
    output = prge("run", *arguments, "--steps", 3, "--head-learning-rate", 0.01, "--keep-gradients").stderr
    assert "heads: the checkpoint's own, of bad, good, so-so" in output
    assert "the same bits" in prge("replay", run, "--out", tmp_path / "replayed").stdout
    head = read_arrays(run / "final/head.safetensors")
    own = read_arrays(open_bundle(folder / "bundle").adapter / "head.safetensors")
    assert not np.array_equal(head["weight"], own["weight"])

    data = ["--bundle", folder / "bundle", "--data", tmp_path / "rows.jsonl", *task]
    predicted = ["--predictions", tmp_path / "lines.jsonl"]
    prge("publish", run, "--out", tmp_path / "peft", "--model", folder / "model")
    prge("eval", *data, *predicted, "--adapter", tmp_path / "peft")
    scores = [json.loads(line)["scores"] for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    tuned = PeftModel.from_pretrained(base(folder), str(tmp_path / "peft")).eval()
    np.testing.assert_allclose(scores, logits_of(tuned), atol=1e-4)
    assert np.abs(scores - logits_of(base(folder)).numpy()).max() > 1e-3
    assert "AutoModelForSequenceClassification" in (tmp_path / "peft/README.md").read_text()

    for form in ("merged", "program"):
        prge("publish", run, "--out", tmp_path / form, "--model", folder / "model", "--format", form)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    np.testing.assert_allclose(scores, logits_of(merged), atol=1e-4)
    manifest = json.loads((tmp_path / "program/manifest.json").read_text())
    assert manifest["outputs"][0]["name"] == "scores"


def test_other_classes_get_a_head_of_their_own(folder: Path, tmp_path: Path) -> None:
    task = rows(tmp_path, ["dull", "kind"])
    arguments = ["--bundle", folder / "bundle", *task]
    refused = prge("eval", *arguments, "--data", tmp_path / "rows.jsonl", check=False)
    assert refused.returncode == 2 and "whose classes are bad, good, so-so" in refused.stderr
    run = tmp_path / "run"
    output = prge("run", *arguments, "--train", tmp_path / "rows.jsonl", "--out", run, "--steps", 2).stderr
    assert "heads: fitted on 32 rows; the checkpoint's own head isn't used" in output
    prge("publish", run, "--out", tmp_path / "peft", "--model", folder / "model")
    assert read_arrays(tmp_path / "peft/head.safetensors")["weight"].shape == (2, 64)
    assert "modules_to_save" not in json.loads((tmp_path / "peft/adapter_config.json").read_text())
