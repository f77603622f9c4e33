"""The README's commands, run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from prge.cli import main
from tests.verbs import REPOSITORY, prge


def commands(text: str) -> list[list[str]]:
    """The words of every command in the text's `bash` blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_step_by_step(tmp_path: Path) -> None:
    (tmp_path / "server_export").symlink_to(REPOSITORY / "server_export")
    found = commands((REPOSITORY / "README.md").read_text())
    assert [words[1] for words in found] == [
        "doctor", "export", "inspect", "run", "eval", "replay", "report", "publish",
    ]  # fmt: skip
    for words in found:
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


def test_every_verb_of_the_table_exists() -> None:
    from prge.cli import VERBS

    listed = re.findall(r"^\| `prge (\w+)`", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == set(VERBS)


def anchors(document: Path) -> set[str]:
    """What links can name of a document: its headings, as GitHub writes them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    followed = 0
    for document in [
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        REPOSITORY / "CHANGELOG.md",
        *(REPOSITORY / "docs").rglob("*.md"),
    ]:
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", document.read_text()):
            followed += 1
            target = document.parent / link if link else document
            assert target.exists(), f"{document.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{document.name}: {link}#{anchor}"
    assert followed > 50


def test_every_command_of_the_documents_has_flags_of_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    read = 0
    for document in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]:
        text = document.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ *(?:\w+=\S+ )*prge (?!tune: error)(.*)", text, re.MULTILINE):
            words = shlex.split(re.split(r" [>|#]", line)[0])
            if len(words) > 2 and not {"--resume", "--preset", "..."} & set(words):
                read += 1
                main([*words, "--print-config"])  # nothing runs
                told = capsys.readouterr().err
                assert "is no flag" not in told and "stands alone" not in told, f"prge {line}: {told}"
    assert read > 50
