"""The commands of docs/get-started/first-model.md, run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.verbs import REPOSITORY, prge

PAGE = REPOSITORY / "docs/get-started/first-model.md"


def commands(text: str) -> list[list[str]]:
    """The words of every command in the text's `bash` blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_step_by_step(tmp_path: Path) -> None:
    (tmp_path / "server_export").symlink_to(REPOSITORY / "server_export")
    quoted = commands(PAGE.read_text(encoding="utf-8"))
    assert [words[1] for words in quoted] == [
        "doctor", "export", "inspect", "run", "eval", "replay", "report", "publish",
    ]  # fmt: skip
    for words in quoted:
        assert words[0] == "prge"
        # No command needs other roles than this one.
        done = prge(*words[1:], *(["--roles", "tangent"] if words[1] == "export" else []), cwd=tmp_path)
        if words[1] == "eval":
            accuracy = float(re.search(r"accuracy (\S+)", done.stdout).group(1))  # type: ignore[union-attr]
            assert accuracy > 0.8
        if words[1] == "replay":
            assert "the same bits" in done.stdout
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
