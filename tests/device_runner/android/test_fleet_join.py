"""`prge android fleet join`: what is sent, and that the phone joins a fleet, with the real adb too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from device_runner.android.runtime import MANIFEST
from device_runner.fleet.messages import TaskRefusal, parse_reply
from device_runner.fleet.network.keys import make_keys
from tests.bundles import make_bundle
from tests.device_runner.android.conftest import built_runtime
from tests.device_runner.android.daemons import Daemon, end_jobs
from tests.device_runner.android.fake_adb import FakePhone
from tests.device_runner.android.fleet_of_one import train_fleet_of_one
from tests.device_runner.fleet.network.nodes import RoundNumberCoordinator, run_all_rounds, serving


@pytest.mark.whole
def test_a_phone_joins_a_fleet_by_cable(tmp_path: Path) -> None:
    phone, keys = FakePhone(tmp_path / "phone"), tmp_path / "keys"
    make_keys(keys, [], ["one"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    policy = tmp_path / "policy.yaml"
    policy.write_text("most_steps: 3\n")
    rounds = RoundNumberCoordinator(1)
    with serving(tmp_path / "server", keys / "server") as link:
        try:
            arguments = ["--server", link.address, "--name", "mine", "--keys", keys / "devices" / "one"]
            arguments += ["--bundle", make_bundle(tmp_path / "bundle"), "--train", rows, "--policy", policy]
            output = phone.prge("fleet", "join", *arguments).stdout
            assert output == "mine: running\n"
            port = link.address.split(":")[1]
            assert (tmp_path / "phone" / "adb.reversed").read_text() == f"tcp:{port} tcp:{port}\n"
            run_all_rounds(link, rounds, 1)
        finally:
            phone.prge("stop", "mine", "--now")
    # The server's message is no task, so the phone refuses it.
    ((content,),) = (answers.values() for answers in rounds.received)
    assert isinstance(parse_reply(content), TaskRefusal)
    own = phone.folder / "fleets" / "mine"
    assert "policy.yaml" in (own / "device.yaml").read_text()
    key = phone.folder / "fleets" / "mine-keys" / "device.key"
    assert key.stat().st_mode & 0o077 == 0


def test_a_runtime_without_flower_is_refused(tmp_path: Path) -> None:
    phone = FakePhone(tmp_path / "phone")
    manifest = phone.folder / "runtime" / MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "packages": {}}, indent=1))
    arguments = ["--bundle", make_bundle(tmp_path / "bundle"), "--train", tmp_path / "rows"]
    output = phone.prge("fleet", "join", "--server", "h:1", "--insecure", *arguments, code=2).stderr
    assert "The runtime on fake lacks Flower.\n  Build another: prge android bundle --fleet" in output


@pytest.mark.whole
def test_a_phone_with_no_network_but_its_cable_trains(
    daemon: Daemon, forward_bundle: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    phone = tmp_path / "phone"
    daemon.prge("push", built_runtime(tmp_path_factory, fleet=True), "--folder", phone)
    try:
        output = train_fleet_of_one(daemon, str(phone), forward_bundle, tmp_path)
    finally:
        end_jobs(phone)
    assert output.count(": 1 answers, loss 0.") == 2
