"""The page of a real `prge serve` and `prge watch` in a real browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.verbs import REPOSITORY, prge

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@contextmanager
def verb(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a verb in its own process."""
    command = [sys.executable, "-m", "prge.cli.main", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = next(line for line in process.stdout if "http" in line and "/v1" not in line)
    return line[line.index("http") :].split()[0].rstrip(";")


def ended(process: subprocess.Popen[str], number: int) -> None:
    """Check that a signal ends a verb at once and silently, even with an open page."""
    process.send_signal(number)
    assert process.wait(10) == 0
    assert process.stderr is not None and process.stderr.read() == ""


@pytest.mark.whole
def test_the_page_shows_a_bundle_and_a_run(
    workshop: Path, run_arguments: list[object], tmp_path: Path, visit: Callable[..., Any]
) -> None:
    prge("run", *run_arguments, "--sample-rows", 1)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    arguments = ["--chat-template", tmp_path / "template.jinja", "--feedback", tmp_path / "feedback.jsonl"]
    arguments += ["--adapter", tmp_path / "run", "--runs", tmp_path, "--port", 0, "--threads", 1]
    with verb("serve", workshop / "bundle", *arguments) as process:
        page = visit(url_of(process))
        page.get_by_role("checkbox", name="run").check()
        about = page.locator("aside")
        expect(about).to_contain_text("LlamaForCausalLM")
        expect(about).to_contain_text("exact")
        expect(about).to_contain_text("train.jsonl")
        assert str(workshop) not in about.inner_text()
        page.get_by_label("Max tokens").fill("12")
        page.get_by_role("textbox", name="Message").fill("aa bb")
        page.keyboard.press("Enter")
        answer = page.get_by_role("article", name="run")
        expect(answer.locator("footer")).to_contain_text("tokens")
        answer.get_by_role("button", name="Good answer").click()
        expect(answer).to_contain_text("Saved")
        (row,) = map(json.loads, (tmp_path / "feedback.jsonl").read_text().splitlines())
        assert (row["model"], row["rating"]) == ("run", "good")
        page.get_by_role("link", name="Training").click()
        view = page.locator(".training article")
        expect(view).to_contain_text("Step 12 of 12")
        expect(view).to_contain_text("Accuracy on development rows")
        expect(view.locator("svg")).to_have_count(2)
        expect(view.locator(".sample")).to_have_count(1)
        ended(process, signal.SIGTERM)


@pytest.mark.whole
def test_a_run_is_watched_and_stopped_after_its_step(
    workshop: Path, tmp_path: Path, visit: Callable[..., Any]
) -> None:
    out = tmp_path / "runs" / "long"
    arguments = ["--bundle", workshop / "bundle", "--train", workshop / "train.jsonl", "--out", out]
    arguments += ["--task", workshop / "task.yaml", "--steps", 100_000, "--threads", 1]
    (tmp_path / "runs").mkdir()
    with verb("run", *arguments) as run, verb("watch", tmp_path / "runs", "--no-open") as process:
        page = visit(url_of(process))
        expect(page.get_by_role("link", name="Chat")).to_have_count(0)
        button = page.get_by_role("button", name="Stop after this step")
        expect(button).to_be_visible(timeout=60_000)
        expect(page.locator(".training article")).to_contain_text("Time left")
        button.click()
        expect(page.locator(".training article .mark")).to_have_text(
            "interrupted, can be resumed", timeout=15_000
        )
        assert run.wait(30) == 130
        summary = json.loads((out / "run.json").read_text())
        assert (
            summary["train"]["steps"] == len((out / "journal.jsonl").read_text().split('"type":"step"')) - 1
        )
        ended(process, signal.SIGINT)


@pytest.mark.whole
def test_watch_refuses_a_missing_folder_and_a_public_host_without_a_key(tmp_path: Path) -> None:
    result = prge("watch", tmp_path / "none", check=False)
    assert result.returncode == 2 and f"{tmp_path / 'none'} is not a folder" in result.stderr
    result = prge("watch", tmp_path, "--host", "0.0.0.0", check=False)
    assert result.returncode == 2 and "there is no API key" in result.stderr
