"""`prge run` learns from a reward of generated text, and refuses what it can't learn from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from prge.formats.journal import Journal
from tests.verbs import prge
from tests.workshop import export, write_rows

PYTHON = """
def vowels(prompt, completion, row):
    return sum(completion.count(each) for each in "aeiou") / 6

def raises(prompt, completion, row):
    raise KeyError(row["prompt"])

def same(prompt, completion, row):
    return 0.5
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    words = ["aa", "bb", "cc", "dd"]
    texts = [f"{first} {second}" for first in words for second in words]
    (tmp_path / "reward.py").write_text(PYTHON)
    write_rows(tmp_path / "dev.jsonl", [{"prompt": text} for text in texts[12:]])
    return write_rows(tmp_path / "rows.jsonl", [{"prompt": text, "n": len(text)} for text in texts[:12]])


def arguments(workshop: Path, rows: Path, out: Path, *more: object) -> list[object]:
    return [
        "run", "--bundle", workshop / "bundle", "--train", rows, "--out", out, "--max-completion-length", 8,
        "--threads", 1, *more,
    ]  # fmt: skip


def records(run: Path) -> list[dict[str, Any]]:
    """Return the journal's steps of a run."""
    with Journal(run / "journal.jsonl", writable=False) as journal:
        return [step for number in range(journal.steps) if (step := journal.step(number)) is not None]


def test_the_reward_rises(workshop: Path, rows: Path, tmp_path: Path) -> None:
    reward = ["--reward", f"{tmp_path}/reward.py:vowels", "--dev", tmp_path / "dev.jsonl"]
    settings = ["--steps", 30, "--learning-rate", 0.05, "--eval-steps", 10]
    prge(*arguments(workshop, rows, tmp_path / "run", *reward, *settings))
    steps = records(tmp_path / "run")
    first, last = (sum(step["reward"] for step in part) / 6 for part in (steps[:6], steps[-6:]))
    assert last > first + 0.1
    train = json.loads((tmp_path / "run/run.json").read_text())["train"]
    assert train["best"]["reward"] > train["before"]["reward"]


def test_a_run_of_evolution_strategies_is_replayed_without_an_engine(
    workshop: Path, rows: Path, tmp_path: Path
) -> None:
    reward = ["--reward", tmp_path / "reward.py:vowels", "--estimator", "antithetic", "--steps", 5]
    prge(*arguments(workshop, rows, tmp_path / "run", *reward))
    assert all(
        {"projected_gradients", "reward", "solved"} <= step.keys() for step in records(tmp_path / "run")
    )
    replayed = prge("replay", tmp_path / "run", "--out", tmp_path / "replayed")
    assert "the same bits" in replayed.stdout


def test_a_reward_of_rules_needs_no_code(workshop: Path, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rewards: [{rule: length, unit: words, at_most: 2}]")
    prge(*arguments(workshop, rows, tmp_path / "run", "--reward", tmp_path / "rules.yaml", "--steps", 2))
    assert {step["solved"] for step in records(tmp_path / "run")} <= {n / 32 for n in range(33)}


def test_a_run_is_resumed_from_another_folder(
    workshop: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prge(*arguments(workshop, rows, tmp_path / "run", "--reward", "reward.py:vowels", "--steps", 2))
    os.chdir("/")
    prge("run", "--resume", tmp_path / "run")


def test_a_run_is_not_resumed_with_another_reward(workshop: Path, rows: Path, tmp_path: Path) -> None:
    prge(
        *arguments(workshop, rows, tmp_path / "run", "--reward", tmp_path / "reward.py:vowels", "--steps", 2)
    )
    (tmp_path / "reward.py").write_text(PYTHON.replace("/ 6", "/ 7"))
    refused = prge("run", "--resume", tmp_path / "run", check=False)
    assert refused.returncode == 2 and "the reward is different" in refused.stderr


def test_code_of_another_persons_run_is_not_executed(workshop: Path, rows: Path, tmp_path: Path) -> None:
    """Not even code in the folder of the run itself."""
    run = tmp_path / "run"
    prge(*arguments(workshop, rows, run, "--reward", tmp_path / "reward.py:vowels", "--steps", 2))
    (run / "evil.py").write_text("open('/tmp/executed', 'w')")
    config = (run / "config.yaml").read_text()
    own = f"{tmp_path}/reward.py:vowels"
    (run / "config.yaml").write_text(config.replace(own, f"{run}/evil.py"))
    refused = prge("run", "--resume", run, check=False)
    assert refused.returncode == 2 and "paths outside of its folder, or code, " in refused.stderr
    assert f"--reward {run}/evil.py" in refused.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--reward", "{folder}/reward.py:raises"], "Row "),
        (["--reward", "{folder}/reward.py:raises"], "KeyError"),
        (["--reward", "{folder}/reward.py:absent"], "has no function absent"),
        (["--reward", "{folder}/none.yaml"], "No such file"),
        (["--objective", "es"], "needs a --reward"),
        (["--num-generations", "4"], "is for --reward"),
        (["--reward", "{folder}/reward.py:same", "--objective", "dpo"], "learns from answers"),
        (["--reward", "{folder}/reward.py:same", "--objective", "es", "--estimator", "exact"], "perturbed"),
        (["--reward", "{folder}/reward.py:same", "--max-completion-length", "64"], "the context of 32"),
        (["--reward", "{folder}/reward.py:same", "--num-generations", "1"], "must be at least 2"),
        (["--reward", "{folder}/reward.py:same", "--task", "sst2"], "leave --task out"),
        (["--reward", "{folder}/reward.py:same", "--temperature", "0"], "a --temperature above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_learned_from_is_refused(
    workshop: Path, rows: Path, tmp_path: Path, words: list[str], expected: str
) -> None:
    filled = [word.format(folder=tmp_path) for word in words]
    done = prge(*arguments(workshop, rows, tmp_path / "run", "--steps", 1, *filled), check=False)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr
    if "raises" not in filled[-1]:  # that reward fails for a row, when the run has begun
        assert not (tmp_path / "run").exists()


def test_a_bundle_that_can_not_write_is_refused(workshop: Path, rows: Path, tmp_path: Path) -> None:
    bundle = export(workshop / "model", tmp_path / "bundle", "--roles", "forward")
    words = arguments(workshop, rows, tmp_path / "run", "--reward", tmp_path / "reward.py:same", "--steps", 1)
    words[2] = bundle
    done = prge(*words, check=False)
    assert done.returncode == 2 and "prefill and decode" in done.stderr
