"""`prge fleet join`: take part in a fleet, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NoReturn

from device_runner.fleet.device import DEVICE, DeviceSettings, answer, make_device
from device_runner.fleet.serve import check_keys
from prge.cli.inputs import InputFolder
from prge.cli.outputs import OutputFolder
from prge.cli.settings import parse_settings, select_settings


@dataclass(frozen=True, kw_only=True)
class JoinSettings(DeviceSettings):
    """Take part in a fleet: wait for tasks from its server, and run those that the policy allows.

    A folder that already is a device's keeps the settings that it was created with.
    """

    EXAMPLE: ClassVar = (
        "--server 192.168.1.10:9092 --keys phone --bundle bundle --train rows.jsonl --folder device"
    )
    KEPT: ClassVar = DEVICE

    server: str
    """HOST:PORT of the server."""
    folder: OutputFolder
    """Folder of the device: its state in each fleet, and the ledger of its privacy. Do not delete it."""
    keys: InputFolder | None = None
    """The device's folder from `prge fleet keys`; with it, the device verifies the server and proves its
    identity."""
    insecure: bool = False
    """Connect without encryption, instead of with --keys. For trying things out."""

    def __post_init__(self) -> None:
        check_keys(self.keys, self.insecure)


def main(argv: Sequence[str]) -> NoReturn:
    """Run the verb; see `prge fleet join --help`."""
    settings = parse_settings(JoinSettings, argv, "prge fleet join")
    from device_runner.fleet.network.client import join
    from device_runner.fleet.network.keys import DeviceKeys

    make_device(settings.folder, select_settings(DeviceSettings, settings))
    keys = None if settings.keys is None else DeviceKeys.open(settings.keys)
    answers = partial(answer, settings.folder)
    join(settings.folder, settings.server, keys, answers, partial(print, flush=True))
