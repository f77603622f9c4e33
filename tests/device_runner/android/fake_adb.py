"""A shell script instead of adb, which runs all commands in a folder of this machine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

from device_runner.android.preflight import MACHINES
from device_runner.android.runtime import MANIFEST, driver_hash
from tests.device_runner.android.daemons import REPOSITORY
from tests.verbs import prge

_ADB = """#!/bin/sh
case $1 in
devices) printf 'List of devices attached\\nfake\\tdevice\\n'; exit ;;
esac
shift 2
case $1 in
shell) [ "$2" = -T ] && shift; exec sh -c "$2" ;;
push) echo "$2" >>"$0.pushed"; exec cp -r "$2" "$3" ;;
pull) exec cp -r "$2" "$3" ;;
reverse) echo "$2 $3" >>"$0.reversed" ;;
forward) [ "$2" = --list ] || echo "$3 $4" >>"$0.forwarded" ;;
esac
"""
_RUNTIME = """#!/bin/sh
exec {python} "$@"
"""


class FakePhone:
    """A folder that `prge android` uses as prge's folder on a phone; its runtime is this machine's Python."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir()
        self.folder = parent / 'it\'s "a phone" & more'
        self.adb = parent / "adb"
        self.adb.write_text(_ADB)
        self.adb.chmod(0o755)
        runtime = self.folder / "runtime"
        runtime.mkdir(parents=True)
        (runtime / "run.sh").write_text(_RUNTIME.format(python=sys.executable))
        shutil.copy(REPOSITORY / "device_runner" / "android" / "job.sh", runtime)
        (runtime / "lib").mkdir()
        (runtime / "lib" / "ld.so").write_text("#!/bin/sh\necho this machine\n")
        (runtime / "lib" / "ld.so").chmod(0o755)
        manifest = {"driver": driver_hash(), "prge": "this", "machine": MACHINES[platform.machine()]}
        manifest["packages"] = {"flwr": "the one here"}
        (runtime / MANIFEST).write_text(json.dumps(manifest, indent=1))
        (self.folder / "runtime.tree").write_text("whole")

    def write_settings(self, name: str, bundle: Path | str) -> Path:
        """Write the settings of a run with this bundle, and return the folder of the run."""
        run = self.folder / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"bundle: {json.dumps(str(bundle))}\n")
        (self.folder / "jobs" / name).mkdir(parents=True)
        return run

    def prge(
        self, verb: str, *arguments: object, stdin: str = "", code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run `prge android VERB` with a standard input, and check its exit code."""
        environment = {"PRGE_ADB": str(self.adb), "OMP_NUM_THREADS": "1", "ANDROID_SERIAL": "fake"}
        with mock.patch.dict(os.environ, environment):
            done = prge("android", verb, *arguments, "--folder", self.folder, check=False, input=stdin)
        assert done.returncode == code, done.stdout + done.stderr
        return done
