"""`prge android` through the real adb and a real adb daemon, with a real runtime."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prge.formats.bundle import open_bundle
from prge.formats.peft import find_adapter, read_peft
from tests.device_runner.android.conftest import DEMO
from tests.device_runner.android.daemons import PHONE, SERIAL, Daemon, wait_for_device

SNIPPET = """
import sys
from pathlib import Path
from device_runner.android.adb import Adb
from prge.errors import DeviceError
adb = Adb()
try:
    print({code})
except DeviceError as error:
    sys.exit(f"{{error.exit_code}} {{error.what}}")
"""


def evaluated(daemon: Daemon, code: str) -> str:
    """Return what a Python expression with an `adb` prints, to standard output or as an error."""
    done = daemon.network.run([sys.executable, "-c", SNIPPET.format(code=code)], env=daemon.environment)
    return (done.stdout or done.stderr).strip()


def steps(run: Path) -> int:
    """Return the number of steps in a run's journal."""
    journal = run / "journal.jsonl"
    return journal.read_bytes().count(b'"type":"step"') if journal.is_file() else 0


def wait_for_steps(run: Path, count: int, seconds: float = 60) -> None:
    """Wait until a run has taken this many steps."""
    deadline = time.monotonic() + seconds
    while steps(run) < count:
        assert time.monotonic() < deadline, f"{run} has only {steps(run)} steps"
        time.sleep(0.02)


def status(daemon: Daemon, phone: Path, name: str) -> dict[str, object]:
    """Return the status of a run."""
    process = daemon.prge("status", name, "--json", "--folder", phone)
    (job,) = json.loads(process.stdout)
    return dict(job)


def check_private(folder: Path) -> None:
    """Check that only adb's user can read prge's folders, whatever modes adb gives to files in them."""
    tops = [path for path in folder.iterdir() if path.is_dir()]
    files = [path for name in ("runs", "jobs") for path in (folder / name).rglob("*")]
    assert {path.name for path in tops} >= {"runtime", "bundles", "data", "runs", "jobs", "cache"} and files
    assert not [path for path in (*tops, *files) if path.stat().st_mode & 0o077]


def test_exit_codes_and_output_arrive(daemon: Daemon) -> None:
    assert (
        evaluated(daemon, "[adb.shell(f'exit {n}').code for n in (0, 1, 7, 127, 255)]")
        == "[0, 1, 7, 127, 255]"
    )
    assert evaluated(daemon, "adb.shell('echo out; echo err >&2; exit 3')") == (
        "AdbOutput(code=3, output='out\\n', errors='err\\n')"
    )
    assert evaluated(daemon, "adb.shell('printf x').output") == "x"
    assert evaluated(daemon, "adb.check('echo no; exit 4', 'trying')") == "2 trying failed: no"
    assert (
        evaluated(daemon, "adb.shell('sleep 9', seconds=0.5)") == "2 adb shell did not end within 0 seconds."
    )
    missing = evaluated(daemon, "adb.pull('/nowhere', Path('x'))")
    assert missing.startswith("2 copying /nowhere to x failed") and "No such file" in missing


@pytest.mark.whole
def test_the_device_is_selected_by_its_serial(daemon: Daemon) -> None:
    environment = dict(daemon.environment)
    other = daemon.prge("status", "--serial", "nobody", check=2).stderr
    assert f"There is no device nobody. Connected devices: {SERIAL}" in other
    refused = daemon.prge("status", "--serial", f"{PHONE}:1", check=2).stderr
    assert f"adb connect: failed to connect to '{PHONE}:1': Connection refused" in refused
    alias = SERIAL.replace(PHONE, PHONE.replace(".0.", "."))  # another spelling of the address
    daemon.adb("connect", alias)
    del daemon.environment["ANDROID_SERIAL"]
    try:
        assert "More than one device" in daemon.prge("status", check=2).stderr
        daemon.prge("status", "--serial", SERIAL)
    finally:
        daemon.environment = environment
        daemon.adb("disconnect", alias)


@pytest.mark.whole
def test_doctor(daemon: Daemon, phone: Path) -> None:
    checks = json.loads(daemon.prge("doctor", "--json", "--folder", phone).stdout)
    states = {check["name"]: check["state"] for check in checks}
    assert states["loader"] == states["engine"] == states["storage"] == states["folder"] == "ok"
    # Without a battery, the check shows that.
    battery = next(check for check in checks if check["name"] == "battery_percent")
    assert battery["state"] == "ok" or "can't be read: no battery" in battery["detail"]
    bare = daemon.prge("doctor", "--folder", phone.with_name("bare"), check=1).stdout
    assert "has no runtime" in bare and "prge android push" in bare


