"""`prge android fleet join`: a phone joins a fleet, with its keys, by cable or network, through Flower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from device_runner.android.adb import quote
from device_runner.android.device import check_name
from device_runner.android.jobs import report, start_job
from device_runner.android.remote import RemoteCall, RemoteFlags
from device_runner.android.runtime import MANIFEST
from prge.errors import DeviceError

# Files that `prge fleet keys` writes for a device.
KEY_FILES = ("ca.pem", "device.key")
_LOCAL = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True)
class JoinFlags(RemoteFlags):
    """A device of the fleet. If --server is 127.0.0.1, the device reaches this computer by cable."""

    POSITIONAL: ClassVar = ()

    name: str = "fleet"
    """Name of the job on the device, and of its folder of this fleet. `prge android stop` ends the job."""

    def device_settings(self, settings: Any) -> Mapping[str, Any]:
        """See RemoteFlags."""
        check_name(self.name)
        return {"folder": Path(self.path("fleets", self.name))}

    def execute(self, call: RemoteCall) -> int:
        """Start the job on the device; see RemoteFlags."""
        phone, settings = call.phone, call.settings
        script = f"grep -q '\"flwr\":' {quote([phone.path('runtime', MANIFEST)])}"
        if phone.adb.shell(script).code:
            raise DeviceError(
                f"The runtime on {phone.adb.serial} lacks Flower.",
                remedy="Build another: prge android bundle --fleet runtime, then prge android push runtime.",
                code="runtime-without-flower",
            )
        keys = None if settings.keys is None else phone.path("fleets", f"{self.name}-keys")
        if keys is not None:
            phone.send_folder(settings.keys, keys, names=KEY_FILES)
            phone.adb.check(f"chmod -R go= {quote([keys])}", "protecting the keys")
        words = call.send(call.send_inputs(keys=keys), phone.path("jobs", self.name))
        host, _, port = settings.server.rpartition(":")
        if host in _LOCAL:
            phone.adb.reverse(port)
        return report(phone, start_job(phone, self.name, words))
