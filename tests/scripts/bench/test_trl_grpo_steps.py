"""Policy gradients have the losses and the updates of TRL's GRPOTrainer for the same completions."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from against_trl import DEMO
from safetensors.numpy import load_file

from prge.formats.journal import Journal
from tests.verbs import prge
from tests.workshop import FolderBuilder, write_rows

SCRIPT = Path(__file__).parents[3] / "scripts/bench/trl_grpo_steps.py"
STEPS, BATCH, GENERATIONS, ITERATIONS, LENGTH, RATE = 6, 2, 4, 2, 8, 0.5
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def demo_bundle(made_once: FolderBuilder) -> Path:
    """Return the demo's model with LoRA on all linear layers, which can write."""
    arguments = ["--target-modules", "all-linear", "--adapter", "lora"]
    arguments += ["--roles", "backward", "prefill", "decode"]

    def make(folder: Path) -> None:
        prge("export", "--model", DEMO / "model", "--out", folder / "bundle", *arguments)

    return made_once("demo-lora-that-writes", make) / "bundle"


def engine_run(bundle: Path, folder: Path, *arguments: object) -> tuple[Path, list[dict[str, Any]]]:
    """Train on a reward of the letters of completions, and return the run and its steps."""
    texts = [json.loads(line)["text"] for line in (DEMO / "train.jsonl").read_text().splitlines()[:6]]
    write_rows(folder / "rows.jsonl", [{"prompt": text} for text in texts])
    (folder / "reward.py").write_text("def reward(prompt, completion, row): return completion.count('e')")
    prge(
        "run", "--bundle", bundle, "--train", folder / "rows.jsonl", "--reward", folder / "reward.py",
        "--out", folder / "run", "--steps", STEPS, "--batch-size", BATCH, "--num-generations", GENERATIONS,
        "--num-iterations", ITERATIONS, "--max-completion-length", LENGTH, "--optimizer", "sgd",
        "--learning-rate", RATE, "--lr-scheduler-type", "constant", "--warmup-steps", 0, "--save-steps", 0,
        "--keep-gradients", *arguments,
    )  # fmt: skip
    with Journal(folder / "run/journal.jsonl", writable=False) as journal:
        return folder / "run", [step for number in range(STEPS) if (step := journal.step(number)) is not None]


def trl_steps(bundle: Path, folder: Path, steps: list[dict[str, Any]], **grpo: Any) -> list[float]:
    """Take the same steps with TRL's trainer and return their losses."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    sampled = [step for step in steps if "completions" in step]
    order = [number for step in sampled for number in step["rows"]]
    ordered = write_rows(folder / "ordered.jsonl", [rows[number - 1] for number in order])
    every = [[each for group in step["completions"] for each in group] for step in sampled]
    settings = {
        "model": str(DEMO / "model"), "adapter": str(bundle / "adapter"), "out": str(folder / "trl"),
        "rows": str(ordered),
        "completions": [[each["tokens"] for each in completions] for completions in every],
        "rewards": [[each["reward"] for each in completions] for completions in every],
        "grpo": {
            "per_device_train_batch_size": BATCH * GENERATIONS, "num_generations": GENERATIONS,
            "num_iterations": ITERATIONS, "max_completion_length": LENGTH, "learning_rate": RATE,
            "steps_per_generation": 1, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
            "shuffle_dataset": False, "num_train_epochs": 1, **grpo,
        },
    }  # fmt: skip
    (folder / "trl.json").write_text(json.dumps(settings))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [sys.executable, SCRIPT, folder / "trl.json"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    losses: list[float] = json.loads(output.splitlines()[-1])["losses"]
    return losses


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="takes the package trl")
@pytest.mark.parametrize(
    ("words", "grpo"),
    [
        ((), {"beta": 0.0, "loss_type": "grpo", "scale_rewards": "group"}),
        (
            ("--beta", 0.2, "--loss-type", "dr_grpo", "--scale-rewards", "none"),
            {"beta": 0.2, "loss_type": "dr_grpo", "scale_rewards": "none"},
        ),
        (
            ("--beta", 0.2, "--loss-type", "bnpo", "--scale-rewards", "batch"),
            {"beta": 0.2, "loss_type": "bnpo", "scale_rewards": "batch"},
        ),
    ],
    ids=["grpo", "dr_grpo", "bnpo"],
)
def test_losses_and_updates_are_those_of_trl(
    words: tuple[object, ...], grpo: dict[str, Any], demo_bundle: Path, tmp_path: Path
) -> None:
    run, steps = engine_run(demo_bundle, tmp_path, *words)
    expected = trl_steps(demo_bundle, tmp_path, steps, **grpo)
    losses = np.array([step["loss"] for step in steps])
    assert len(expected) == STEPS and np.ptp(losses) > 1e-4
    np.testing.assert_allclose(losses, expected, atol=1e-4 * np.abs(losses).max())
    start = load_file(demo_bundle / "adapter" / WEIGHTS)
    actual, wanted = (load_file(folder / WEIGHTS) for folder in (run / "final", tmp_path / "trl/adapter"))
    change = np.concatenate([(wanted[name] - start[name]).ravel() for name in start])
    difference = np.concatenate([(actual[name] - wanted[name]).ravel() for name in start])
    assert np.linalg.norm(difference) < 1e-4 * np.linalg.norm(change)
