"""The end of what runs on a phone."""

from __future__ import annotations

import time

from device_runner.android.adb import Adb
from device_runner.android.device import Job, Phone
from prge.errors import DeviceError

# Between two lines of how a run stands that is waited for.
TELL_SECONDS = 20.0


def waited(phone: Phone, name: str, tells: bool = True) -> Job:
    """The job once it has ended; a device that is lost meanwhile is looked for again for a while."""
    lost, then = 0, time.monotonic()
    while True:
        try:
            job = phone.job(name)
            lost = 0
        except DeviceError:
            lost += 1
            if lost > 30:
                raise
            time.sleep(2)
            try:
                phone = Phone(Adb(phone.adb.serial), phone.folder)
            except DeviceError:
                continue
            continue
        if job.state != "running":
            return job
        if tells and time.monotonic() - then > TELL_SECONDS:
            then = time.monotonic()
            print(job.text(), flush=True)
        time.sleep(1)
