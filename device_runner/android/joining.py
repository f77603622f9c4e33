"""`prge android fleet join`: what is special about it are keys, the cable, and a runtime with Flower."""

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

# Of a folder of `prge fleet keys` for a device.
KEY_FILES = ("ca.pem", "device.key")
_LOCAL = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True)
class JoinFlags(RemoteFlags):
    """The device of the fleet. Where --server is 127.0.0.1, this computer is reached by the cable."""

    POSITIONAL: ClassVar = ()

    name: str = "fleet"
    """Of the job on the device, and of its folder of this fleet there; `prge android stop` ends it."""

    def settings_there(self, given: Any) -> Mapping[str, Any]:
        """See RemoteFlags."""
        check_name(self.name)
        return {"folder": Path(self.path("fleets", self.name))}

    def execute(self, call: RemoteCall) -> int:
        """Start the device; see RemoteFlags."""
        phone, settings = call.phone, call.settings
        script = f"grep -q '\"flwr\":' {quote([phone.path('runtime', MANIFEST)])}"
        if phone.adb.shell(script).code:
            raise DeviceError(
                f"the runtime on {phone.adb.serial} is one without Flower",
                remedy="make another: prge android bundle --fleet runtime, then prge android push runtime",
                code="runtime-without-flower",
            )
        keys = None if settings.keys is None else phone.path("fleets", f"{self.name}-keys")
        if keys is not None:
            phone.send_folder(settings.keys, keys, names=KEY_FILES)
            phone.adb.check(f"chmod -R go= {quote([keys])}", "protecting the keys")
        words = call.send(call.bring(keys=keys), phone.path("jobs", self.name))
        host, _, port = settings.server.rpartition(":")
        if host in _LOCAL:
            phone.adb.reverse(port)
        return report(phone, start_job(phone, self.name, words))
