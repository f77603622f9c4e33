"""Learn from a reward alone: evolution strategies, GRPO, and training on right answers, on three tasks.

    python scripts/studies/reward.py --out reward [--tasks short json sum] [--methods es grpo answers trl]

The model is SmolLM2-135M-Instruct in int4 (--model is another one); reward_tasks.py has the tasks. A method
gets 200 prompts, 40 for development, which choose the step, and 100 held back, which are completed once. All
methods train LoRA on all linear layers.

    es       evolution strategies: `prge run --objective es`
    grpo     policy gradients: `prge run --objective grpo`
    answers  exact gradients of the right answers, for tasks that have them: `prge run`
    trl      TRL's GRPOTrainer in PyTorch, float32, on one task: the same prompts, completions and rate

Prints JSON, by task and method: `solved` and `reward` of held-back prompts, `words` of a completion, `tokens`
written in training, `seconds` of training, `memory_mb` (peak resident memory); the task's `before` has the
figures of the original model. What is finished is kept: the same command continues the study.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from reward_tasks import LENGTHS, RULES, TASKS, Rows, make_splits
from verbs import (
    answers,
    make_once,
    make_parser,
    prge,
    report,
    smollm2,
    summarize,
    training_summary,
    write_rows,
)

from prge.formats.run_folder import read_metrics
from prge.rewards.opening import open_reward
from prge.training.estimators.rollouts import SOLVED

METHODS = ("es", "grpo", "answers", "trl")
FIGURES = ("solved", "reward", "words", "tokens", "seconds", "memory_mb")
# Tasks with right answers, and the task of TRL's trainer.
ANSWERED, TRL_TASK = ("json", "sum"), "short"
SHAPE: dict[str, Any] = {"adapter": "lora", "target_modules": "all-linear", "rank": 8}
# Rates and sizes were chosen on development prompts.
SETTINGS: dict[str, dict[str, Any]] = {
    "es": {
        **{"objective": "es", "steps": 16, "batch_size": 4, "queries": 8},
        **{"epsilon": 0.03, "learning_rate": 0.01, "temperature": 0.0},
    },
    "grpo": {
        **{"objective": "grpo", "steps": 16, "batch_size": 2, "num_generations": 8},
        **{"learning_rate": 1e-3},
    },
    "answers": {"steps": 16, "batch_size": 16, "learning_rate": 1e-3},
}
EVALUATIONS = 2


@dataclass(frozen=True)
class Task:
    """What all trainings of a task read: the bundle, the rows of each split, and the rules of the reward."""

    name: str
    bundle: Path
    files: Mapping[str, Path]
    rules: Path


def main() -> None:
    """Parse the flags, run every task, method and seed, and print JSON."""
    parser = make_parser(__doc__, out=Path("reward"))
    parser.add_argument("--model", help="folder, GGUF file or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report({task: study(arguments, task) for task in arguments.tasks}, arguments.out)


def study(arguments: argparse.Namespace, task: str) -> dict[str, Any]:
    """Return the figures of a task: before training, and by method."""
    out = arguments.out / task
    out.mkdir(exist_ok=True)
    bundle = make_once(
        "export", arguments.out / "bundle", model=arguments.model or smollm2(), quantize="8da4w", **SHAPE
    )
    files = {split: write_rows(out / f"{split}.jsonl", rows) for split, rows in make_splits(task).items()}
    rules = out / "reward.yaml"
    rules.write_text(yaml.safe_dump({"rewards": RULES[task]}), encoding="utf-8")
    task_files = Task(task, bundle, files, rules)
    figures: dict[str, Any] = {"before": score(task_files, "base", out / "before.json", arguments.threads)}
    for method in arguments.methods:
        if (method == "answers" and task not in ANSWERED) or (method == "trl" and task != TRL_TASK):
            continue
        train = train_with_trl if method == "trl" else train_on_engine
        runs = [train(arguments, method, seed, task_files) for seed in arguments.seeds]
        figures[method] = summarize(runs, [name for name in FIGURES if name in runs[0]])
    return figures


def train_on_engine(arguments: argparse.Namespace, method: str, seed: int, task: Task) -> dict[str, Any]:
    """Train with `prge run`, and return the figures."""
    run = task.files["test"].parent / f"{method}-{seed}"
    flags = dict(SETTINGS[method])
    if method != "answers":
        flags |= {"reward": task.rules, "max_completion_length": LENGTHS[task.name]}
    make_once(
        "run", run, bundle=task.bundle, train=task.files["train"], dev=task.files["dev"], seed=seed,
        eval_steps=flags["steps"] // EVALUATIONS, threads=arguments.threads, **flags,
    )  # fmt: skip
    steps = [record for record in read_metrics(run) if record["event"] == "step"]
    summary = training_summary(run)
    return {
        "seed": seed,
        **score(task, f"tuned={run}", run.with_suffix(".json"), arguments.threads),
        "tokens": sum(record.get("completion_tokens", 0) for record in steps),
        "seconds": summary["seconds"] - summary["evaluation_seconds"],
        "memory_mb": summary["memory"]["peak_bytes"] / 1e6,
    }


def score(task: Task, adapter: str, path: Path, threads: int) -> dict[str, float]:
    """Return the figures of greedy completions of held-back prompts, kept in a file."""
    if not path.exists():
        rows = task.files["test"]
        flags: dict[str, Any] = {"max_tokens": LENGTHS[task.name], "threads": threads}
        (completions,) = answers(bundle=task.bundle, adapter=[adapter], data=rows, **flags).values()
        texts = [each["text"] for each in completions]
        path.write_text(json.dumps(score_texts(texts, rows, task.rules)), encoding="utf-8")
    figures: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def score_texts(texts: list[str], rows: Path, rules: Path) -> dict[str, float]:
    """Return the figures of completions of all rows."""
    reward = open_reward(str(rules))
    fields: Rows = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    rewards = [reward(row["prompt"], text, row) for text, row in zip(texts, fields, strict=True)]
    return {
        "solved": statistics.mean(each >= SOLVED for each in rewards),
        "reward": statistics.mean(rewards),
        "words": statistics.mean(len(text.split()) for text in texts),
    }


def train_with_trl(arguments: argparse.Namespace, method: str, seed: int, task: Task) -> dict[str, Any]:
    """Train with TRL's trainer in a process of its own, and return the figures of its last adapter."""
    out = task.files["test"].parent / f"{method}-{seed}"
    grpo = SETTINGS["grpo"]
    settings = {
        "model": str(merged_model(arguments, task.bundle)), "adapter": str(task.bundle / "adapter"),
        "out": str(out), "rows": str(task.files["train"]), "reward": str(task.rules),
        "grpo": {
            "per_device_train_batch_size": grpo["batch_size"] * grpo["num_generations"],
            "num_generations": grpo["num_generations"], "max_completion_length": LENGTHS[task.name],
            "beta": 0.0, "learning_rate": grpo["learning_rate"], "optim": "adamw_torch",
            "loss_type": "grpo", "max_steps": grpo["steps"], "seed": seed,
            # Defaults of `prge run`.
            "lr_scheduler_type": "cosine", "warmup_steps": 5, "adam_beta2": 0.98, "max_grad_norm": 0.0,
        },
    }  # fmt: skip
    result = out / "result.json"
    if not result.exists():
        out.mkdir(exist_ok=True)
        (out / "trl.json").write_text(json.dumps(settings), encoding="utf-8")
        script = Path(__file__).parents[1] / "bench" / "trl_grpo_steps.py"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads)}
        output = subprocess.run(
            [sys.executable, str(script), str(out / "trl.json")],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ).stdout
        result.write_text(output.splitlines()[-1], encoding="utf-8")
    trained = json.loads(result.read_text(encoding="utf-8"))
    return {
        "seed": seed,
        **score(task, f"tuned={out / 'adapter'}", out / "test.json", arguments.threads),
        "tokens": trained["tokens"],
        "seconds": sum(trained["seconds"]),
        "memory_mb": trained["memory_mb"],
    }


def merged_model(arguments: argparse.Namespace, bundle: Path) -> Path:
    """Return a folder with the model in float32, as transformers loads it."""
    folder: Path = arguments.out / "model"
    if not folder.exists():
        prge("publish", bundle / "adapter", bundle=bundle, out=folder, format="merged")
    return folder


if __name__ == "__main__":
    main()
