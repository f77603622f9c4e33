"""`prge watch`: serve a page about runs that updates while they continue; it needs no model."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from device_runner.serving.listen_settings import ListenFlags, read_api_keys, refuse_api_key_flag
from prge.cli.bounds import bound_problems
from prge.cli.inputs import InputFolder
from prge.cli.settings import parse_settings
from prge.errors import ConfigError
from prge.system.terminal import best_effort


@dataclass(frozen=True, kw_only=True)
class WatchSettings(ListenFlags):
    """Watch runs on a page in the browser, where you can also stop a run after its current step.

    A run continues without the page. `prge serve --runs FOLDER` has the same page next to a model.
    """

    EXAMPLE: ClassVar = "run"

    runs: InputFolder
    """A run, a tuning, or a folder that contains runs."""
    port: int = 0
    """Port to listen on; 0: a free port. It is printed."""
    open: bool = True
    """Open the page in the browser, if there is a screen."""

    def __post_init__(self) -> None:
        if problems := bound_problems(self):
            raise ConfigError("These settings can't be used:", problems, code="settings-unusable")


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge watch --help`."""
    refuse_api_key_flag(argv)
    watch(parse_settings(WatchSettings, argv, "prge watch", ["runs"]))
    return 0


def watch(settings: WatchSettings) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Raises:
        PrgeError: the folder or key is missing, or the address can't be bound.
    """
    from device_runner.serving.access import is_local
    from device_runner.serving.app import make_watch_app
    from device_runner.serving.page.runs import Runs
    from device_runner.serving.uvicorn_server import Server, format_address, listening

    keys, runs = read_api_keys(settings.api_key_file), Runs(settings.runs)
    with listening(settings.host, settings.port) as listener:
        is_reached_by_others = not is_local(listener.getsockname()[0])
        access = settings.access(keys, is_reached_by_others)
        url = f"http://{format_address(listener)}/training"

        def on_start() -> None:
            with best_effort(sys.stdout):
                print(f"watch {settings.runs} at {url}; Ctrl-C closes the page and stops no run", flush=True)
            if settings.open and _has_screen():
                webbrowser.open(url)

        Server(make_watch_app(runs, access), None, on_start, runs.close).run([listener])


def _has_screen() -> bool:
    """Return whether a browser would open its own window: a text browser would take over the terminal."""
    return sys.platform == "darwin" or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
