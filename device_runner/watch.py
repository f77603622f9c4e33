"""`prge watch`: a page about runs that goes on with them; it needs no model."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass

from device_runner.serving.listen_flags import ListenFlags, read_keys, refuse_key
from prge.errors import ConfigError
from prge.host.terminal import best_effort
from prge.verbs.bounds import bound_problems
from prge.verbs.inputs import InputFolder
from prge.verbs.settings import parse_settings


@dataclass(frozen=True, kw_only=True)
class WatchSettings(ListenFlags):
    """Look at runs while they go on, on a page in the browser; end one after its step there.

    A run goes on without the page. `prge serve --runs FOLDER` has the same page beside a model.
    """

    runs: InputFolder
    """A run, a tuning, or a folder with runs in it."""
    port: int = 0
    """Port to listen at; 0: a free one. It is printed."""
    open: bool = True
    """Open the page in the browser, where there is a screen."""

    def __post_init__(self) -> None:
        if problems := bound_problems(self):
            raise ConfigError("these settings can't be used:", problems, code="settings-unusable")


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge watch --help`."""
    refuse_key(argv)
    watch(parse_settings(WatchSettings, argv, "prge watch", ["runs"]))
    return 0


def watch(settings: WatchSettings) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Raises:
        PrgeError: there is no such folder, no key, or the address can't be listened at.
    """
    from device_runner.serving.access import is_local
    from device_runner.serving.app import make_watching_app
    from device_runner.serving.listening import Server, address_of, listening
    from device_runner.serving.page.runs import Runs

    keys, runs = read_keys(settings.api_key_file), Runs(settings.runs)
    with listening(settings.host, settings.port) as listener:
        is_reached_by_others = not is_local(listener.getsockname()[0])
        access = settings.access(keys, is_reached_by_others)
        url = f"http://{address_of(listener)}/training"

        def begun() -> None:
            with best_effort(sys.stdout):
                print(f"look at {settings.runs} at {url}; Ctrl-C ends the page, not a run", flush=True)
            if settings.open and _has_screen():
                webbrowser.open(url)

        Server(make_watching_app(runs, access), None, begun, runs.close).run([listener])


def _has_screen() -> bool:
    """Whether a browser would have a window of its own: one in the terminal would take that for itself."""
    return sys.platform == "darwin" or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
