"""Exact gradients on the stock engine, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from device_runner import run as run_verb
from prge.cli.main import main
from prge.data.example_building import load_examples
from prge.data.tokenization.tokenizer import load_bundle_tokenizer
from prge.formats.bundle import open_bundle
from prge.formats.journal import Journal
from prge.formats.peft import read_lora
from tests.budgets import fix_memory_budget
from tests.verbs import prge
from tests.workshop import write_rows


def arguments_of(workshop: Path, bundle: Path, out: Path, steps: int = 40) -> list[object]:
    return [
        "run", "--bundle", bundle, "--train", workshop / "train.jsonl", "--dev", workshop / "dev.jsonl",
        "--task", workshop / "task.yaml", "--out", out, "--steps", steps, "--eval-steps", 20,
        "--save-steps", 15, "--learning-rate", 0.005, "--threads", 1, "--estimator", "exact",
        "--lr-scheduler-type", "constant", "--warmup-steps", 0,
    ]  # fmt: skip


def losses(run: Path) -> list[float]:
    with Journal(run / "journal.jsonl", writable=False) as journal:
        return [record["loss"] for record in journal.records if record["type"] == "evaluation"]


def test_an_exact_run_learns_and_records_its_steps(workshop: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    prge(*arguments_of(workshop, workshop / "bundle", out))
    before, *_, after = losses(out)
    assert after < 0.2 * before
    summary = json.loads((out / "run.json").read_text())
    assert summary["run"]["settings"]["estimator"] == "exact"
    assert summary["train"]["forward_passes"] == 40 * 4 * 3
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    norms = [record["gradient_norm"] for record in records if record["event"] == "step"]
    assert len(norms) == 40 and min(norms) > 0


def test_a_memory_budget_is_logged_and_changes_no_bit(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = workshop / "bundle"
    # Embedding rows are read in place.
    files = [path for path in (bundle / "weights").iterdir() if path.stem != "embedding"]
    weights = sum(path.stat().st_size for path in files)
    finals = set()
    for name, loaded, output in (
        ("none", weights, "activations: 0 of "),
        ("all", None, "activations: 3 of 3 blocks save them for the backward pass (0 of "),
    ):
        with monkeypatch.context() as patch:
            if loaded is not None:
                fix_memory_budget(patch, run_verb, loaded)
            assert main([*map(str, arguments_of(workshop, bundle, tmp_path / name, steps=6))]) == 0
        log = (tmp_path / name / "log.txt").read_text()
        assert output in log and log.index("training: exact") < log.index("activations: ")
        finals.add((tmp_path / name / "final/adapter_model.safetensors").read_bytes())
    assert len(finals) == 1


def test_blocks_below_the_adapter_are_computed_once_per_row(
    workshop: Path, upper_bundle: Path, tmp_path: Path
) -> None:
    """The run trains on 16 different rows and scores them; the cache changes no bit."""
    cached = ["--trunk-cache-bytes", 1 << 20]
    out, other = tmp_path / "run", tmp_path / "other"
    prge(*arguments_of(workshop, upper_bundle, out, steps=60), *cached)
    before, *_, after = losses(out)
    assert after < 0.5 * before
    assert "trunk: 16 rows computed, 288 from the cache" in (out / "log.txt").read_text()
    # There is room for a few rows only.
    prge(*arguments_of(workshop, upper_bundle, other, steps=60), "--trunk-cache-bytes", 20_000)
    assert " 288 from the cache" not in (other / "log.txt").read_text()
    final = "final/adapter_model.safetensors"
    assert (out / final).read_bytes() == (other / final).read_bytes()


def test_an_encoder_learns_below_its_head(encoder: Path, tmp_path: Path) -> None:
    letters = np.random.default_rng(0).integers(0, 20, (160, 6))
    write_rows(
        tmp_path / "train.jsonl",
        [
            {
                "text": " ".join(chr(97 + letter) for letter in row),
                "label": int(row[:2].sum() > row[2:4].sum()),
            }
            for row in letters
        ],
    )
    (tmp_path / "task.yaml").write_text(
        'name: letters\ntemplate: "{text}"\nlabel_words: {0: "no", 1: "yes"}\ncolumns: {label: label}\n'
        "metric: accuracy\n"
    )
    arguments = arguments_of(tmp_path, encoder, tmp_path / "run", steps=40)
    # Training rows, scored with their training head: a head on random hidden states can't do better.
    arguments[arguments.index("--dev") + 1] = tmp_path / "train.jsonl"
    arguments[arguments.index("--learning-rate") + 1] = 3e-4
    prge(*arguments, "--head-folds", 0, "--batch-size", 16)
    before, *_, after = losses(tmp_path / "run")
    assert after < 0.96 * before


def test_a_step_normalised_by_tokens_equals_that_of_transformers(workshop: Path, tmp_path: Path) -> None:
    """The gradient is that of transformers' loss with `num_items_in_batch`, in two calls of unequal rows."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    rows = [
        {"prompt": "aa", "completion": " bb cc dd aa bb"},
        {"prompt": "bb cc", "completion": " a"},
        {"prompt": "cc dd", "completion": " dd aa"},
        {"prompt": "dd", "completion": " aa bb cc dd dd cc bb"},
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    bundle = open_bundle(workshop / "bundle")
    arguments = ["run", "--bundle", bundle.folder, "--train", tmp_path / "rows.jsonl", "--steps", 1]
    arguments += ["--batch-size", 4, "--estimator", "exact", "--optimizer", "sgd", "--learning-rate", 1]
    arguments += ["--warmup-steps", 0, "--lr-scheduler-type", "constant"]
    moved = {}
    for name in ("token", "example"):
        prge(*arguments, "--out", tmp_path / name, "--loss-normalisation", name)
        moved[name] = read_lora(tmp_path / name / "final").lora_b
    settings = {"loss_normalisation": "token"}
    with Journal(tmp_path / "token/journal.jsonl", writable=False) as journal:
        start, step = journal.first("start"), journal.step(0)
    assert start is not None and step is not None and settings.items() <= start["settings"].items()

    examples, _ = load_examples(tmp_path / "rows.jsonl", load_bundle_tokenizer(bundle), bundle.chain.model)
    sequences = [example.sequences[0] for example in examples]
    items = sum(len(sequence.targets) for sequence in sequences)
    assert len({len(sequence.targets) for sequence in sequences}) == 4
    base = AutoModelForCausalLM.from_pretrained(workshop / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(bundle.adapter), is_trainable=True).eval()
    total = 0.0
    for call in (sequences[:2], sequences[2:]):
        length = max(len(sequence.tokens) for sequence in call)
        tokens, labels = torch.zeros(2, length, dtype=torch.long), torch.full((2, length), -100)
        for row, sequence in enumerate(call):
            tokens[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
            for target in sequence.targets:
                labels[row, target.position + 1] = target.token
        loss = model(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(items)).loss
        loss.backward()
        total += float(loss)
    assert step["loss"] == pytest.approx(total, rel=1e-5)
    for name, result in moved["token"].items():
        matrix = model.base_model.model.get_submodule(name).lora_B["default"].weight
        expected = -matrix.grad.numpy()
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
        assert np.abs(moved["example"][name] - expected).max() > 0.05 * np.abs(expected).max()
