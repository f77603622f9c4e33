"""A device's side of Flower: it takes its tasks from a server's Fleet API, and sends its answers there.

Flower's own SuperNode also fetches the app that the server sends, and has it run. Here nobody asks for it.
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

from device_runner.fleet.network.flower import FleetClient, Offer, repeating
from device_runner.fleet.network.home import flower_home, log_to
from device_runner.fleet.network.keys import DeviceKeys
from prge.errors import DeviceError, PrgeError
from prge.files.run_folder import run_lock
from prge.host.atomic import write_file

_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_LOOK = 3.0
_MOST_SECONDS_TO_RETRY = 20.0
T = TypeVar("T")


def join(
    folder: Path,
    server: str,
    keys: DeviceKeys | None,
    answer: Callable[[bytes], bytes],
    tell: Callable[[str], None] = print,
) -> NoReturn:
    """Answer a server's tasks until interrupted; a server that is away is waited for.

    Args:
        folder: the device's; Flower's files are within.
        server: HOST:PORT.
        keys: by which each knows the other; None: no encryption, and the server doesn't know who this is.
        answer: makes an answer of a task; see `messages`.
        tell: takes a line about each task.

    Raises:
        DeviceError: the server isn't there, isn't who its certificate should say, or doesn't let this
            device in.
        RunError: another process is this device.
    """
    home = flower_home(folder)
    check_server(server, keys)
    log_to(home / "device.log")
    with run_lock(home), _connected(home, server, keys) as client:
        while True:
            offer = _patiently(client.look)
            if offer is None:
                time.sleep(_SECONDS_TO_LOOK)
                continue
            try:
                tell(_answer(client, offer, answer))
            except Exception as error:  # whatever the server did meanwhile, it asks again
                tell(f"a task or its answer is lost: {error}")


def _answer(client: FleetClient, offer: Offer, answer: Callable[[bytes], bytes]) -> str:
    """Answer a task; a line about it, for what `answer` raises may name rows."""
    begin = time.monotonic()
    task = _patiently(lambda: client.fetch(offer))
    try:
        reply = task.answer(answer(task.content))
        outcome = f"answered in {time.monotonic() - begin:.1f} s"
    except Exception as error:
        name = type(error).__name__
        reply = task.failure(name)
        outcome = f"failed: {name}: {error}"
    _patiently(lambda: client.send(reply))
    return f"round {task.round[:9]}: {outcome}"


@contextmanager
def _connected(home: Path, server: str, keys: DeviceKeys | None) -> Iterator[FleetClient]:
    """Be there for a server until the block ends; raises DeviceError where it lets this device in no more."""
    key = ec.generate_private_key(ec.SECP384R1()) if keys is None else keys.key
    path = home / "node"
    with FleetClient(server, None if keys is None else keys.authority, key) as client:
        try:
            if keys is None:
                client.register()
            elif path.is_file():
                _leave(client, int(path.read_bytes()))  # one that was killed said no goodbye
            node = client.activate()
            write_file(path, str(node).encode())
            try:
                with repeating(lambda: _beat(client)):
                    yield client
            finally:
                _leave(client, node)
        except httpx.HTTPStatusError as error:
            raise DeviceError(
                f"{server} doesn't let this device in, it answers {error.response.status_code}",
                remedy="its NAME.pub must lie in devices/ of the server's keys when the server starts; where "
                "its key was used from another folder, wait a minute",
                code="device-not-admitted",
            ) from None
        except httpx.TransportError as error:
            raise DeviceError(
                f"the connection to {server} has ended: {error}", code="connection-lost"
            ) from None


def _patiently(call: Callable[[], T]) -> T:
    """Call a server again and again while it is away, unless another one has taken its place."""
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
        time.sleep(random.uniform(0, seconds))  # devices of a fleet don't come back all at once
        seconds = min(2 * seconds, _MOST_SECONDS_TO_RETRY)


def _beat(client: FleetClient) -> None:
    """Let the server know of the device; what it says to that, the next look for a task hears too."""
    with suppress(httpx.HTTPError):
        client.beat()


def _leave(client: FleetClient, node: int) -> None:
    with suppress(httpx.HTTPError):
        client.deactivate(node)


def check_server(server: str, keys: DeviceKeys | None) -> None:
    """Look for the server once, so that what is wrong has a name.

    Raises:
        PrgeError: the authority's file can't be used.
        DeviceError: nobody is there, or another one.
    """
    host, _, port = server.rpartition(":")
    if not (host and port.isdigit()):
        raise PrgeError(f"{server} is no HOST:PORT", code="server-address-malformed")
    try:
        context = None if keys is None else ssl.create_default_context(cafile=str(keys.authority))
    except OSError as error:  # ssl's errors among them
        raise PrgeError(
            f"{keys and keys.authority} is no certificate: {error}",
            remedy="give ca.pem of the server's keys; see `prge fleet keys`",
            code="certificate-unreadable",
        ) from None
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT) as plain:
            if context is not None:
                context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        code = "server-of-other-certificate"
        problem = f"{server} isn't the server of this certificate: {error.verify_message}"
        remedy = "give the ca.pem of this server; `prge fleet keys --hosts` names its hosts"
    except ssl.SSLError as error:
        code, problem = "server-without-tls", f"{server} doesn't speak TLS: {error.reason}"
        remedy = "does the server run --insecure?"
    except (OSError, UnicodeError) as error:
        code = "server-not-reachable"
        problem = f"no server at {server}: {getattr(error, 'strerror', None) or error}"
        remedy = "start it with `prge fleet serve`, and check address and firewall"
    else:
        return
    raise DeviceError(problem, remedy=remedy, code=code)
