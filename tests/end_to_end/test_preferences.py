"""Preferences on real programs: with both types of adapters and all estimators, and with `prge tune`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import second_tier
from tests.verbs import prge
from tests.workshop import bits, write_rows


def pairs(count: int) -> list[dict[str, Any]]:
    """Return pairs whose chosen answer repeats the prompt's word."""
    words = ["aa", "bb", "cc", "dd"]
    return [
        {
            "prompt": words[i % 4],
            "chosen": f" {words[i % 4]}",
            "rejected": f" {words[(i + 1 + i // 4 % 3) % 4]}",
        }
        for i in range(count)
    ]


CASES = [
    (adapter, estimator)
    for adapter in ("lora", "lora-fa")
    for estimator in ("exact", "tangent", "antithetic")
]


@pytest.mark.parametrize(("adapter", "estimator"), [CASES[0], *second_tier(*CASES[1:])])
def test_a_run_learns_pairs_and_replays(
    workshop: Path, lora_bundle: Path, tmp_path: Path, adapter: str, estimator: str
) -> None:
    train = write_rows(tmp_path / "train.jsonl", pairs(24))
    bundle = lora_bundle if adapter == "lora" else workshop / "bundle"
    keep = ["--keep-gradients"] if estimator == "exact" else []
    arguments = ["--bundle", bundle, "--train", train, "--dev", train, "--estimator", estimator, *keep]
    for out in ("run", "again"):
        prge("run", *arguments, "--steps", 40, "--learning-rate", 0.02, "--out", tmp_path / out, "--quiet")
    assert bits(tmp_path / "run") == bits(tmp_path / "again")
    output = json.loads((tmp_path / "run/run.json").read_text())["train"]
    assert output["best"]["loss"] < output["before"]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert output["best"]["margin"] > 0
    assert "the same bits" in prge("replay", tmp_path / "run", "--out", tmp_path / "replayed").stdout


def unequal_pairs(count: int) -> list[dict[str, Any]]:
    """Return pairs with prompts and answers of very different lengths."""
    words = ["aa", "bb", "cc", "dd"]
    return [
        {
            "prompt": " ".join(words[(i + k) % 4] for k in range(1 + 5 * i % 9)),
            "chosen": " " + " ".join([words[i % 4]] * (1 + i % 4)),
            "rejected": " " + " ".join([words[(i + 1) % 4]] * (1 + 3 * i % 4)),
        }
        for i in range(count)
    ]


STARTS = [("upper_bundle", "exact", 4), ("upper_bundle", "exact", 8), ("bundle", "tangent", 4)]


@pytest.mark.parametrize(("bundle", "estimator", "batch"), [*STARTS, *second_tier(("bundle", "exact", 16))])
def test_before_training_every_pair_has_a_loss_of_exactly_ln_2(
    workshop: Path, upper_bundle: Path, tmp_path: Path, bundle: str, estimator: str, batch: int
) -> None:
    """This holds for int4 too, where a float's last bit in another batch may change the loss by 0.01 nat."""
    folder = upper_bundle if bundle == "upper_bundle" else workshop / "bundle"
    train = write_rows(tmp_path / "train.jsonl", unequal_pairs(16))
    dev = write_rows(tmp_path / "dev.jsonl", unequal_pairs(23)[-8:])
    prge(
        "run", "--bundle", folder, "--train", train, "--dev", dev, "--objective", "dpo", "--beta", 0.48,
        "--estimator", estimator, "--batch-size", batch, "--learning-rate", 1e-9, "--steps", 2,
        "--eval-steps", 1, "--out", tmp_path / "run", "--quiet",
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["event"] == "step")
    before = next(line for line in lines if line["event"] == "evaluation")
    assert (first["step"], before["step"]) == (1, 0)
    assert first["loss"] == before["loss"] == math.log(2)
    assert (before["margin"], before["pairs_right"]) == (0, 0.5)


def test_the_reference_of_a_row_is_the_same_whatever_rows_are_trained_with_it(
    upper_bundle: Path, tmp_path: Path
) -> None:
    rows = unequal_pairs(12)
    orders = {"all": rows, "reversed": rows[::-1], "few": rows[3:6]}
    result: dict[str, list[Any]] = {}
    for name, some in orders.items():
        arguments = ["--bundle", upper_bundle, "--train", write_rows(tmp_path / f"{name}.jsonl", some)]
        prge("run", *arguments, "--steps", 1, "--learning-rate", 1e-9, "--out", tmp_path / name, "--quiet")
        result[name] = json.loads((tmp_path / name / "reference.json").read_text())["scores"]
    assert result["reversed"] == result["all"][::-1]
    assert result["few"] == result["all"][3:6]


@pytest.mark.parametrize("estimator", ["exact", *second_tier("tangent", "antithetic")])
def test_policy_gradients_learn_from_ratings(
    workshop: Path, lora_bundle: Path, tmp_path: Path, estimator: str
) -> None:
    """Their loss is 0 at the start, and bounded by the clip range."""
    rated = [
        {"prompt": each["prompt"], "completion": each[side], "label": side == "chosen"}
        for each in pairs(24)
        for side in ("chosen", "rejected")
    ]
    bundle = lora_bundle if estimator == "exact" else workshop / "bundle"
    train = write_rows(tmp_path / "train.jsonl", rated)
    prge(
        "run", "--bundle", bundle, "--train", train, "--dev", train, "--objective", "grpo", "--steps", 30,
        "--estimator", estimator, "--learning-rate", 0.02, "--out", tmp_path / "run", "--quiet",
    )  # fmt: skip
    output = json.loads((tmp_path / "run/run.json").read_text())["train"]
    assert output["before"]["loss"] == pytest.approx(0, abs=1e-6)
    assert -0.21 < output["best"]["loss"] < -0.01 and output["best"]["pairs_right"] > 0.5
    done = prge(
        "eval", "--bundle", bundle, "--data", train, "--objective", "grpo", "--adapter", tmp_path / "run"
    )
    assert f"pairs_right {output['best']['pairs_right']:.6g}" in done.stdout


def test_pairs_are_tuned_by_one_command(workshop: Path, lora_bundle: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", pairs(40))
    arguments = ["--bundle", lora_bundle, "--data", data, "--out", tmp_path / "out", "--steps", 40]
    done = prge("tune", *arguments, "--json", tmp_path / "found.json")
    result = json.loads((tmp_path / "found.json").read_text())
    before, after = result["score_before"], result["score_after"]
    assert (before["pairs_right"], before["margin"]) == (0.5, 0)
    assert after["pairs_right"] > 0.5
    assert after["loss"] < before["loss"]
    assert result["samples"]["before"] and result["samples"]["after"]
    assert "pairs_right" in done.stdout
    assert "pairs right" in (tmp_path / "out/report.html").read_text()
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()


@pytest.mark.whole
def test_a_tuning_takes_its_objective(workshop: Path, lora_bundle: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", pairs(40))
    arguments = ["--bundle", lora_bundle, "--data", data, "--steps", 20, "--learning-rate", 0.01]
    for objective, name in (("completion", "perplexity"), ("kto", "pairs_right"), ("orpo", "pairs_right")):
        out, output = tmp_path / objective, tmp_path / f"{objective}.json"
        prge("tune", *arguments, "--objective", objective, "--out", out, "--json", output)
        assert name in json.loads(output.read_text())["score_after"]
