"""The device side of Flower: receive tasks from a server's Fleet API, and send replies.

Flower's own SuperNode also downloads and runs the app that the server sends. This client never asks for it.
"""

from __future__ import annotations

import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec

from device_runner.fleet.network.flower import FleetClient, TaskOffer, call_repeatedly
from device_runner.fleet.network.flower_files import flower_home, log_to
from device_runner.fleet.network.keys import DeviceKeys
from prge.errors import DeviceError, PrgeError
from prge.formats.run_folder import run_lock
from prge.system.atomic import write_file

_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_LOOK = 3.0
_MAX_SECONDS_TO_RETRY = 20.0
T = TypeVar("T")


def join(
    folder: Path,
    server: str,
    keys: DeviceKeys | None,
    answer: Callable[[bytes], bytes],
    log: Callable[[str], None] = print,
) -> NoReturn:
    """Answer a server's tasks until interrupted; waits for a server that is away.

    Args:
        folder: the folder of the device; contains Flower's files.
        server: HOST:PORT.
        keys: keys that authenticate the server and the device; None: no encryption, and the server does not
            know the device.
        answer: a function that turns a task into a reply; see `messages`.
        log: called with a line about each task.

    Raises:
        DeviceError: the server is not there, is not the one that its certificate should name, or does not
            admit this device.
        RunError: another process uses this device's folder.
    """
    home = flower_home(folder)
    check_server(server, keys)
    log_to(home / "device.log")
    with run_lock(home), _connected(home, server, keys) as client:
        while True:
            offer = _retry(client.poll)
            if offer is None:
                time.sleep(_SECONDS_TO_LOOK)
                continue
            try:
                log(_answer(client, offer, answer))
            except Exception as error:  # a task that is lost for any reason is sent again by the server
                log(f"A task or its reply was lost: {error}")


def _answer(client: FleetClient, offer: TaskOffer, answer: Callable[[bytes], bytes]) -> str:
    """Answer a task; return a line for the device's terminal only, because errors may name rows."""
    begin = time.monotonic()
    task = _retry(lambda: client.fetch(offer))
    try:
        reply = task.answer(answer(task.content))
        outcome = f"answered in {time.monotonic() - begin:.1f} s"
    except Exception as error:
        name = type(error).__name__
        reply = task.failure(name)
        outcome = f"failed: {name}: {error}"
    _retry(lambda: client.send(reply))
    return f"round {task.round[:9]}: {outcome}"


@contextmanager
def _connected(home: Path, server: str, keys: DeviceKeys | None) -> Iterator[FleetClient]:
    """Stay registered with a server until the block ends; raises DeviceError if it stops admitting us."""
    key = ec.generate_private_key(ec.SECP384R1()) if keys is None else keys.key
    path = home / "node"
    with FleetClient(server, None if keys is None else keys.authority, key) as client:
        try:
            if keys is None:
                client.register()
            elif path.is_file():
                _leave(client, int(path.read_bytes()))  # a killed device could not leave
            node = client.activate()
            write_file(path, str(node).encode())
            try:
                with call_repeatedly(lambda: _send_heartbeat(client)):
                    yield client
            finally:
                _leave(client, node)
        except httpx.HTTPStatusError as error:
            raise DeviceError(
                f"{server} does not admit this device: it returned status {error.response.status_code}.",
                remedy="Its NAME.pub must be in devices/ of the server's keys when the server starts; if the "
                "key was used from another folder, wait a minute.",
                code="device-not-admitted",
            ) from None
        except httpx.TransportError as error:
            raise DeviceError(
                f"The connection to {server} was lost: {error}", code="connection-lost"
            ) from None


def _retry(call: Callable[[], T]) -> T:
    """Repeat a call while the server is away; raises if another server has taken its place."""
    seconds = 1.0
    while True:
        try:
            return call()
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                raise
        except httpx.HTTPError as error:
            if "certificate" in str(error).lower():
                raise
        time.sleep(random.uniform(0, seconds))  # spreads the reconnections of a fleet's devices
        seconds = min(2 * seconds, _MAX_SECONDS_TO_RETRY)


def _send_heartbeat(client: FleetClient) -> None:
    """Send a heartbeat; errors are ignored, because the next poll for a task meets them too."""
    with suppress(httpx.HTTPError):
        client.send_heartbeat()


def _leave(client: FleetClient, node: int) -> None:
    with suppress(httpx.HTTPError):
        client.deactivate(node)


def check_server(server: str, keys: DeviceKeys | None) -> None:
    """Connect to the server once, to report what is wrong.

    Raises:
        PrgeError: the authority's file can't be used.
        DeviceError: no server is there, or another one.
    """
    host, _, port = server.rpartition(":")
    if not (host and port.isdigit()):
        raise PrgeError(f"{server} is not HOST:PORT.", code="server-address-malformed")
    try:
        context = None if keys is None else ssl.create_default_context(cafile=str(keys.authority))
    except OSError as error:  # includes ssl errors
        raise PrgeError(
            f"{keys and keys.authority} is not a certificate: {error}",
            remedy="Give ca.pem of the server's keys; see `prge fleet keys`.",
            code="certificate-unreadable",
        ) from None
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT) as plain:
            if context is not None:
                context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        code = "server-of-other-certificate"
        problem = f"{server} is not the server of this certificate: {error.verify_message}"
        remedy = "Give the ca.pem of this server; `prge fleet keys --hosts` names its hosts."
    except ssl.SSLError as error:
        code, problem = "server-without-tls", f"{server} does not use TLS: {error.reason}"
        remedy = "Check whether the server runs with --insecure."
    except (OSError, UnicodeError) as error:
        code = "server-not-reachable"
        problem = f"No server at {server}: {getattr(error, 'strerror', None) or error}"
        remedy = "Start it with `prge fleet serve`, and check the address and the firewall."
    else:
        return
    raise DeviceError(problem, remedy=remedy, code=code)
