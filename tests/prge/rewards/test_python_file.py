"""Reward functions of the user's file: what they return, and how they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from prge.errors import ConfigError, RewardError
from prge.rewards.opening import open_reward
from prge.rewards.python_file import PythonReward
from tests.refusals import raises


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("LENGTH = 5\n")
    path = tmp_path / "my reward.py"
    path.write_text(
        dedent("""
            import os, subprocess, sys, time
            import numpy as np
            from helper import LENGTH

            print("loading")

            def reward(prompt, completion, row):
                return float(len(completion) == LENGTH) + row["bonus"]

            def as_numpy(prompt, completion, row): return np.float32(0.5)
            def nan(prompt, completion, row): return float("nan")
            def huge(prompt, completion, row): return -sys.float_info.max
            def text(prompt, completion, row): return "good"
            def raises(prompt, completion, row):
                return row["missing"]
            def flood(prompt, completion, row):
                print("x" * 10_000_000)
                return 1
            def sleeps(prompt, completion, row): time.sleep(60)
            def ends(prompt, completion, row): os._exit(3)
            def process(prompt, completion, row): return os.getpid()
            def group(prompt, completion, row): return os.getpgrp()
            def starts(prompt, completion, row): return subprocess.Popen(["sleep", "60"]).pid
        """)
    )
    return path


@pytest.fixture
def opened(file: Path) -> Iterator[object]:
    rewards: list[PythonReward] = []

    def open_function(function: str, seconds: float = 20) -> PythonReward:
        rewards.append(PythonReward(file, function, seconds))
        return rewards[-1]

    yield open_function
    for reward in rewards:
        reward.close()


def test_a_function_gets_prompt_completion_and_row(opened) -> None:  # type: ignore[no-untyped-def]
    reward = opened("")
    row = {"bonus": 0.25, "when": Path("x")}
    assert reward("p", "hello", row) == 1.25 and reward([{"role": "user"}], "hi\n", row) == 0.25
    assert opened("as_numpy")("p", "c", {}) == 0.5


def test_prints_are_not_responses(opened) -> None:  # type: ignore[no-untyped-def]
    assert opened("flood")("p", "c", {}) == 1


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("nan", "reward-not-finite", "reward is 'nan', must be a finite number"),
        (
            "huge",
            "reward-not-finite",
            "reward is -1.79.*e\\+308, must be a finite number of at most 1e\\+100",
        ),
        ("text", "reward-not-finite", "reward is .*good.*, must be a finite number"),
        ("raises", "reward-raised", "raised an error: KeyError: 'missing' .*my reward.py"),
        ("ends", "reward-ended", "ended its process with code 3"),
    ],
)
def test_a_function_that_fails_is_an_error(  # type: ignore[no-untyped-def]
    opened, function: str, code: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        opened(function)("p", "c", {"bonus": 0})
    assert caught.value.code == code


def test_a_function_that_never_returns_is_stopped(opened) -> None:  # type: ignore[no-untyped-def]
    reward, start = opened("sleeps", 2), time.monotonic()
    with raises(RewardError, "reward-too-slow", containing="2 seconds"):
        reward("p", "c", {})
    assert time.monotonic() - start < 10


def test_ctrl_c_does_not_reach_the_function(opened) -> None:  # type: ignore[no-untyped-def]
    assert opened("group")("p", "c", {}) != os.getpgrp()


def test_what_the_function_started_ends_with_it(opened) -> None:  # type: ignore[no-untyped-def]
    reward, start = opened("starts"), time.monotonic()
    process = int(reward("p", "c", {}))
    reward.close()
    assert time.monotonic() - start < 30
    assert has_ended(process)


def test_the_function_ends_with_a_killed_run(file: Path) -> None:
    code = "import sys, time; from pathlib import Path; from prge.rewards.python_file import PythonReward; "
    code += "print(PythonReward(Path(sys.argv[1]), 'process')('p', 'c', {}), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        process = int(float(run.stdout.readline()))
        run.send_signal(signal.SIGKILL)
    assert has_ended(process)


def has_ended(process: int) -> bool:
    """Return whether a process ends within a few seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("{file}:absent", "has no function absent"),
        ("{folder}/none.py:score", "there is no file"),
        ("{folder}/broken.py", "SyntaxError"),
        ("{folder}/exits.py", "SystemExit"),
    ],
)
def test_a_file_that_is_no_reward_is_refused(file: Path, word: str, message: str) -> None:
    (file.parent / "broken.py").write_text("def reward(:\n")
    (file.parent / "exits.py").write_text("raise SystemExit(1)\n")
    with pytest.raises(ConfigError, match=message):
        open_reward(word.format(file=file, folder=file.parent))
