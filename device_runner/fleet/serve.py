"""`prge fleet serve`: a fleet's rounds over the network, begun or gone on with."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from device_runner.fleet.opening import ServerSettings, open_fleet
from device_runner.session.memory import watched_memory
from prge.errors import ConfigError, RunError
from prge.files.own_settings import write_settings
from prge.files.run_folder import run_lock
from prge.host.atomic import write_file
from prge.host.terminal import best_effort
from prge.verbs.inputs import InputFolder
from prge.verbs.settings import parse_settings, settings_to_yaml, with_whole_paths

SETTINGS, NAMES = "serve.yaml", "devices.json"
# Of earlier versions' fleets.
_GONE = frozenset({"directions", "largest", "most_epsilon", "average", "server_rate", "proximal", "guided"})


@dataclass(frozen=True, kw_only=True)
class ServeSettings(ServerSettings):
    """Begin a fleet, or go on with one: wait for devices, and take its rounds."""

    STORED: ClassVar = SETTINGS

    resume: InputFolder | None = None
    """Folder of a fleet to go on with, by its own settings."""
    wait_for: int = 2
    """The first round waits until so many devices are there; later ones for --least-answers."""
    host: str = "127.0.0.1"
    """Address to listen at; others than this machine reach 0.0.0.0 or ::."""
    port: int = 9092
    """Port to listen at; 0: a free one. It is printed."""
    keys: InputFolder | None = None
    """The folder server/ of `prge fleet keys`: encryption, and only devices whose keys are in it."""
    insecure: bool = False
    """Instead of --keys: no encryption, and anyone who reaches the address may join. To try things out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keys(self.keys, self.insecure)

    @classmethod
    def current(cls, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of a file; raises RunError where an earlier version of prge wrote them."""
        if gone := sorted(_GONE & stored.keys()):
            raise RunError(
                f"these settings are none of this version of prge, which has no {', '.join(gone)}",
                remedy="go on with the version that began the fleet, or begin another in another folder",
                code="settings-of-other-version",
            )
        return dict(stored)


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge fleet serve --help`."""
    settings = parse_settings(ServeSettings, argv, "prge fleet serve")
    if settings.resume is None and (settings.out / SETTINGS).is_file():
        raise RunError(
            f"{settings.out} holds a fleet already",
            remedy=f"go on with it: prge fleet serve --resume {settings.out}; or give another folder",
            code="run-exists",
        )
    with watched_memory(settings.memory, _tell):
        _tell(str(serve(settings)))
    return 0


def serve(settings: ServeSettings) -> Path:
    """Take a fleet's rounds, those that its folder doesn't have yet; returns the final adapter's folder.

    Raises:
        PrgeError: bad input, an address that can't be listened at, no answers round after round.
    """
    from device_runner.fleet.network.keys import ServerKeys
    from device_runner.fleet.network.rounds import take_rounds
    from device_runner.fleet.network.superlink import superlink

    settings = settings.dated()
    keys = None if settings.keys is None else ServerKeys.open(settings.keys)
    with run_lock(settings.out), open_fleet(settings) as coordinator:
        kept = with_whole_paths(replace(settings, resume=None))
        write_settings(settings.out / SETTINGS, settings_to_yaml(kept))
        if not coordinator.finished:
            with superlink(settings.out, settings.host, settings.port, keys, coordinator.most_bytes) as link:
                whom = "anyone, without encryption" if keys is None else f"{len(keys.devices)} devices"
                _tell(f"listening at {link.address} for {whom}; Ctrl-C ends it")
                names = link.names()
                write_file(settings.out / NAMES, json.dumps(names).encode())
                if coordinator.round:
                    _tell(f"going on after round {coordinator.round} of {coordinator.plan.rounds}")
                devices = settings.least_answers if coordinator.round else settings.wait_for
                with link.run() as post:
                    take_rounds(post, coordinator, devices, lambda line: _tell(_named(line, names)))
        return coordinator.write_final()


def check_keys(keys: Path | None, insecure: bool) -> None:
    """Raise ConfigError unless one of these two settings is given."""
    if (keys is None) != insecure:
        raise ConfigError(
            "these settings can't be used:",
            ["give --keys or --insecure, and not both"],
            remedy="`prge fleet keys` makes keys for a server and its devices",
            code="settings-unusable",
        )


def _named(line: str, names: Mapping[int, str]) -> str:
    """A line with the names of devices in the place of their nodes."""
    for node, name in names.items():
        line = line.replace(str(node), name)
    return line


def _tell(line: str) -> None:
    with best_effort(sys.stdout):
        print(line, flush=True)
