"""Flower's SuperNode as a child of this process, which takes its tasks and never the server's code.

A SuperNode hands out the app that the server sends, for another process to install and run. In Flower's
isolation mode `process` that other process is whoever knows the SuperNode's secret: this one. It takes the
message of a task, answers it by an app of its own, and leaves the server's app unopened.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from queue import Empty, Queue
from typing import NoReturn

import httpx
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore import log
from flwr.supercore.constant import TaskType
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from device_runner.fleet.network.home import flower_home, last_lines, log_to, write_private
from device_runner.fleet.network.keys import DeviceKeys
from prge.errors import DeviceError, PrgeError

POLL_SECONDS = 0.5
_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_END = 10.0
# A killed SuperNode is taken for alive until it has missed two heartbeats of 30 s.
_SECONDS_REFUSED = 90.0
_SECONDS_TO_RETRY = 5.0
_REFUSED = f"[code: {ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED}]"
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


@dataclass(frozen=True)
class Connection:
    """How a device reaches its server.

    `server`: HOST:PORT. `keys`: None: no encryption, and the server doesn't know who this is.
    """

    server: str
    keys: DeviceKeys | None = None


def join(
    folder: Path, connection: Connection, app: ClientApp, tell: Callable[[str], None] = print
) -> NoReturn:
    """Answer a server's tasks by `app`, until interrupted; a server that is away is waited for.

    Args:
        folder: the device's; Flower's files are within.
        connection: where the server is, and how each knows the other.
        app: answers messages.
        tell: takes a line about each task.

    Raises:
        DeviceError: the server isn't there, isn't who its certificate should say, or doesn't let this
            device in.
    """
    home = flower_home(folder)
    check_server(connection)
    log_to(home / "tasks.log")
    console, refused = home / "supernode.log", 0.0
    while True:
        began = time.monotonic()
        with _supernode(home, connection, console) as node:
            node.serve(app, tell)
        words = last_lines(console)
        if not any(_REFUSED in line for line in words):
            raise DeviceError(f"the connection has ended; the end of {console}:\n  " + "\n  ".join(words))
        lasted = time.monotonic() - began
        refused = refused + lasted + _SECONDS_TO_RETRY if lasted < _SECONDS_TO_RETRY * 4 else lasted
        if refused > _SECONDS_REFUSED:
            raise DeviceError(
                f"{connection.server} doesn't let this device in",
                remedy="its NAME.pub must lie in devices/ of the server's keys when the server starts",
            )
        tell("not let in: the server doesn't know this key, or holds an earlier connection for a minute")
        time.sleep(_SECONDS_TO_RETRY)


class _SuperNode:
    """A SuperNode that runs."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, secret: bytes) -> None:
        self._process, self._address, self._secret = process, address, secret

    def serve(self, app: ClientApp, tell: Callable[[str], None]) -> None:
        """Answer tasks until the SuperNode ends."""
        signed = SuperExecAuthHttpInterceptor(master_secret=self._secret, protected_methods={_ACQUIRE})
        pulled: Queue[_Task] = Queue()
        with closing(self._client(signed)) as client:
            while self._process.poll() is None:
                with suppress(httpx.TransportError):  # it starts, or it ends
                    acquired = client.AcquireTask(
                        AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
                    )
                    if acquired.token:
                        # A task whose server was killed has no message: its thread waits, others go on.
                        threading.Thread(
                            target=self._pull, args=(acquired.token, pulled), daemon=True
                        ).start()
                with suppress(Empty):
                    _answer(pulled.get(timeout=POLL_SECONDS), app, tell)

    def _pull(self, token: str, pulled: Queue[_Task]) -> None:
        """Get a task's message; the app beside it stays unopened."""
        client = self._client(RuntimeTokenHttpInterceptor(token))
        heartbeat = HeartbeatSender(lambda: _beat(client))
        heartbeat.start()
        try:
            message, context, _, _ = pull_task_input(client)
            pulled.put(_Task(client, heartbeat, message, context))
        except Exception as error:  # whatever it is, the server asks again
            log(WARNING, "a task is lost: %s", error)
            heartbeat.stop()
            client.close()

    def _client(self, interceptor: ProtobufClientInterceptor) -> RuntimeHttpClient:
        version = RuntimeVersionHttpInterceptor("flwr-clientapp")
        return RuntimeHttpClient.from_server_address(self._address, True, None, [version, interceptor])


