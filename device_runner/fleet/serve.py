"""`prge fleet serve`: run a fleet's rounds over the network, from the start or resumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from device_runner.fleet.server import ServerSettings, open_fleet
from device_runner.session.memory import watched_memory
from prge.cli.inputs import InputFolder
from prge.cli.settings import parse_settings, settings_to_yaml, with_absolute_paths
from prge.errors import ConfigError, RunError
from prge.formats.run_folder import run_lock
from prge.formats.stored_settings import write_settings
from prge.system.atomic import write_file
from prge.system.terminal import best_effort

SETTINGS, NAMES = "serve.yaml", "devices.json"
# Settings of earlier versions that no longer exist.
_REMOVED_SETTINGS = frozenset(
    {"directions", "largest", "most_epsilon", "average", "server_rate", "proximal", "guided"}
)


@dataclass(frozen=True, kw_only=True)
class FleetServeSettings(ServerSettings):
    """Start or resume a fleet: wait for devices, and run its rounds."""

    EXAMPLE: ClassVar = "--bundle bundle --out fleet --keys keys/server"
    STORED: ClassVar = SETTINGS

    resume: InputFolder | None = None
    """Folder of a fleet to resume, with its own settings."""
    wait_for: int = 2
    """Devices to wait for before the first round; later rounds wait for --least-answers."""
    host: str = "127.0.0.1"
    """Address to listen at; other machines can reach 0.0.0.0 or ::."""
    port: int = 9092
    """Port to listen at; 0: a free one, which is printed."""
    keys: InputFolder | None = None
    """The folder server/ from `prge fleet keys`: encrypts, and admits only devices whose keys it has."""
    insecure: bool = False
    """Listen without encryption, instead of with --keys; anyone who reaches the address may join. For trying
    things out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keys(self.keys, self.insecure)

    @classmethod
    def current(cls, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Check the settings of a file; raises RunError if an earlier version of prge wrote them."""
        if removed := sorted(_REMOVED_SETTINGS & stored.keys()):
            raise RunError(
                f"These settings are from another version of prge; this version has no {', '.join(removed)}.",
                remedy="Use the version that started the fleet, or start a new fleet in another folder.",
                code="settings-of-other-version",
            )
        return dict(stored)


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge fleet serve --help`."""
    settings = parse_settings(FleetServeSettings, argv, "prge fleet serve")
    if settings.resume is None and (settings.out / SETTINGS).is_file():
        raise RunError(
            f"{settings.out} already holds a fleet.",
            remedy=f"Resume it with `prge fleet serve --resume {settings.out}`, or give another folder.",
            code="run-exists",
        )
    with watched_memory(settings.memory, _print):
        _print(str(serve(settings)))
    return 0


def serve(settings: FleetServeSettings) -> Path:
    """Run the remaining rounds of a fleet, and return the folder of the final adapter.

    Raises:
        PrgeError: the input is invalid, the address can't be listened at, or no device answers round after
            round.
    """
    from device_runner.fleet.network.keys import ServerKeys
    from device_runner.fleet.network.rounds import run_rounds
    from device_runner.fleet.network.superlink import superlink

    settings = settings.with_date()
    keys = None if settings.keys is None else ServerKeys.open(settings.keys)
    with run_lock(settings.out), open_fleet(settings) as coordinator:
        stored_settings = with_absolute_paths(replace(settings, resume=None))
        write_settings(settings.out / SETTINGS, settings_to_yaml(stored_settings))
        if not coordinator.finished:
            with superlink(settings.out, settings.host, settings.port, keys, coordinator.max_bytes) as link:
                whom = "anyone, without encryption" if keys is None else f"{len(keys.devices)} devices"
                _print(f"listening at {link.address} for {whom}; press Ctrl-C to stop")
                names = link.names()
                write_file(settings.out / NAMES, json.dumps(names).encode())
                if coordinator.round:
                    _print(f"resuming after round {coordinator.round} of {coordinator.plan.rounds}")
                devices = settings.least_answers if coordinator.round else settings.wait_for
                with link.run() as post:
                    run_rounds(post, coordinator, devices, lambda line: _print(_with_names(line, names)))
        return coordinator.write_final()


def check_keys(keys: Path | None, insecure: bool) -> None:
    """Raise ConfigError unless exactly one of the two settings is given."""
    if (keys is None) != insecure:
        raise ConfigError(
            "These settings can't be used:",
            ["give --keys or --insecure, and not both"],
            remedy="`prge fleet keys` creates keys for a server and its devices.",
            code="settings-unusable",
        )


def _with_names(line: str, names: Mapping[int, str]) -> str:
    """Replace node ids in a line by the names of the devices."""
    for node, name in names.items():
        line = line.replace(str(node), name)
    return line


def _print(line: str) -> None:
    with best_effort(sys.stdout):
        print(line, flush=True)
