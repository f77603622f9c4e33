"""`prge fleet <verb>`: many devices learn one adapter, and no row leaves any of them."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from device_runner.fleet import joining, serve, simulate
from device_runner.fleet.status import read_status
from prge.errors import PrgeError
from prge.verbs.inputs import InputFolder
from prge.verbs.outputs import OutputFolder
from prge.verbs.settings import parse_settings
from prge.verbs.subverbs import Action, run_action

# Verbs for which Flower, or what it brings, is imported.
NETWORKED = ("serve", "join", "keys")


@dataclass(frozen=True)
class KeysSettings:
    """Make certificates and keys: for the server, and for each device a folder to bring there."""

    out: OutputFolder
    """Folder for all of them; what is there already stays, so that devices can be added."""
    hosts: list[str] = field(default_factory=list)
    """Names and addresses by which devices reach the server. This machine's own always work."""
    devices: list[str] = field(default_factory=list)
    """Names of devices."""


@dataclass(frozen=True)
class StatusSettings:
    """Tell how a fleet stands."""

    folder: InputFolder
    """The server's folder of the fleet."""
    json: bool = False
    """Print a JSON object instead of text."""


def main(argv: Sequence[str]) -> int:
    """Run one verb; see `prge fleet --help`."""
    return run_action(
        argv, ACTIONS, "prge fleet", "Many devices learn one adapter, and no row leaves any of them.", _check
    )


def _check(name: str) -> None:
    """Refuse what needs Flower where there is none."""
    if sys.version_info < (3, 11) and name in NETWORKED:
        raise PrgeError(
            f"prge fleet {name} needs Python 3.11 or newer, for Flower",
            remedy=f"this is {platform.python_version()}",
            code="python-too-old",
        )


def _status(argv: Sequence[str]) -> int:
    settings = parse_settings(StatusSettings, argv, "prge fleet status", ["folder"])
    status = read_status(settings.folder)
    print(json.dumps(asdict(status), indent=2) if settings.json else status.text())
    return 0


def _keys(argv: Sequence[str]) -> int:
    from device_runner.fleet.network.keys import DEVICES, SERVER, make_keys

    settings = parse_settings(KeysSettings, argv, "prge fleet keys", ["out"])
    made = make_keys(settings.out, settings.hosts, settings.devices)
    out = settings.out
    if made.until is not None:
        print(f"{out / SERVER}: for the server; its certificate holds until {made.until:%Y-%m-%d}")
        print(f"  prge fleet serve --keys {out / SERVER} ...")
    for name in made.devices:
        print(f"{out / DEVICES / name}: bring it to the device {name}, and keep no copy")
        print(f"  prge fleet join --keys {name} ...")
    if made.devices and made.until is None:
        print(f"{out / SERVER}: has their public keys; bring it to the server and start that again")
    return 0


ACTIONS = {
    "serve": Action("begin a fleet, or go on with one: wait for devices and take its rounds", serve.main),
    "join": Action("take part in a fleet, on a device", joining.main),
    "status": Action("tell how a fleet stands", _status),
    "simulate": Action("train a fleet of simulated devices in one process, and count", simulate.main),
    "keys": Action("make the certificates and keys of a server and its devices", _keys),
}