@pytest.mark.whole
def test_push_sends_only_changed_files(daemon: Daemon, phone: Path, runtime: Path) -> None:
    arguments = ["push", runtime, "--folder", phone]
    assert "0 files sent" in daemon.prge(*arguments).stdout
    (phone / "runtime" / "run.sh").write_text("damaged")
    (phone / "runtime" / "foreign file").write_text("x")
    assert "1 files sent" in daemon.prge(*arguments, "--check").stdout
    assert not (phone / "runtime" / "foreign file").exists()
    assert (phone / "runtime" / "run.sh").read_bytes() == (runtime / "run.sh").read_bytes()


@pytest.mark.whole
def test_a_run_with_a_difficult_name(
    daemon: Daemon, phone: Path, run_arguments: list[object], forward_bundle: Path, tmp_path: Path
) -> None:
    name = 'it\'s "mine" & $(yours)'
    done = daemon.prge("run", *run_arguments, "--out", name, "--wait")
    assert "step 20 of 20" in done.stdout and "completed" in done.stdout
    again = daemon.prge("run", *run_arguments, "--out", name, check=2).stderr
    assert "already has a run" in again and "--resume" in again
    out = tmp_path / "pulled run"
    daemon.prge("pull", name, "--out", out, "--folder", phone)
    there = phone / "runs" / name
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()} - {
        "log.txt", "run.lock",
    }  # fmt: skip
    assert all((out / name).read_bytes() == (there / name).read_bytes() for name in names)
    bundle = open_bundle(forward_bundle)
    assert read_peft(find_adapter(out), bundle.chain.modules).values.any()
    # No pulled file shows rows, except the log, which is pulled on request.
    first = json.loads((DEMO / "train.jsonl").read_text().splitlines()[0])
    text = next(value for value in first.values() if isinstance(value, str) and len(value) > 20)
    assert not [path for path in out.rglob("*") if path.is_file() and text.encode()[:40] in path.read_bytes()]
    daemon.prge("pull", name, "--out", out, "--log", "--folder", phone)
    assert text[:40] in (out / "log.txt").read_text()
    assert "step 20" in daemon.prge("logs", name, "--folder", phone).stdout
    check_private(phone)
    assert out.stat().st_mode & 0o077 == 0
    # Other verbs run on the phone with the run's bundle and adapter, and their files are copied back.
    score, rows = tmp_path / "score.json", ["--task", DEMO / "task.yaml", "--data", DEMO / "dev.jsonl"]
    daemon.prge("eval", name, *rows, "--limit", 20, "--threads", 1, "--json", score, "--folder", phone)
    assert json.loads(score.read_text())["examples"] == 20
    arguments = ["--prompt", "it's $HOME", "--max-tokens", 2, "--threads", 1, "--folder", phone]
    generated = daemon.prge("generate", name, "base", *arguments)
    assert f"--- 1, {name}\n" in generated.stdout and "--- 1, base\n" in generated.stdout
    assert not [*(phone / "tmp").glob("*-*")]
    (tmp_path / "taken").mkdir()
    refused = daemon.prge("pull", name, "--out", tmp_path / "taken", "--folder", phone, check=2)
    assert "is not this run" in refused.stderr
    daemon.prge("clean", name, "--folder", phone)
    assert not there.exists()
    assert "has no run" in daemon.prge("pull", name, "--folder", phone, check=2).stderr


