"""README and docs: what they quote exists, links lead somewhere, and the site builds."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from reference import flags_page, verb_helps

from prge.cli.main import VERBS, main
from tests.verbs import REPOSITORY

README = REPOSITORY / "README.md"
DOCUMENTS = [README, REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# What a changelog quotes is history.
LINKING = [*DOCUMENTS, REPOSITORY / "CHANGELOG.md"]
FOLDERS = ("prge", "device_runner", "server_export", "scripts", "tests", "docs")
SCRIPTS = REPOSITORY / "scripts"
# Flags of other programs that sentences name: those of llama.cpp, MkDocs and lm-evaluation-harness.
FOREIGN = {"--lora", "--config-file", "--include_path"}


def named(path: Path) -> str:
    """Return a document's path as a message shows it."""
    return str(path.relative_to(REPOSITORY))


def text_of(document: Path) -> str:
    """Return a document with continued lines of commands joined."""
    return document.read_text(encoding="utf-8").replace("\\\n", " ")


def spans(document: Path) -> Iterator[str]:
    """Yield the inline code of a document, which its sentences and tables quote."""
    without_blocks = re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", without_blocks)


def code_of(document: Path) -> str:
    """Return the blocks of code of a document, fenced or indented."""
    fenced = re.findall(r"```\w*\n(.*?)```", text_of(document), re.DOTALL)
    without = re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL)
    return "\n".join([*fenced, *re.findall(r"^ {4}.*$", without, re.MULTILINE)])


@cache
def flags_of_scripts(folder: Path) -> str:
    """Return the sources that define the flags of the scripts in a folder."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*")) if path.is_file())


def defines(sources: str, flag: str) -> bool:
    """Return whether scripts take a flag, by argparse, as a keyword, or as a field of settings."""
    field = flag[2:].replace("-", "_")
    return f'"{flag}"' in sources or re.search(rf"\b{field}(\"?: |=)", sources) is not None


@pytest.mark.parametrize("document", LINKING, ids=named)
def test_links_lead_to_existing_documents(document: Path) -> None:
    for link, anchor in re.findall(
        r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", document.read_text(encoding="utf-8")
    ):
        target = document.parent / link if link else document
        assert target.exists(), f"{link} doesn't exist"
        assert not anchor or anchor in anchors(target), f"{link} has no heading #{anchor}"


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document: its headings, as GitHub and MkDocs write them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_quoted_paths_exist(document: Path) -> None:
    text = text_of(document)
    for path in re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./*-]*\w/?)", text):
        assert [*REPOSITORY.glob(path.rstrip("/"))], f"{path} doesn't exist"
    names = {path.name for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.*")}
    for span in spans(document):
        if re.fullmatch(r"\w+\.(py|sh|cpp)", span):
            assert span in names, f"there is no {span}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_quoted_code_imports_names_that_exist(document: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in FOLDERS:
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name), f"{node.module} has no {name.name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_quoted_scripts_take_their_flags(document: Path) -> None:
    for line in re.findall(r"(?:python|bash) (scripts/.*)", text_of(document)):
        script, *arguments = shlex.split(re.split(r" [>|#]|[`)]", line)[0].replace("[", "").replace("]", ""))
        sources = flags_of_scripts((REPOSITORY / script).parent)
        for flag in re.findall(r"--[a-z][a-z0-9-]*", " ".join(arguments)):
            assert defines(sources, flag), f"{script} has no {flag}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_quoted_verbs_and_flags_exist(document: Path) -> None:
    helps = [*verb_helps()]
    flags = {flag for each in helps for flag in each.flags} | {"--help", "--config", "--print-config"}
    groups = {each.prog.split()[1] for each in helps if len(each.prog.split()) > 2}
    progs = {each.prog for each in helps} | {f"prge {group}" for group in groups}
    scripts = "".join(flags_of_scripts(path) for path in (SCRIPTS, *SCRIPTS.glob("*/")))
    for span in spans(document):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span):
            assert flag in flags | FOREIGN or defines(scripts, flag), f"`{span}`: there is no {flag}"
        for names in re.findall(r"\bprge ([a-z]\w*)(?: ([a-z]\w*))?", span):
            verb = " ".join(names[: 2 if names[0] in groups else 1]).strip()
            assert f"prge {verb}" in progs, f"`{span}`: there is no verb {verb}"


def test_every_command_has_flags_of_its_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(settings_type: object, given: object, problems: list[str], prog: str) -> None:
        wrong = [each for each in problems if "is not a flag" in each or "stands alone" in each]
        raise AssertionError(wrong) if wrong else SystemExit(0)

    monkeypatch.setattr("prge.cli.settings._build", stop)  # nothing runs
    read = 0
    for document in DOCUMENTS:
        for line in re.findall(r"^ *(?:\w+=\S+ )*prge (?!tune: error)(.*)", code_of(document), re.MULTILINE):
            arguments = shlex.split(re.split(r" [>|#&]", line)[0])
            if len(arguments) > 2 and not {"--resume", "--preset", "..."} & set(arguments):
                read += 1
                assert main(arguments) == 0, f"{document.name}: prge {line}"
    assert read > 50


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 1200


def test_the_table_of_verbs_is_complete() -> None:
    page = (REPOSITORY / "docs/reference/verbs.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `prge (\w+)`", page, re.MULTILINE)) == sorted(VERBS)


def test_the_reference_has_every_flag() -> None:
    page = flags_page()
    for each in verb_helps():
        assert f"\n### {each.prog}\n" in f"\n{page}"
    run = page.split("### prge run\n")[1].split("\n### ")[0]
    for flag in ("--bundle", "--estimator", "--memory", "--append-eos, --no-append-eos"):
        assert f"\n`{flag}" in run
    assert "[`prge run`](#prge-run)" in page.split("### prge android run\n")[1].split("\n### ")[0]


@pytest.mark.whole
def test_the_site_builds(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("mkdocs is not installed")
    arguments = ["build", "--strict", "--config-file", "docs/mkdocs.yml", "--site-dir", tmp_path / "site"]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--learning-rate" in (tmp_path / "site/reference/verbs/index.html").read_text(encoding="utf-8")
    assert "Open a bundle" in (tmp_path / "site/reference/python/index.html").read_text(encoding="utf-8")
