"""A phone's user space without a phone: an arm64 runtime under emulation, run by adb's user through adb.

As on Android, the root is read-only, has only a shell and the daemon with its libraries, and lacks /lib,
/usr, /etc and /tmp; only adb's own folder can be written. This needs root, and a kernel that runs arm64
programs in an emulator.

    python -m tests.device_runner.android.rig --json android.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from device_runner.android.packages import Archive, download_debian, unpack_debian
from device_runner.android.runtime import BundleSettings, Runtime, build_runtime, default_cache
from prge.errors import PrgeError
from prge.formats.bundle import open_bundle
from prge.formats.journal import Journal
from prge.formats.peft import find_adapter, read_peft
from prge.training.trials import TRIALS
from tests.device_runner.android.daemons import (
    PORT,
    REPOSITORY,
    Daemon,
    Network,
    adbd_folder,
    wait_for_device,
)
from tests.device_runner.android.fleet_of_one import train_fleet_of_one

DEMO = REPOSITORY / "server_export" / "demo_data"
SHELL_USER = 2000
FLEET_FOLDER = "/data/local/tmp/fleet"
MAX_MEGABYTES = 140
MAX_DIFFERENCE = 1e-4
STEPS = 8
SERVED_PORT = 8123
_LOADER = "ld-linux-aarch64.so.1"
_CORES = 2
_CPUINFO = """processor : {number}
BogoMIPS : 38.40
Features : fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer : 0x41
CPU architecture: 8
CPU variant : 0x4
CPU part : 0xd0b
CPU revision : 1

"""
_SETUP = """
set -e
P=$1
mount --bind "$P" "$P"
mount -o remount,ro,bind "$P"
mount --bind "$2" "$P/data/local/tmp"
mount -t proc proc "$P/proc"
mount --bind "$3/cpuinfo" "$P/proc/cpuinfo"
mount --bind "$3/sys" "$P/sys"
mount -t tmpfs -o mode=755 tmpfs "$P/dev"
for node in null zero urandom random; do
    : >"$P/dev/$node"
    mount --bind "/dev/$node" "$P/dev/$node"
done
mkdir "$P/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$P/dev/pts"
ln -s pts/ptmx "$P/dev/ptmx"
exec env -i QEMU_CPU=cortex-a76 ADBD_PORT=$4 PATH=/system/bin ANDROID_DATA=/data ANDROID_ROOT=/system \\
    "$(command -v chroot)" --userspec=2000:2000 --groups=2000,3009 "$P" \\
    /apex/rt/ld-linux-aarch64.so.1 --library-path /apex/rt /apex/adbd/adbd
"""


class Rig(Daemon):
    """The arm64 daemon in its root.

    Attributes:
        root: folder of the root.
        phone_folder: adb's folder, as the host sees it.
        kernel: folder with the files of a phone's kernel.
    """

    def __init__(self, network: Network, work: Path) -> None:
        self.root, self.phone_folder, self.kernel = work / "root", work / "writable", work / "kernel"
        _make_root(work, self.root)
        _make_kernel(self.kernel)
        self.phone_folder.mkdir()
        os.chown(self.phone_folder, SHELL_USER, SHELL_USER)
        self.phone_folder.chmod(0o771)
        home = work / "home"
        home.mkdir()
        super().__init__(network, self.root, home)

    def start(self) -> None:
        """Mount, start the daemon as adb's user, and wait until adb reaches it."""
        with (self.home / "adbd.log").open("ab") as log:
            self.process = self.network.start(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", _SETUP, "rig", self.root,
                 self.phone_folder, self.kernel, PORT], on_phone=True,
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        wait_for_device(self, 120)


def main(argv: Sequence[str]) -> int:
    """Run all checks, print and write their results, and return 0 if all passed."""
    parser = argparse.ArgumentParser("rig", description="Train in a phone's user space without a phone.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fast-passed", choices=("true", "false"), default="false")
    arguments = parser.parse_args(argv)
    results: dict[str, object] = {"fast_passed": arguments.fast_passed == "true", "rig_passed": False}
    with tempfile.TemporaryDirectory(prefix="prge-rig-", ignore_cleanup_errors=True) as work:
        try:
            results |= _examine(Path(work))
        except (PrgeError, AssertionError) as error:
            results["problem"] = str(error)
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if results["fast_passed"] and results["rig_passed"] else 1


