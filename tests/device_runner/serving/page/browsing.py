"""The page in tests: a server in a process of its own, and Debian's Chromium."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.device_runner.reporting.run_folders import write_run
from tests.device_runner.serving.processes import server_process
from tests.verbs import REPOSITORY

CHILD = REPOSITORY / "tests/device_runner/serving/page/child.py"


@dataclass
class Served:
    """A running server: its process and URL."""

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


@contextmanager
def served(**settings: Any) -> Iterator[Served]:
    """Start a scripted server with settings for child.py."""
    with server_process(CHILD, json.dumps(settings, default=str)) as (process, url):
        yield Served(process, url)


# Locks a run folder as a run does, and takes a step for each line of its input.
RUN_SCRIPT = """
import json, signal, sys
from pathlib import Path
from prge.formats.run_folder import METRICS, run_lock
folder = Path(sys.argv[1])
def stop(number, frame):
    summary = json.loads((folder / "run.json").read_text())
    summary["run"]["status"] = "stopped early"
    (folder / "run.json").write_text(json.dumps(summary))
    sys.exit()
with run_lock(folder):
    signal.signal(signal.SIGTERM, stop)
    print("started", flush=True)
    for step in map(int, sys.stdin):
        record = {"event": "step", "step": step, "loss": 3.0, "forward_passes": 4 * step, "seconds": step / 2}
        with (folder / METRICS).open("a") as metrics:
            metrics.write(json.dumps(record) + chr(10))
"""


@contextmanager
def active_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that locks a run folder, after 25 of 40 steps."""
    write_run(folder, status="running", steps=25)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", RUN_SCRIPT, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def take_step(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()


def take_screenshots(visit: Any, url: str, folder: Path, name: str, prepare: Any = lambda page: None) -> None:
    """Take screenshots of a page on a phone and a screen, light and dark; checks that the page fits."""
    for width, height in ((390, 844), (1280, 800)):
        for scheme in ("light", "dark"):
            page = visit(url, viewport={"width": width, "height": height}, color_scheme=scheme)
            prepare(page)
            page.screenshot(path=folder / f"{name}-{width}-{scheme}.png")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            check_axe(page)
            page.context.close()


def check_axe(page: Any) -> None:
    """Check accessibility of the present page with axe."""
    from axe_playwright_python.sync_playwright import Axe

    result = Axe().run(page).response["violations"]
    problems = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in result]
    assert problems == []


def send_message(page: Any, text: str) -> Any:
    """Send a message, and return the answers of the last turn."""
    page.get_by_role("button", name="Send").wait_for()
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    return page.locator(".turns > li").last.locator(".answer")
