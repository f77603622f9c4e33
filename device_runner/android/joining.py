"""`prge android fleet join`: a phone takes part in a fleet, detached, as a run on it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from device_runner.android.adb import quote
from device_runner.android.device import (
    DeviceSettings,
    Phone,
    check_name,
    files_there,
    rows_there,
    send_settings,
)
from device_runner.android.runtime import MANIFEST
from device_runner.fleet.device import DeviceSettings as JoiningSettings
from device_runner.fleet.serve import check_keys
from prge.errors import DeviceError
from prge.verbs.settings import part_of

# Of a folder of `prge fleet keys` for a device.
KEY_FILES = ("ca.pem", "device.key")
_LOCAL = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True)
class AndroidJoinSettings(JoiningSettings, DeviceSettings):
    """Let a device take part in a fleet."""

    server: str
    """HOST:PORT of the server. 127.0.0.1 is this computer, which the device reaches by its cable; another
    address is reached by the device's own network."""
    name: str = "fleet"
    """Of the job on the device, and of its folder of this fleet there; `prge android stop` ends it."""
    keys: Path | None = None
    """The device's folder of `prge fleet keys`."""
    insecure: bool = False
    """Instead of --keys: no encryption. To try things out."""
    data_on_device: bool = False
    """--train names a file that is on the device already."""

    def __post_init__(self) -> None:
        check_keys(self.keys, self.insecure)
        check_name(self.name)


def join_words(phone: Phone, settings: AndroidJoinSettings, bundle: str) -> list[str]:
    """Bring what a device of a fleet needs; words for `prge` there.

    Args:
        phone: the device.
        settings: of the user.
        bundle: the bundle's folder on the device.

    Raises:
        DeviceError: the runtime there has no Flower, or the device was lost or lacks something.
    """
    _need_flower(phone)
    own = phone.path("fleets", settings.name)
    rows = rows_there(phone, settings.train, "train", settings.data_on_device)
    sent = {**vars(part_of(JoiningSettings, settings)), **files_there(phone, settings, "task", "policy")}
    sent |= {"bundle": bundle, "train": rows, "server": settings.server, "folder": own}
    if settings.keys is None:
        sent["insecure"] = True
    else:
        phone.send_folder(settings.keys, f"{own}-keys", names=KEY_FILES)
        phone.adb.check(f"chmod -R go= {quote([f'{own}-keys'])}", "protecting the keys")
        sent["keys"] = f"{own}-keys"
    host, _, port = settings.server.rpartition(":")
    if host in _LOCAL:
        phone.adb.reverse(port)
    return ["fleet", "join", *send_settings(phone, sent, phone.path("jobs", settings.name))]


def _need_flower(phone: Phone) -> None:
    phone.need_this_driver()
    script = f"grep -q '\"flwr\":' {quote([phone.path('runtime', MANIFEST)])}"
    if phone.adb.shell(script).code:
        raise DeviceError(
            f"the runtime on {phone.adb.serial} is one without Flower",
            remedy="make another: prge android bundle --fleet runtime, then prge android push runtime",
        )
