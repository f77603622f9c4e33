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


def shot(page: Any, folder: Path, name: str) -> None:
    """Pictures of a page as it is, at two widths, light and dark."""
    size = page.viewport_size
    for width, height in ((390, 844), (1280, 800)):
        for scheme in ("light", "dark"):
            page.set_viewport_size({"width": width, "height": height})
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(50)
            page.screenshot(path=folder / f"{name}-{width}-{scheme}.png")
    page.set_viewport_size(size)
