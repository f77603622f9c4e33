"""Tab completion in a real bash: verbs, flags and values, without running a verb."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import second_tier

if shutil.which("bash") is None:
    pytest.skip("there is no bash", allow_module_level=True)

# Does what readline does: passes the words of the line, the last one incomplete, to the registered function.
_TAB = """
eval "$(register-python-argcomplete prge)"
[[ "$(complete -p prge)" == *"-o default"*_python_argcomplete* ]] || exit 9
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
read -ra COMP_WORDS <<< "$1"
[[ "$1" != *" " ]] || COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete prge
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def tab(tmp_path: Path) -> object:
    """Return the completions of a line in a bash whose PATH has a `prge` of this code."""
    command = tmp_path / "bin" / "prge"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m prge.cli.main "$@"\n', encoding="utf-8")
    command.chmod(0o755)

    def press(line: str) -> set[str]:
        done = subprocess.run(
            ["bash", "-c", _TAB, "bash", line],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            cwd=tmp_path,
            env={
                "PATH": f"{command.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
                "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
            },
        )
        assert [path.name for path in tmp_path.iterdir()] == ["bin"]  # no verb has run
        return set(done.stdout.split())

    return press


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("prge t", {"tune"}),
        ("prge run --estimator ", {"tangent", "antithetic", "fzoo", "exact"}),
        ("prge run --lr 3 --se", {"--seed", "--select"}),
        ("prge run --bundle ", {"bin/"}),
        *second_tier(
            ("prge tune rows.jsonl --batch", {"--batch-size"}),
            ("prge run --estimator ta", {"tangent"}),
            ("prge export --no-", {"--no-cache"}),
            ("prge android pu", {"push", "pull"}),
            ("prge android push --ser", {"--serial"}),
            ("prge fleet join --bu", {"--bundle"}),
            ("prge doctor --", {"--json", "--config", "--print-config", "--help"}),
            ("prge cache --clear --js", {"--json"}),
            ("prge nonsense --", set()),
            ("prge report -- ", set()),
            ("prge run --resume ", {"bin/"}),
            ("prge chat ", set()),
        ),
    ],
)
def test_a_line_is_completed(tab: object, line: str, completed: set[str]) -> None:
    assert callable(tab)
    assert tab(line) == completed
