"""What verbs need of runs on a phone: their bundle there, and their end."""

from __future__ import annotations

import time
from pathlib import Path

from device_runner.android.adb import Adb
from device_runner.android.device import Job, Phone
from prge.errors import DeviceError
from prge.files.bundle import MANIFEST, check_content, open_bundle

# Between two lines of how a run stands that is waited for.
TELL_SECONDS = 20.0


def send_bundle(phone: Phone, folder: Path, check: bool = False) -> str:
    """Bring a bundle, the files that its manifest names alone; its folder there has its hash in the name."""
    bundle = open_bundle(folder)
    folder = bundle.folder
    for block in bundle.chain.blocks:
        check_content(folder, bundle.manifest, block.weights)
    remote = phone.path("bundles", bundle.sha256[:12])
    phone.send_folder(folder, remote, names=[MANIFEST, *bundle.manifest["files"]], check=check)
    return remote


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
