"""The tasks and tables of the study of rewards; its trainings are those of `prge run`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import reward
import yaml
from reward import Task, score_texts, study
from reward_tasks import COUNTS, LENGTHS, RULES, TASKS, make_splits

from prge.rewards.opening import open_reward
from tests.workshop import write_rows

WRONG = {
    "short": ["", "Cows", "Cows give milk", "word " * 16 + "."],
    "json": ['{"name": "Ada"}', "Ada has a red cow.", '```json\n{"name": "Ada", "color": "red"}\n```'],
    "sum": ["", "The answer is 5.", "1000"],
}


@pytest.fixture
def rules(tmp_path: Path, task: str) -> Path:
    path = tmp_path / "reward.yaml"
    path.write_text(yaml.safe_dump({"rewards": RULES[task]}), encoding="utf-8")
    return path


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_always_the_same_and_share_no_prompt(task: str) -> None:
    splits = make_splits(task)
    assert {split: len(rows) for split, rows in splits.items()} == COUNTS
    prompts = [row["prompt"][0]["content"] for rows in splits.values() for row in rows]
    assert len(set(prompts)) == len(prompts)
    assert splits == make_splits(task)


@pytest.mark.parametrize("task", TASKS)
def test_right_answers_solve_a_prompt_and_wrong_ones_do_not(task: str, rules: Path) -> None:
    score = open_reward(str(rules))
    for row in make_splits(task)["test"]:
        assert score(row["prompt"], row.get("completion", "They are good for it."), row) == 1
        assert all(score(row["prompt"], text, row) < 1 for text in WRONG[task])


@pytest.mark.parametrize("task", ["sum"])
def test_figures_are_means_over_held_back_prompts(task: str, rules: Path, tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "What is one plus one?"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt, "total": 2}] * 4)
    figures = score_texts(["2", "3", "two or 2", "two"], rows, rules)
    assert figures["solved"] == 0.25
    assert figures["reward"] == pytest.approx((1 + 2 / 4 + 3 / 4 + 0) / 4)
    assert figures["words"] == 1.5


def test_every_task_has_its_methods_and_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers are trained on where there are any, and TRL trains on one task."""
    calls: list[tuple[str, str, int]] = []

    def train(arguments: argparse.Namespace, method: str, seed: int, task: Task) -> dict[str, Any]:
        calls.append((task.name, method, seed))
        return {"seed": seed, "solved": seed / 4}

    monkeypatch.setattr(reward, "train_on_engine", train)
    monkeypatch.setattr(reward, "train_with_trl", train)
    monkeypatch.setattr(reward, "make_once", lambda verb, out, **flags: out)
    monkeypatch.setattr(reward, "score", lambda *arguments, **flags: {"solved": 0.0})
    arguments = argparse.Namespace(
        out=tmp_path, model="model", methods=reward.METHODS, seeds=[1, 2], threads=1
    )
    figures = {task: study(arguments, task) for task in TASKS}
    assert {task: [*each] for task, each in figures.items()} == {
        "short": ["before", "es", "grpo", "trl"],
        "json": ["before", "es", "grpo", "answers"],
        "sum": ["before", "es", "grpo", "answers"],
    }
    assert figures["sum"]["es"]["solved"] == {"mean": 0.375, "lowest": 0.25, "highest": 0.5}
    assert calls[:2] == [("short", "es", 1), ("short", "es", 2)]
    row = json.loads((tmp_path / "json" / "train.jsonl").read_text().splitlines()[0])
    assert open_reward(str(tmp_path / "json" / "reward.yaml"))(row["prompt"], row["completion"], row) == 1
    assert LENGTHS.keys() == TASKS.keys()