@pytest.mark.whole
def test_a_run_killed_three_times_ends_with_the_same_bits(
    daemon: Daemon, phone: Path, run_arguments: list[object]
) -> None:
    # Enough steps that the run is still running when it is killed for the third time, even on a slow machine.
    arguments = [*run_arguments, "--steps", 600]
    daemon.prge("run", *arguments, "--out", "whole", "--wait")
    killed = phone / "runs" / "killed"
    command = [
        sys.executable, "-m", "prge.cli.main", "android", "run", *arguments, "--out", "killed", "--wait",
    ]  # fmt: skip
    client = daemon.network.start(command, env=daemon.environment, stdout=-3, stderr=-3)
    wait_for_steps(killed, 20)
    client.send_signal(signal.SIGKILL)
    client.wait()
    # The run continues.
    wait_for_steps(killed, 40)
    job = status(daemon, phone, "killed")
    assert job["state"] == "running"
    os.kill(int(str(job["process"])), signal.SIGKILL)
    output = daemon.prge("status", "killed", "--wait", "--folder", phone).stdout
    assert "killed with code 137" in output and steps(killed) < 200
    resumed = daemon.prge("run", "--resume", "killed", "--folder", phone).stdout
    assert "running" in resumed
    assert "is running" in daemon.prge("run", "--resume", "killed", "--folder", phone, check=2).stderr
    daemon.adb("kill-server")
    assert status(daemon, phone, "killed")["state"] == "running"
    daemon.kill()
    before = steps(killed)
    assert f"the device {SERIAL}" in lost_device_error(daemon, phone)
    wait_for_steps(killed, before + 5)
    os.kill(int((phone / "jobs" / "killed" / "pid").read_text()), signal.SIGKILL)
    daemon.start()
    assert status(daemon, phone, "killed")["code"] == 137
    daemon.prge("run", "--resume", "killed", "--wait", "--folder", phone)
    whole = phone / "runs" / "whole"
    for name in ("final/adapter_model.safetensors", "journal.jsonl"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert steps(killed) == 600


def without_flags(arguments: list[object], *flags: str) -> list[object]:
    """Return arguments without some flags and their values."""
    dropped = {index + more for index, word in enumerate(arguments) if word in flags for more in (0, 1)}
    return [word for index, word in enumerate(arguments) if index not in dropped]


def lost_device_error(daemon: Daemon, phone: Path) -> str:
    """Return the error of a lost device, with the same text whether adb still lists the device or not."""
    error = daemon.prge("status", "--folder", phone, check=2).stderr
    return error.replace(f"There is no device {SERIAL}", f"the device {SERIAL}")


@pytest.mark.whole
def test_stop_and_resume(daemon: Daemon, phone: Path, run_arguments: list[object], runtime: Path) -> None:
    daemon.prge("run", *run_arguments, "--steps", 2000, "--out", "long")
    assert "is running" in daemon.prge("clean", "--all", "--folder", phone, check=2).stderr
    assert "0 files sent" in daemon.prge("push", runtime, "--folder", phone).stdout
    (phone / "runtime.tree").unlink()
    assert "long is running" in daemon.prge("push", runtime, "--folder", phone, check=2).stderr
    output = daemon.prge("stop", "long", "--folder", phone).stdout
    daemon.prge("push", runtime, "--folder", phone)
    assert "interrupted" in output
    job = status(daemon, phone, "long")
    # SIGTERM lets the run save its state and end by itself.
    assert job["code"] == 130 and steps(phone / "runs" / "long") < 2000
    assert "running" in daemon.prge("run", "--resume", "long", "--folder", phone).stdout
    daemon.prge("stop", "long", "--now", "--folder", phone)
    assert status(daemon, phone, "long")["state"] == "killed"


@pytest.mark.whole
def test_rows_on_the_device_and_errors_of_the_driver(
    daemon: Daemon, phone: Path, run_arguments: list[object], tmp_path: Path
) -> None:
    missing = daemon.prge(
        "run",
        *without_flags(run_arguments, "--train"),
        "--train",
        "/nowhere/rows.jsonl",
        "--data-on-device",
        "--out",
        "x",
        check=2,
    )
    assert "no readable /nowhere/rows.jsonl" in missing.stderr
    rows = tmp_path / "rows of the phone.jsonl"
    rows.write_bytes((DEMO / "train.jsonl").read_bytes())
    dev = tmp_path / "dev.jsonl"
    dev.write_bytes((DEMO / "dev.jsonl").read_bytes())
    run_arguments = without_flags(run_arguments, "--train", "--dev")
    there = ["--train", rows, "--dev", dev, "--data-on-device", "--wait"]
    data = {path.name for path in (phone / "data").glob("*")}
    daemon.prge("run", *run_arguments, *there, "--out", "private")
    brought = {path.name for path in (phone / "data").iterdir()} - data
    assert not [name for name in brought if name.endswith(".jsonl")]
    # The driver's own error and exit code arrive.
    rows.write_text("no rows\n")
    failed = daemon.prge("run", *run_arguments, *there, "--out", "bad", check=2)
    assert "ended with code 2" in failed.stdout and "rows of the phone.jsonl" in failed.stderr
    daemon.prge("clean", "bad", "--folder", phone)
    daemon.prge("run", *run_arguments, *there[:-1], "--out", "bad", check=2)
    assert "not JSON" in daemon.prge("logs", "bad", "--console", "--folder", phone).stdout


@pytest.mark.whole
def test_a_full_device(
    daemon: Daemon, runtime: Path, small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    disk = small_disk("40m")
    full = daemon.prge("push", runtime, "--folder", disk / "prge", check=2).stderr
    assert "MiB free" in full and "prge android clean" in full
    big = tmp_path / "big"
    big.write_bytes(bytes(60 << 20))
    error = evaluated(daemon, f"adb.push(Path({str(big)!r}), {str(disk / 'big')!r})")
    assert error.startswith("2 copying") and "No space left" in error


@pytest.mark.whole
def test_a_restarted_daemon_is_reached_again(daemon: Daemon, phone: Path) -> None:
    daemon.kill()
    begin = time.monotonic()
    assert daemon.prge("status", "--folder", phone, check=2).stderr.startswith("prge android: error:")
    assert time.monotonic() - begin < 20
    daemon.start()
    wait_for_device(daemon)
    daemon.prge("status", "--folder", phone)
