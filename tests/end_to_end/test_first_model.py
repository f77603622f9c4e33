"""The commands of docs/get-started/first-model.md run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.verbs import REPOSITORY, prge

PAGE = REPOSITORY / "docs/get-started/first-model.md"


def commands(text: str) -> list[list[str]]:
    """Return the arguments of every command in the text's `bash` blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_the_commands_of_the_document_work_step_by_step(tmp_path: Path) -> None:
    (tmp_path / "server_export").symlink_to(REPOSITORY / "server_export")
    quoted = commands(PAGE.read_text(encoding="utf-8"))
    assert [command[1] for command in quoted] == [
        "doctor", "export", "inspect", "run", "eval", "replay", "report", "publish",
    ]  # fmt: skip
    for command in quoted:
        assert command[0] == "prge"
        # No command needs another role.
        done = prge(*command[1:], *(["--roles", "jvp"] if command[1] == "export" else []), cwd=tmp_path)
        if command[1] == "eval":
            accuracy = float(re.search(r"accuracy (\S+)", done.stdout).group(1))  # type: ignore[union-attr]
            assert accuracy > 0.8
        if command[1] == "replay":
            assert "the same bits" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
