"""`prge tune` learns from a reward: evolution strategies and policy gradients, from prompts to an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prge.cli.settings import parse_settings
from server_export.tune import decisions
from server_export.tune.settings import TuneSettings
from server_export.tune.stages import tune
from tests.verbs import REPOSITORY, prge

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def arguments(workshop: Path, tmp_path: Path) -> list[object]:
    """Return arguments of a short tuning into `out`, whose reward is the share of a letter."""
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, completion, row): return completion.count('a') / 9")
    return [
        workshop / "train.jsonl", "--reward", f"{reward}:score", "--max-completion-length", 8,
        "--steps", 8, "--threads", 1, "--out", tmp_path / "out", "--json", tmp_path / "result.json",
    ]  # fmt: skip


def assert_usable(out: Path) -> None:
    """Check that the folder of a tuning generates, is scored, and is not repeated."""
    assert prge("generate", out, "--prompt", "aa", "--max-tokens", 4, "--threads", 1).stdout
    journal = (out / "run/journal.jsonl").read_bytes()
    assert "$ prge run" not in prge("tune", "--resume", out).stdout
    assert (out / "run/journal.jsonl").read_bytes() == journal
    assert (out / "adapter/adapter_model.safetensors").is_file() and (out / "report.html").is_file()


@pytest.mark.whole
def test_evolution_strategies_choose_rate_and_epsilon_by_the_reward_of_development_prompts(
    workshop: Path, arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "RATES", (0.01, 0.03))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    words = [
        *arguments,
        "--bundle",
        workshop / "bundle",
        "--dev",
        workshop / "dev.jsonl",
        "--objective",
        "es",
    ]
    result = tune(parse_settings(TuneSettings, [*map(str, words)], "prge tune", ["data"]))
    chosen: dict[str, Any] = result["chosen"]
    assert chosen["estimator"]["value"] == "antithetic"
    assert chosen["learning_rate"]["why"].startswith("reward ")
    assert chosen["epsilon"]["why"].startswith("rewards of development prompts: ")
    before, after = result["score_before"], result["score_after"]
    assert after["reward"] >= before["reward"] and "loss" not in after
    config = (tmp_path / "out/run/config.yaml").read_text()
    assert f"epsilon: {chosen['epsilon']['value']}" in config and "objective: es" in config
    assert_usable(tmp_path / "out")


@pytest.mark.whole
def test_policy_gradients_learn_from_a_model(workshop: Path, arguments: list[object], tmp_path: Path) -> None:
    """The export has the programs that write completions; development prompts are split off."""
    words = ["--model", workshop / "model", "--target-modules", "o_proj", "--learning-rate", 0.01]
    done = prge("tune", *arguments, *words)
    result = json.loads((tmp_path / "result.json").read_text())
    roles = result["chosen"]["roles"]["value"]
    assert {"backward", "prefill", "decode"} <= {*roles} and "epsilon" not in result["chosen"]
    assert "dev: 4 of 24 rows" in done.stdout and result["score_after"]["examples"] == 4
    assert_usable(tmp_path / "out")


def test_a_reward_that_can_not_be_used_is_refused_before_anything_is_written(
    workshop: Path, arguments: list[object], tmp_path: Path
) -> None:
    model = ["--model", workshop / "model"]
    (tmp_path / "broken.py").write_text("1 /")
    (tmp_path / "rules.yaml").write_text("rewards: [{rule: guess}]")
    for word in ("none.py:score", "broken.py", "rules.yaml"):
        done = prge("tune", *arguments, *model, "--reward", tmp_path / word, check=False)
        assert done.returncode == 2 and word.partition(":")[0] in done.stderr
        assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_a_bundle_that_writes_no_text_is_refused(
    upper_bundle: Path, arguments: list[object], tmp_path: Path
) -> None:
    done = prge("tune", *arguments, "--bundle", upper_bundle, check=False)
    assert done.returncode == 2 and "export with the roles prefill and decode" in done.stderr
    assert not (tmp_path / "out/rows").exists()


def test_too_little_memory_is_refused_before_the_export(
    workshop: Path, arguments: list[object], tmp_path: Path
) -> None:
    done = prge("tune", *arguments, "--model", workshop / "model", "--memory", "20MB", check=False)
    assert done.returncode == 2 and "--memory 20 MB is too little:" in done.stderr
    assert not (tmp_path / "out").exists()
