"""`prge android doctor`: checks whether a device can train."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from device_runner.android.adb import quote
from device_runner.android.device import Phone
from device_runner.android.runtime import MANIFEST
from device_runner.requirements import Check
from prge.errors import DeviceError, as_clause

MIB = 1 << 20
OLDEST_KERNEL = (3, 7)
ENOUGH_BYTES = 300 * MIB
MACHINES = {"arm64-v8a": "arm64", "aarch64": "arm64", "x86_64": "amd64"}
_NOT_WRITTEN, _RAN = 3, 7
_TRY_FOLDER = f"""
mkdir -p {{folder}} && cd {{folder}} || exit {_NOT_WRITTEN}
printf '#!%s\\nexit {_RAN}\\n' "$(command -v sh)" >.try && chmod 755 .try || exit {_NOT_WRITTEN}
./.try
code=$?
rm -f .try
exit $code
"""
_ENGINE = """
import json
import device_runner.run
from device_runner.session.machine import describe_machine
print(json.dumps(describe_machine()))
"""


def examine(phone: Phone) -> Iterator[Check]:
    """Yield the results of all checks, one after another; raises DeviceError if the device is lost."""
    shell = phone.adb.shell
    model = shell("getprop ro.product.model").output.strip() or "unknown model"
    release = shell("getprop ro.build.version.release").output.strip() or "unknown version"
    serial = phone.adb.serial
    yield Check("device", "ok", f"{serial}: {model}, Android {release}", value=serial)
    # Other Linux systems lack Android's getprop.
    abi = shell("getprop ro.product.cpu.abi").output.strip() or shell("uname -m").output.strip()
    machine = MACHINES.get(abi)
    if machine is None:
        yield Check("machine", "missing", abi or "unknown", "Only 64-bit ARM and x86 are supported.")
    else:
        yield Check("machine", "ok", f"{abi}: needs a runtime for {machine}")
    yield _kernel(shell("uname -r").output.strip())
    yield _storage(phone)
    yield _folder(phone)
    yield from _runtime(phone, machine)


def _kernel(release: str) -> Check:
    """Check whether the kernel is new enough for the runtime's glibc."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers is None:
        return Check("kernel", "warn", release or "unknown")
    version = int(numbers[1]), int(numbers[2])
    if version < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        return Check("kernel", "missing", release, f"The runtime's glibc needs Linux {oldest} or newer.")
    return Check("kernel", "ok", release)


def _storage(phone: Phone) -> Check:
    """Check whether the device has enough free storage."""
    free = phone.free_bytes()
    if free is None:
        return Check("storage", "warn", "unknown")
    space = f"{free // MIB} MiB free"
    if free < ENOUGH_BYTES:
        return Check(
            "storage",
            "warn",
            space,
            f"{ENOUGH_BYTES // MIB} MiB plus twice the size of the model should be free.",
        )
    return Check("storage", "ok", space)


def _folder(phone: Phone) -> Check:
    """Check whether prge's folder can store and run files."""
    folder = quote([phone.folder])
    result = phone.adb.shell(_TRY_FOLDER.format(folder=folder))
    if result.code == _RAN:
        return Check("folder", "ok", phone.folder)
    if result.code == _NOT_WRITTEN:
        remedy = "Give a folder that adb's shell can write to with --folder."
        return Check("folder", "missing", result.last_line, remedy)
    remedy = "Its file system may be mounted noexec. Give another folder with --folder."
    return Check("folder", "missing", f"stores files but can't run them: {result.last_line}", remedy)


def _runtime(phone: Phone, machine: str | None) -> Iterator[Check]:
    """Check whether the runtime is complete, its loader starts, and engine and driver can be imported."""
    try:
        phone.require_runtime()
    except DeviceError as error:
        yield Check("runtime", "missing", as_clause(error.what), error.remedy)
        return
    manifest = json.loads(phone.adb.check(f"cat {quote([phone.path('runtime', MANIFEST)])}", "reading it"))
    version = f"prge {manifest['prge']} for {manifest['machine']}"
    if machine is not None and manifest["machine"] != machine:
        remedy = f"Run prge android bundle DIR --machine {machine}, then push it."
        yield Check("runtime", "missing", version, remedy)
        return
    try:
        phone.require_this_driver()
    except DeviceError as error:
        yield Check("runtime", "missing", as_clause(error.what), error.remedy)
        return
    yield Check("runtime", "ok", version)
    loader = phone.adb.shell(f"{quote([phone.path('runtime', 'lib', 'ld.so')])} --version")
    if loader.code:
        remedy = "The device doesn't let adb's shell run new programs. It may be a managed device."
        yield Check("loader", "missing", loader.last_line, remedy)
        return
    yield Check("loader", "ok", loader.output.strip().splitlines()[0])
    try:
        facts = json.loads(phone.python(_ENGINE).strip().splitlines()[-1])
    except (DeviceError, ValueError, IndexError) as error:
        yield Check("engine", "missing", str(error), "Push the runtime again: prge android push --check")
        return
    where = facts["where"]
    yield Check("engine", "ok", f"loads on {where['cpu']['model']}, {facts['threads']} threads")
    memory, free = where["memory_bytes"], facts["free_bytes"]
    if memory and free:
        yield Check("memory", "ok", f"{free // MIB} MiB free of {memory // MIB} MiB", value=free)
    else:
        yield Check("memory", "warn", "unknown")
    speed = facts["flops"] / 1e9
    yield Check("speed", "ok", f"{speed:.3g} GFLOP/s in float32, one thread of numpy", value=facts["flops"])
    for name, reading in facts["sensors"].items():
        if reading["value"] is None:
            yield Check(name, "warn", f"can't be read: {reading['reason']}")
        else:
            shown_value = f"{reading['value']} ({reading['source']})"
            yield Check(name, "ok", shown_value, value=reading["value"])
