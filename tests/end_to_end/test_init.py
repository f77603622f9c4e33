"""`prge export --init eva` with a rank for each layer, and the verbs that read such a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from prge.formats.bundle import open_bundle
from prge.formats.peft import read_lora
from tests.end_to_end.test_generate import expected
from tests.verbs import prge
from tests.workshop import FolderBuilder, export

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def spread(workshop: Path, made_once: FolderBuilder) -> Path:
    rows = ["--init-rows", workshop / "train.jsonl", "--init-task", workshop / "task.yaml"]
    arguments = [
        "--init", "eva", *rows, "--spread-ranks", "--target-modules", "q_proj", "v_proj", "down_proj",
    ]  # fmt: skip
    return (
        made_once("spread", lambda folder: export(workshop / "model", folder / "bundle", *arguments))
        / "bundle"
    )


@pytest.fixture(scope="module")
def trained(spread: Path, workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(workshop, spread, tmp_path_factory.mktemp("spread") / "run", "--steps", 30)


def run(workshop: Path, bundle: Path, out: Path, *arguments: object) -> Path:
    prge(
        "run", "--bundle", bundle, "--train", workshop / "train.jsonl", "--dev", workshop / "dev.jsonl",
        "--task", workshop / "task.yaml", "--out", out, "--learning-rate", 0.01,
        "--lr-scheduler-type", "constant", "--warmup-steps", 0, "--threads", 1, *arguments,
    )  # fmt: skip
    return out


def test_modules_have_ranks_within_the_budget(spread: Path, workshop: Path) -> None:
    modules = open_bundle(spread).chain.modules
    assert len({module.rank for module in modules}) > 1
    assert all(1 <= module.rank <= 4 for module in modules)
    assert sum(m.rank * m.out_features for m in modules) <= sum(2 * m.out_features for m in modules)
    assert read_lora(open_bundle(spread).adapter).modules == tuple(sorted(modules, key=lambda m: m.name))
    assert json.loads(prge("inspect", spread, "--json").stdout)["lora"]["init"] == "eva"


def test_exact_gradients_learn(trained: Path) -> None:
    events = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "evaluation"]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("estimator", ["tangent", "antithetic"])
def test_estimators_with_forward_passes_take_steps(
    spread: Path, workshop: Path, tmp_path: Path, estimator: str
) -> None:
    out = run(workshop, spread, tmp_path / "run", "--steps", 3, "--estimator", estimator)
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 3 and np.isfinite(losses).all() and len({*losses}) == 3


def test_a_trained_adapter_is_merged_and_written_as_peft_does(
    trained: Path, spread: Path, workshop: Path, tmp_path: Path
) -> None:
    prge("publish", trained, "--format", "merged", "--out", tmp_path / "merged")
    name = "model.layers.1.self_attn.q_proj"
    before, after = (
        safetensors.numpy.load_file(folder / "model.safetensors")[f"{name}.weight"]
        for folder in (workshop / "model", tmp_path / "merged")
    )
    adapter = read_lora(trained / "final")
    change = 16 / 2 * adapter.lora_b[name] @ adapter.lora_a[name]
    np.testing.assert_allclose(after - before, change, atol=1e-6)
    prompts = ("aa bb", "cc dd ?")
    arguments = ["--prompt", *prompts, "--max-tokens", 12, "--json"]
    lines = prge("generate", "--bundle", spread, "--adapter", trained, *arguments).stdout.splitlines()
    result = [json.loads(line)["tokens"] for line in lines]
    assert result == expected(workshop / "model", trained / "final", prompts)