def _examine(work: Path) -> dict[str, object]:
    began = time.monotonic()
    network = Network()
    try:
        _log("three runtimes for arm64")
        runtime = build_runtime(BundleSettings(out=work / "runtime"))
        again = build_runtime(BundleSettings(out=work / "again"))
        fleet = build_runtime(BundleSettings(out=work / "fleet-runtime", fleet=True))
        bundle, here = _here(work)
        _log("the root")
        rig = Rig(network, work)
        try:
            rig.start()
            figures = _there(rig, runtime, bundle, here, work)
            figures["served"] = _serves(rig, bundle)
            figures["joined_fleet"] = _joins(rig, fleet, bundle, work)
            figures["bench"] = _benches(rig, work)
        finally:
            rig.close()
    finally:
        network.close()
    figures |= {"bundle_mb": round(runtime.megabytes, 1), "bundle_reproducible": runtime.tree == again.tree}
    figures["fleet_bundle_mb"] = round(fleet.megabytes, 1)
    checks = [
        runtime.megabytes <= MAX_MEGABYTES,
        runtime.tree == again.tree,
        figures["max_projected_gradient_difference"] <= MAX_DIFFERENCE,  # type: ignore[operator]
        figures["max_adapter_difference"] <= 0.05 * figures["largest_adapter_value"],  # type: ignore[operator]
        figures["published"],
        figures["paused_while_hot"],
        figures["resumed_same_bits"],
        figures["served"],
        figures["joined_fleet"],
        all(figures["bench"].values()),  # type: ignore[attr-defined]
    ]
    return {"rig_passed": all(checks), **figures, "seconds": round(time.monotonic() - began)}


def _here(work: Path) -> tuple[Path, Path]:
    """Export the demo's bundle, run it for a few steps on this machine, and return both folders."""
    _log("a bundle and a run on this machine")
    bundle, run = work / "bundle", work / "here"
    _prge(
        "export", "--model", DEMO / "model", "--out", bundle, "--target-modules", "o_proj", "down_proj",
        "--sequence-length", 32, "--roles", "forward", "prefill", "decode",
    )  # fmt: skip
    _prge("run", *_run_arguments(bundle), "--out", run, "--quiet")
    return bundle, run


def _there(rig: Rig, runtime: Runtime, bundle: Path, here: Path, work: Path) -> dict[str, object]:
    """Execute the same run in the rig, pull it, and compare it with the local run."""
    _log("push")
    rig.prge("push", runtime.folder)
    _log("doctor")
    output = rig.prge("doctor").stdout
    print(output, file=sys.stderr)
    _log("run, as user 2000 under emulation")
    rig.prge("run", *_run_arguments(bundle), "--out", "there", "--wait")
    there = work / "there"
    rig.prge("pull", "there", "--out", there)
    loose = [path for path in (rig.phone_folder / "prge").glob("*/") if path.stat().st_mode & 0o077]
    assert not loose, f"others get into {loose}"
    _log("run, killed and resumed")
    rig.prge("run", *_run_arguments(bundle), "--out", "killed")
    journal = rig.phone_folder / "prge" / "runs" / "killed" / "journal.jsonl"
    _until(lambda: journal.is_file() and journal.read_bytes().count(b'"type":"step"') >= 2, "no steps")
    rig.prge("stop", "killed", "--now")
    rig.prge("run", "--resume", "killed", "--wait")
    rig.prge("pull", "killed", "--out", work / "killed")
    _log("a run that pauses while the phone is hot")
    paused = _pauses(rig, bundle)
    _log("publish")
    _prge("publish", there, "--bundle", bundle, "--model", DEMO / "model", "--out", work / "published")
    opened = open_bundle(bundle)
    local, remote = (read_peft(find_adapter(run), opened.chain.modules).values for run in (here, there))
    return {
        "steps": STEPS,
        "max_projected_gradient_difference": _gradient_difference(here, there),
        "max_adapter_difference": float(np.abs(local - remote).max()),
        "largest_adapter_value": float(np.abs(local).max()),
        "paused_while_hot": paused,
        "published": (work / "published" / "adapter_model.safetensors").is_file(),
        "resumed_same_bits": all(
            (work / "killed" / name).read_bytes() == (there / name).read_bytes()
            for name in ("journal.jsonl", "final/adapter_model.safetensors")
        ),
        "device": json.loads((there / "run.json").read_text())["meta"],
    }


