"""The reward that a user names.

--reward reward.yaml        rules with weights (rules.py)
--reward reward.py:score    a function of the user's own file (python_file.py)
"""

from __future__ import annotations

from collections.abc import Collection

from prge.cli.inputs import split_reward
from prge.errors import ConfigError, format_value
from prge.formats.bundle import file_sha256
from prge.formats.journal import Record
from prge.formats.signatures import DECODE, PREFILL
from prge.rewards.python_file import PythonReward
from prge.rewards.reward import Reward
from prge.rewards.rules import read_rules


def open_reward(word: str) -> Reward:
    """Open the reward that a user names: a YAML file, or FILE.py:FUNCTION.

    Raises:
        ConfigError: there is no such file, or it can't be used as a reward.
    """
    path, function = split_reward(word)
    if not path.is_file():
        raise ConfigError(
            f"--reward is {format_value(word)}:",
            [f"there is no file {path}"],
            remedy="Give a Python file and a function, such as reward.py:score, or a YAML file of rules.",
            code="file-missing",
        )
    return PythonReward(path, function) if path.suffix == ".py" else read_rules(path)


def describe_reward(word: str) -> Record:
    """Return what a journal stores of a reward: its name and the hash of its file."""
    path, function = split_reward(word)
    return {"name": path.name + (f":{function}" if function else ""), "sha256": file_sha256(path)}


def check_roles(roles: Collection[str]) -> None:
    """Raise ConfigError if programs with these roles can't write the completions of a reward."""
    if not {PREFILL, DECODE} <= {*roles}:
        raise ConfigError(
            "The settings don't fit the bundle:",
            [f"--reward is set, but the bundle has only the roles {', '.join(roles)}"],
            remedy="export with the roles prefill and decode, which generate text",
            code="role-missing",
        )
