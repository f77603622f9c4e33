"""Tests of a SuperLink and devices as real processes on loopback: rounds complete, strangers are refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from device_runner.fleet.network.client import check_server
from device_runner.fleet.network.flower_files import NAME
from device_runner.fleet.network.keys import DeviceKeys, ServerKeys, make_keys
from device_runner.fleet.network.superlink import superlink
from prge.errors import DeviceError, RunError
from tests.device_runner.fleet.network.nodes import (
    Device,
    RoundNumberCoordinator,
    device,
    free_port,
    run_all_rounds,
    serving,
)
from tests.refusals import raises


def test_devices_with_keys_answer_every_round(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, [], ["one", "two"])
    rounds = RoundNumberCoordinator(2)
    with serving(tmp_path / "server", keys / "server") as link, ExitStack() as devices:
        for name in ("one", "two"):
            devices.enter_context(device(tmp_path / name, link.address, keys / "devices" / name))
        run_all_rounds(link, rounds, 2)
        names = link.names()
    assert sorted(names.values()) == ["one", "two"]
    assert [sorted(names[node] for node in answers) for answers in rounds.received] == [["one", "two"]] * 2
    assert all(
        content == RoundNumberCoordinator.task(number)
        for number, answers in enumerate(rounds.received)
        for content in answers.values()
    )


@pytest.mark.whole
def test_the_server_accepts_no_commands(tmp_path: Path) -> None:
    """Flower's own SuperLink lets anyone who reaches it start apps and register devices."""
    with superlink(tmp_path / "server", "127.0.0.1", 0, None) as link:
        control = ControlHttpClient.from_server_address(link.address, True, None, [])
        for ask in (
            lambda: control.StartRun(StartRunRequest()),
            lambda: control.ListRuns(ListRunsRequest()),
            lambda: control.RegisterNode(RegisterNodeRequest()),
        ):
            with pytest.raises(httpx.HTTPStatusError, match="404"):
                ask()
        runtime = RuntimeHttpClient.from_server_address(
            link.address, True, None, [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        )
        with link.run(), pytest.raises(httpx.HTTPStatusError, match="404"):
            runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))


@pytest.mark.whole
def test_a_device_without_a_known_key_is_not_admitted(tmp_path: Path) -> None:
    own, others = tmp_path / "own", tmp_path / "others"
    make_keys(own, [], ["one"])
    make_keys(others, [], ["one"])
    stranger = others / "devices" / "one"
    (stranger / "ca.pem").write_bytes((own / "server" / "ca.pem").read_bytes())
    with superlink(tmp_path / "server", "127.0.0.1", 0, ServerKeys.open(own / "server")) as link:
        with device(tmp_path / "stranger", link.address, stranger) as child:
            _wait(lambda: "does not admit this device: it returned status 412" in child.console)
        assert list(link.names().values()) == ["one"]


@pytest.mark.whole
def test_a_device_verifies_its_server(tmp_path: Path) -> None:
    own, others = tmp_path / "own", tmp_path / "others"
    make_keys(own, [], ["one"])
    make_keys(others, [], ["one"])
    with superlink(tmp_path / "server", "127.0.0.1", 0, ServerKeys.open(own / "server")) as link:
        check_server(link.address, DeviceKeys.open(own / "devices" / "one"))
        with raises(DeviceError, "server-of-other-certificate", containing=link.address):
            check_server(link.address, DeviceKeys.open(others / "devices" / "one"))
        with raises(RunError, "address-not-available", containing=link.address):
            superlink(tmp_path / "other", "127.0.0.1", int(link.address.split(":")[1]), None).__enter__()
    with raises(DeviceError, "server-not-reachable", containing=link.address):
        check_server(link.address, None)
    with superlink(tmp_path / "server", "127.0.0.1", 0, None) as link:
        keys = DeviceKeys.open(own / "devices" / "one")
        with raises(DeviceError, "server-without-tls", containing=link.address):
            check_server(link.address, keys)


@pytest.mark.whole
def test_killed_devices_and_servers_recover(tmp_path: Path) -> None:
    """A round continues without a device that disappears; a restarted server finds its devices."""
    keys, port = tmp_path / "keys", free_port()
    make_keys(keys, [], ["one", "two"])
    folder = tmp_path / "server"
    first, second = RoundNumberCoordinator(1), RoundNumberCoordinator(1)

    def joined(name: str, code: str = "task") -> AbstractContextManager[Device]:
        return device(tmp_path / name, f"127.0.0.1:{port}", keys / "devices" / name, code)

    with ExitStack() as devices:
        with serving(folder, keys / "server", port) as link:
            devices.enter_context(joined("one"))
            with joined("two", "os._exit(1)"):
                run_all_rounds(link, first, 2, seconds=8)
            names = link.names()
        assert [[names[node] for node in answers] for answers in first.received] == [["one"]]
        with serving(folder, keys / "server", port) as link:
            # The server considers a device that was killed and restarted absent for a moment.
            node = tmp_path / "two" / NAME / "node"
            before = node.stat().st_mtime_ns
            devices.enter_context(joined("two"))
            _wait(lambda: node.stat().st_mtime_ns > before)
            run_all_rounds(link, second, 2)
            assert link.names() == names
    assert [sorted(names[node] for node in answers) for answers in second.received] == [["one", "two"]]


@pytest.mark.whole
def test_a_reply_to_an_older_round_is_dropped(tmp_path: Path) -> None:
    rounds = RoundNumberCoordinator(2)
    slow = "time.sleep(15 if task[0] == 0 else 0) or task"
    with serving(tmp_path / "server") as link, device(tmp_path / "slow", link.address, code=slow) as child:
        run_all_rounds(link, rounds, 1, seconds=15)
        assert "A task or its reply was lost" in child.console
    assert [list(answers.values()) for answers in rounds.received] == [[], [RoundNumberCoordinator.task(1)]]


def _wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