def _joins(rig: Rig, runtime: Runtime, bundle: Path, work: Path) -> bool:
    """Return whether the phone can join a fleet, with Flower under emulation."""
    _log("push a runtime with Flower, join a fleet")
    rig.prge("push", runtime.folder, "--folder", FLEET_FOLDER)
    return train_fleet_of_one(rig, FLEET_FOLDER, bundle, work, 240).count(": 1 answers, loss 0.") == 2


def _serves(rig: Rig, bundle: Path) -> bool:
    """Return whether a server answers through the cable and survives a kill and the end of adbd."""
    _log("a server, killed on the phone, and adb's daemon killed")
    serve = ["serve", "--bundle", bundle, "--port", SERVED_PORT, "--threads", 1, "--memory", "400MB"]
    output = rig.prge(*serve).stdout
    key = output.split("shown this once: ")[1].split()[0]
    request = {"model": "base", "prompt": "The film", "max_tokens": 2, "temperature": 0}
    answers: list[str] = []

    def answered() -> bool:
        status, answer = rig.ask(SERVED_PORT, "/v1/completions", key, request)
        answers.extend([answer["choices"][0]["text"]] if status == 200 else [])
        return status == 200

    refused = rig.ask(SERVED_PORT, "/v1/completions", "", request)[0] == 401
    first = answered()
    rig.adb("shell", "kill -9 $(cat /data/local/tmp/prge/jobs/server/pid)")
    _until(answered, "the server didn't come back", 600)
    restarted = "restarts 1" in rig.prge("status", "server").stdout
    rig.kill()
    rig.start()
    lost = "not forwarded" in rig.prge("status", "server").stdout
    again = rig.prge(*serve).stdout
    outlived = answered() and "shown this once" not in again
    stopped = "server: ended" in rig.prge("stop", "server").stdout
    return all((refused, first, restarted, lost, outlived, stopped, len(set(answers)) == 1))


def _benches(rig: Rig, work: Path) -> dict[str, bool]:
    """Return whether every trial of `prge android bench` has its figures, for tiny models."""
    _log("bench")
    path = work / "bench.json"
    arguments = [
        "--tiny", "--steps", 2, "--threads", 1, "--start-below-celsius", 60, "--cache", work / "bundles",
    ]  # fmt: skip
    for name in TRIALS:
        rig.prge("bench", name, *arguments, "--json", path, check=None)
    results = json.loads(path.read_text())
    assert rig.environment["ANDROID_SERIAL"] not in path.read_text(), "the file names the phone"
    print(json.dumps(results["trials"], indent=1), file=sys.stderr)
    measured = ("anonymous_mb", "peak_rss_mb", "watts", "seconds")
    trials: dict[str, dict[str, float]] = {name: results["trials"].get(name, {}) for name in TRIALS}
    return {
        name: any(trial.get(each, 0) > 0 for each in ("seconds_a_step", "tokens_a_second"))
        and all(trial[each] > 0 for each in measured)
        for name, trial in trials.items()
    }


def _pauses(rig: Rig, bundle: Path) -> bool:
    """Return whether a run pauses while the phone is hot, logs the reason, and continues by itself."""
    zone = rig.kernel / "sys/class/thermal/thermal_zone0/temp"
    run = rig.phone_folder / "prge" / "runs" / "hot"
    zone.write_text("47000\n")
    rig.prge("run", *_run_arguments(bundle), "--when", "cool:45,battery:30,0-24", "--out", "hot")
    log = run / "log.txt"
    _until(lambda: log.is_file() and "paused, too hot: 47.0" in log.read_text(), "no pause in the log")
    waited = b'"type":"step"' not in (run / "journal.jsonl").read_bytes()
    zone.write_text("41500\n")
    output = rig.prge("status", "hot", "--wait").stdout
    return waited and "completed" in output and "resuming after a pause" in log.read_text()


