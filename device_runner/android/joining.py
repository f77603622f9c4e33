"""`prge android fleet join`: a phone takes part in a fleet, detached, as a run on it does."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from device_runner.android.adb import quote
from device_runner.android.device import FOLDER, Phone, check_name, rows_there
from device_runner.android.runtime import MANIFEST
from device_runner.fleet.device import DeviceSettings as JoiningSettings
from device_runner.fleet.joining import JoinSettings
from device_runner.fleet.serve import check_keys
from prge.errors import DeviceError

# Of a folder of `prge fleet keys` for a device.
KEY_FILES = ("ca.pem", "device.key")
_LOCAL = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True)
class AndroidJoinSettings(JoiningSettings):
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
    serial: str | None = None
    """The device, as `adb devices` lists it; default: the only one, or ANDROID_SERIAL."""
    folder: str = FOLDER
    """prge's folder on the device."""

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
    rows = Path(rows_there(phone, settings.train, "train", settings.data_on_device))
    task, policy = settings.task, settings.policy
    if task and Path(task).is_file():
        task = phone.send_file(Path(task))
    if policy is not None:
        policy = Path(phone.send_file(policy))
    keys = None
    if settings.keys is not None:
        keys = Path(f"{own}-keys")
        phone.send_folder(settings.keys, str(keys), names=KEY_FILES)
        phone.adb.check(f"chmod -R go= {quote([keys])}", "protecting the keys")
    host, _, port = settings.server.rpartition(":")
    if host in _LOCAL:
        phone.adb.reverse(port)
    names = {item.name for item in fields(JoinSettings)}
    there = {name: value for name, value in vars(settings).items() if name in names}
    there |= {"folder": Path(own), "bundle": Path(bundle), "train": rows, "task": task, "policy": policy}
    return [
        "fleet",
        "join",
        "--config",
        phone.send_settings(settings.name, JoinSettings(**{**there, "keys": keys})),
    ]


def _need_flower(phone: Phone) -> None:
    phone.need_this_driver()
    script = f"grep -q '\"flwr\":' {quote([phone.path('runtime', MANIFEST)])}"
    if phone.adb.shell(script).code:
        raise DeviceError(
            f"the runtime on {phone.adb.serial} is one without Flower",
            remedy="make another: prge android bundle --fleet runtime, then prge android push runtime",
        )
