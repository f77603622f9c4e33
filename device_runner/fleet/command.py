"""`prge fleet <verb>`: many devices train one adapter, and no row leaves any of them."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from device_runner.fleet import join as joining
from device_runner.fleet import serve, simulate
from device_runner.fleet.status import read_status
from prge.cli.inputs import InputFolder
from prge.cli.outputs import OutputFolder
from prge.cli.settings import parse_settings
from prge.cli.subcommands import Action, run_action
from prge.errors import PrgeError

# Verbs that import Flower or one of its dependencies.
NETWORKED = ("serve", "join", "keys")


@dataclass(frozen=True)
class KeysSettings:
    """Create certificates and keys: for the server, and for each device a folder to copy there."""

    EXAMPLE: ClassVar = "keys --hosts 192.168.1.10 --devices phone tablet"

    out: OutputFolder
    """Folder for all keys; existing files stay, so that devices can be added later."""
    hosts: list[str] = field(default_factory=list)
    """Names and addresses by which devices reach the server. This machine's own always work."""
    devices: list[str] = field(default_factory=list)
    """Names of devices."""


@dataclass(frozen=True)
class FleetStatusSettings:
    """Show the status of a fleet."""

    EXAMPLE: ClassVar = "fleet"

    folder: InputFolder
    """The server's folder of the fleet."""
    json: bool = False
    """Print a JSON object instead of text."""


def main(argv: Sequence[str]) -> int:
    """Run one verb; see `prge fleet --help`."""
    return run_action(
        argv, ACTIONS, "prge fleet", "Train one adapter on many devices; no row leaves any of them.", _check
    )


def _check(name: str) -> None:
    """Refuse verbs that need Flower on a Python version that Flower does not support."""
    if sys.version_info < (3, 11) and name in NETWORKED:
        raise PrgeError(
            f"`prge fleet {name}` needs Python 3.11 or newer, because Flower does.",
            remedy=f"This is {platform.python_version()}.",
            code="python-too-old",
        )


def _status(argv: Sequence[str]) -> int:
    settings = parse_settings(FleetStatusSettings, argv, "prge fleet status", ["folder"])
    status = read_status(settings.folder)
    print(json.dumps(asdict(status), indent=2) if settings.json else status.text())
    return 0


def _keys(argv: Sequence[str]) -> int:
    from device_runner.fleet.network.keys import DEVICES, SERVER, make_keys

    settings = parse_settings(KeysSettings, argv, "prge fleet keys", ["out"])
    created = make_keys(settings.out, settings.hosts, settings.devices)
    out = settings.out
    if created.until is not None:
        print(f"{out / SERVER}: for the server; its certificate is valid until {created.until:%Y-%m-%d}")
        print(f"  prge fleet serve --keys {out / SERVER} ...")
    for name in created.devices:
        print(f"{out / DEVICES / name}: move it to the device {name}, and keep no copy")
        print(f"  prge fleet join --keys {name} ...")
    if created.devices and created.until is None:
        print(f"{out / SERVER}: has the devices' public keys; copy it to the server and restart the server")
    return 0


ACTIONS = {
    "serve": Action("start or resume a fleet: wait for devices and run its rounds", serve.main),
    "join": Action("take part in a fleet, on a device", joining.main),
    "status": Action("show the status of a fleet", _status),
    "simulate": Action("train a fleet of simulated devices in one process", simulate.main),
    "keys": Action("create the certificates and keys of a server and its devices", _keys),
}
