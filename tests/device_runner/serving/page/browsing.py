"""The page as tests see it: a server in a process of its own, in Debian's Chromium."""

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

from tests.verbs import REPOSITORY

CHILD = REPOSITORY / "tests/device_runner/serving/page/child.py"


@dataclass
class Served:
    """A server, by its process and URL."""

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


@contextmanager
def served(**settings: Any) -> Iterator[Served]:
    """A scripted server with settings of child.py."""
    words = [sys.executable, CHILD, json.dumps(settings, default=str)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield Served(process, f"http://{process.stdout.readline().strip()}")
        finally:
            process.kill()


def shots(visit: Any, url: str, folder: Path, name: str, prepare: Any = lambda page: None) -> None:
    """Pictures of a page, on a phone and a screen, light and dark; checks that it fits in."""
    for width, height in ((390, 844), (1280, 800)):
        for scheme in ("light", "dark"):
            page = visit(url, viewport={"width": width, "height": height}, color_scheme=scheme)
            prepare(page)
            page.screenshot(path=folder / f"{name}-{width}-{scheme}.png")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            check_axe(page)
            page.context.close()


def check_axe(page: Any) -> None:
    """Check names, contrast and what else axe knows of a page as it is."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    problems = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]
    assert problems == []


def ask(page: Any, text: str) -> Any:
    """Send a message; the last turn's answers."""
    page.get_by_role("button", name="Send").wait_for()
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    return page.locator(".turns > li").last.locator(".answer")
