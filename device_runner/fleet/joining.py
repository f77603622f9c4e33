"""`prge fleet join`: a device takes part in a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import NoReturn

from device_runner.fleet.device import DEVICE, DeviceSettings, answer, make_device
from device_runner.fleet.serve import check_keys
from prge.errors import RunError
from prge.verbs.settings import parse_settings

# Words of who makes a folder a device's, or asks how to.
_MAKING = ("--bundle", "--config", "--help", "-h", "--print-config")


@dataclass(frozen=True, kw_only=True)
class RejoinSettings:
    """Take part in a fleet with a folder that is a device's already."""

    server: str
    """HOST:PORT of the server."""
    folder: Path
    """Folder of the device: what it knows of its fleets, and what they have cost its privacy. Keep it."""
    keys: Path | None = None
    """The device's folder of `prge fleet keys`: by these it knows its server, and is known."""
    insecure: bool = False
    """Instead of --keys: no encryption. To try things out."""

    def __post_init__(self) -> None:
        check_keys(self.keys, self.insecure)


@dataclass(frozen=True, kw_only=True)
class JoinSettings(DeviceSettings, RejoinSettings):
    """Take part in a fleet: wait for its server's tasks, and answer those that the policy allows."""


def main(argv: Sequence[str]) -> NoReturn:
    """Run the verb; see `prge fleet join --help`."""
    settings: RejoinSettings
    if any(word.partition("=")[0] in _MAKING for word in argv):
        settings = parse_settings(JoinSettings, argv, "prge fleet join")
    else:
        settings = parse_settings(RejoinSettings, argv, "prge fleet join")
    from device_runner.fleet.network.client import client_app
    from device_runner.fleet.network.keys import DeviceKeys
    from device_runner.fleet.network.supernode import Connection, join

    if isinstance(settings, JoinSettings):
        own = {item.name: getattr(settings, item.name) for item in fields(DeviceSettings)}
        make_device(settings.folder, DeviceSettings(**own))
    elif not (settings.folder / DEVICE).is_file():
        raise RunError(
            f"{settings.folder} is no device's folder", remedy="give --bundle and --train, which make it one"
        )
    keys = None if settings.keys is None else DeviceKeys.open(settings.keys)
    app = client_app(partial(answer, settings.folder))
    join(settings.folder, Connection(settings.server, keys), app, partial(print, flush=True))