def _until(is_over: Callable[[], bool], problem: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_over():
        assert time.monotonic() < deadline, f"{problem} after {seconds:.0f} seconds"
        time.sleep(0.05)


def _run_arguments(bundle: Path) -> list[object]:
    return [
        "--bundle", bundle, "--train", DEMO / "train.jsonl", "--task", DEMO / "task.yaml", "--steps", STEPS,
        "--threads", 1, "--learning-rate", 0.001, "--optimizer", "sgd",
    ]  # fmt: skip


def _gradient_difference(here: Path, there: Path) -> float:
    """Return the largest difference of projected gradients between two runs.

    Raises:
        AssertionError: rows or seeds differ.
    """
    with Journal(here / "journal.jsonl") as local, Journal(there / "journal.jsonl") as remote:
        largest = 0.0
        for step in range(STEPS):
            a, b = local.step(step), remote.step(step)
            assert a is not None and b is not None, f"step {step} is missing"
            assert a["rows"] == b["rows"] and a["seed"] == b["seed"], f"step {step} has other rows or seed"
            largest = max(
                largest, float(np.abs(np.subtract(a["projected_gradients"], b["projected_gradients"])).max())
            )
    return largest


def _make_root(work: Path, root: Path) -> None:
    """Make the read-only root with a shell, tools and the daemon with their libraries."""
    for name in ("system/bin", "apex/rt", "apex/adbd", "data/local/tmp", "proc", "dev", "sys", "sdcard"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("/system/bin")
    files = adbd_folder(work / "adbd-arm64", default_cache(), "arm64")
    for path in files.iterdir():
        shutil.copy(path, root / "apex" / ("adbd" if path.name == "adbd" else "rt") / path.name)
    system = work / "tools"
    system.mkdir()
    names = ["mksh", "toybox", "libcrypt1", "libssl3t64"]
    unpack_debian(download_debian(names, "arm64", default_cache(), Archive()).values(), system)
    for path in (system / "usr/lib/aarch64-linux-gnu").glob("*.so*"):
        # Debian's libcrypto of Android has a similar name; neither replaces the other.
        if path.is_file() and not (root / "apex/rt" / path.name).exists():
            shutil.copy(path, root / "apex/rt" / path.name)
    shutil.copy(system / "usr/bin/mksh-static", root / "system/bin/sh")
    toybox = root / "system/bin/toybox"
    shutil.copy(system / "usr/bin/toybox", toybox)
    subprocess.run(
        ["patchelf", "--set-interpreter", f"/apex/rt/{_LOADER}", "--force-rpath", "--set-rpath", "/apex/rt",
         str(toybox)], check=True,
    )  # fmt: skip
    listed = subprocess.run(
        ["chroot", str(root), "/system/bin/toybox"], capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, f"arm64 programs can't be run here: {listed.stderr.strip()}"
    for applet in listed.stdout.split():
        if applet != "sh":
            (root / "system/bin" / applet).symlink_to("toybox")


def _make_kernel(folder: Path) -> None:
    """Write a phone kernel's files of processor, battery and temperature."""
    processors = folder / "sys/devices/system/cpu"
    files = {name: f"0-{_CORES - 1}" for name in ("possible", "present", "online")}
    files["kernel_max"] = str(_CORES - 1)
    for core in range(_CORES):
        files |= {
            f"cpu{core}/regs/identification/midr_el1": "0x00000000414fd0b1",
            f"cpu{core}/cpufreq/cpuinfo_max_freq": "2400000",
            f"cpu{core}/cpufreq/cpuinfo_min_freq": "300000",
            f"cpu{core}/cpufreq/scaling_cur_freq": "1800000",
            f"cpu{core}/topology/core_id": str(core),
            f"cpu{core}/topology/physical_package_id": "0",
            f"cpu{core}/topology/core_siblings": "3",
            f"cpu{core}/topology/core_siblings_list": f"0-{_CORES - 1}",
            f"cpu{core}/topology/thread_siblings": str(1 << core),
            f"cpu{core}/topology/thread_siblings_list": str(core),
        }
    power = "../../../class/power_supply/battery"
    files |= {f"{power}/type": "Battery", f"{power}/capacity": "81", f"{power}/status": "Discharging"}
    files |= {f"{power}/current_now": "-450000", f"{power}/voltage_now": "3900000"}
    files |= {f"{power}/temp": "312", "../../../class/thermal/thermal_zone0/temp": "41500"}
    for name, content in files.items():
        path = processors / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    blocks = "".join(_CPUINFO.format(number=core) for core in range(_CORES))
    (folder / "cpuinfo").write_text(f"{blocks}Hardware : test\n")


def _prge(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prge.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"prge {arguments[0]}: {done.stderr}"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