@dataclass(frozen=True)
class _Task:
    """A task that waits for its answer."""

    client: RuntimeHttpClient
    heartbeat: HeartbeatSender
    message: Message
    context: Context


def _answer(task: _Task, app: ClientApp, tell: Callable[[str], None]) -> None:
    """Answer one task. What goes wrong in the app stays here, where rows may be named."""
    then = time.monotonic()
    try:
        try:
            reply = app(message=task.message, context=task.context)
            outcome = f"answered in {time.monotonic() - then:.1f} s"
        except Exception as error:
            name = type(error).__name__
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, name), reply_to=task.message)
            outcome = f"failed: {name}: {error}"
        push_message(task.client, reply, task.context)
        push_task_output(task.client, task.context, SubStatus.COMPLETED, "")
        tell(f"round {task.message.metadata.group_id[:9]}: {outcome}")
    except httpx.HTTPError as error:
        tell(f"an answer is lost: {error}")
    finally:
        task.heartbeat.stop()
        task.client.close()


@contextmanager
def _supernode(home: Path, connection: Connection, output: Path) -> Iterator[_SuperNode]:
    """Start a SuperNode; it ends with the block, or with this process."""
    secret = secrets.token_bytes(32)
    # A file, since that is how Flower takes it; it is read when the SuperNode starts.
    secret_file = home / "secret"
    write_private(secret_file, secret)
    host, port = "127.0.0.1", _free_port()
    words = ["--superlink", connection.server, "--host", host, "--port", str(port)]
    words += ["--isolation", "process", "--superexec-auth-secret-file", str(secret_file)]
    if connection.keys is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(connection.keys.authority)]
        words += ["--auth-supernode-private-key", str(connection.keys.key)]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [*_python(), "-m", "device_runner.fleet.network.supernode", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # Ctrl-C in the terminal is this process's to pass on
        )
    try:
        yield _SuperNode(process, f"{host}:{port}", secret)
    finally:
        process.terminate()
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        secret_file.unlink(missing_ok=True)


def check_server(connection: Connection) -> None:
    """Look for the server once, so that what is wrong has a name.

    Raises:
        PrgeError: the authority's file can't be used.
        DeviceError: nobody is there, or another one.
    """
    server, keys = connection.server, connection.keys
    host, _, port = server.rpartition(":")
    if not (host and port.isdigit()):
        raise PrgeError(f"{server} is no HOST:PORT")
    try:
        context = None if keys is None else ssl.create_default_context(cafile=str(keys.authority))
    except OSError as error:  # ssl's errors among them
        raise PrgeError(
            f"{keys and keys.authority} is no certificate: {error}",
            remedy="give ca.pem of the server's keys; see `prge fleet keys`",
        ) from None
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT) as plain:
            if context is not None:
                context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        problem = f"{server} isn't the server of this certificate: {error.verify_message}"
        remedy = "give the ca.pem of this server; `prge fleet keys --hosts` names its hosts"
    except ssl.SSLError as error:
        problem, remedy = f"{server} doesn't speak TLS: {error.reason}", "does the server run --insecure?"
    except (OSError, UnicodeError) as error:
        problem = f"no server at {server}: {getattr(error, 'strerror', None) or error}"
        remedy = "start it with `prge fleet serve`, and check address and firewall"
    else:
        return
    raise DeviceError(problem, remedy=remedy)


def _beat(client: RuntimeHttpClient) -> bool:
    """Tell the SuperNode that its task is being worked at; Flower's own would end this process."""
    try:
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    except httpx.TransportError:
        return False
    except httpx.HTTPStatusError:  # the task is over
        return True
    return True


def _python() -> list[str]:
    """What starts this Python; on a phone it is a script."""
    script = os.environ.get("PRGE_PYTHON")
    return ["sh", script] if script else [sys.executable]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """The child: a SuperNode that ends when the process of the first word does."""
    from flwr.supernode.cli import flower_supernode

    threading.Thread(target=_end_with, args=(int(sys.argv.pop(1)),), daemon=True).start()
    flower_supernode()


def _end_with(parent: int) -> None:
    """End this process once its parent has: first so that the server is told, then at once."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SECONDS_TO_END)
    os._exit(1)


if __name__ == "__main__":
    main()
