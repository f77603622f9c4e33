"""A device's side of Flower: it takes its tasks from a server's Fleet API, and sends its answers there.

Flower's own SuperNode also fetches the app that the server sends, and has it run. Here nobody asks for it.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL as HEARTBEAT_SECONDS
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from device_runner.fleet.network.home import flower_home, log_to
from device_runner.fleet.network.keys import DeviceKeys
from prge.errors import DeviceError, PrgeError
from prge.files.run_folder import run_lock
from prge.host.atomic import write_file

_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_LOOK = 3.0
_SECONDS_TO_PULL = 60.0
_MOST_SECONDS_TO_RETRY = 20
_RECORD, _CONTENT = "fleet", "content"


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
    with run_lock(home), _node(home, server, keys) as node:
        while True:
            said = _patiently(node.client.PullMessages, PullMessagesRequest(node=node.node))
            if not said.messages_list:
                time.sleep(_SECONDS_TO_LOOK)
                continue
            try:
                tell(node.answer(said, answer))
            except Exception as error:  # whatever the server did meanwhile, it asks again
                tell(f"a task or its answer is lost: {error}")


@dataclass(frozen=True)
class _Node:
    """A device's place on the server."""

    client: FleetHttpClient
    node: Node

    def answer(self, said: PullMessagesResponse, answer: Callable[[bytes], bytes]) -> str:
        """Answer the task that came; a line about it, for what `answer` raises may name rows."""
        (told,), (tree,) = said.messages_list, said.message_object_trees
        run, then = told.metadata.run_id, time.monotonic()
        task = _patiently(self._pull, tree, run)
        try:
            reply = Message(packed(answer(unpacked(task))), reply_to=task)
            outcome = f"answered in {time.monotonic() - then:.1f} s"
        except Exception as error:
            name = type(error).__name__
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, name), reply_to=task)
            outcome = f"failed: {name}: {error}"
        reply.metadata.__dict__["_message_id"] = reply.object_id
        _patiently(self._push, reply, run)
        return f"round {task.metadata.group_id[:9]}: {outcome}"

    def _pull(self, tree: ObjectTree, run: int) -> Message:
        task = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(self.client.PullObject, self.node, run),
            make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, self.node, run),
            return_type=Message,
            max_time=_SECONDS_TO_PULL,
        )
        task.metadata.__dict__["_message_id"] = tree.object_id
        return task

    def _push(self, reply: Message, run: int) -> None:
        bare = remove_content_from_message(reply) if reply.has_content() else reply
        with no_object_id_recompute():
            asked = self.client.PushMessages(
                PushMessagesRequest(
                    node=self.node,
                    messages_list=[message_to_proto(bare)],
                    message_object_trees=[get_object_tree(reply)],
                )
            )
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(self.client.PushObject, self.node, run, asked.session_id),
                object_ids_to_push=set(asked.objects_to_push),
            )


@contextmanager
def _node(home: Path, server: str, keys: DeviceKeys | None) -> Iterator[_Node]:
    """Be there for a server until the block ends; raises DeviceError where it lets this device in no more."""
    private, public = generate_key_pairs() if keys is None else (keys.key, keys.key.public_key())
    name = public_key_to_bytes(public)
    client = FleetHttpClient.from_server_address(
        server,
        keys is None,
        None if keys is None else str(keys.authority),
        [RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(private, public)],
    )
    path = home / "node"
    with client:
        try:
            if keys is None:
                client.RegisterNode(RegisterNodeFleetRequest(public_key=name))
            elif path.is_file():
                _leave(client, int(path.read_bytes()))  # one that was killed said no goodbye
            begun = client.ActivateNode(
                ActivateNodeRequest(public_key=name, heartbeat_interval=HEARTBEAT_SECONDS)
            )
            write_file(path, str(begun.node_id).encode())
            node = _Node(client, Node(node_id=begun.node_id))
            heartbeat = HeartbeatSender(lambda: _beat(node))
            heartbeat.start()
            try:
                yield node
            finally:
                heartbeat.stop()
                _leave(client, begun.node_id)
        except httpx.HTTPStatusError as error:
            raise DeviceError(
                f"{server} doesn't let this device in, it answers {error.response.status_code}",
                remedy="its NAME.pub must lie in devices/ of the server's keys when the server starts; where "
                "its key was used from another folder, wait a minute",
            ) from None
        except httpx.TransportError as error:
            raise DeviceError(f"the connection to {server} has ended: {error}") from None


def _patiently(call: Callable[..., Any], *arguments: object) -> Any:
    """Call a server again and again while it is away, unless another one has taken its place."""

    def gives_up(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError):
            return error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE
        return "certificate" in str(error).lower()

    retries = (lambda: exponential(max_delay=_MOST_SECONDS_TO_RETRY), httpx.HTTPError, None, None)
    return RetryInvoker(*retries, should_giveup=gives_up).invoke(call, *arguments)


def _beat(node: _Node) -> bool:
    """Tell the server that the device is there; what it says to that, the next look for a task hears too."""
    with suppress(httpx.HTTPError):
        node.client.SendNodeHeartbeat(
            SendNodeHeartbeatRequest(node=node.node, heartbeat_interval=HEARTBEAT_SECONDS)
        )
    return True


def _leave(client: FleetHttpClient, node_id: int) -> None:
    with suppress(httpx.HTTPError):
        client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))


def check_server(server: str, keys: DeviceKeys | None) -> None:
    """Look for the server once, so that what is wrong has a name.

    Raises:
        PrgeError: the authority's file can't be used.
        DeviceError: nobody is there, or another one.
    """
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


def packed(content: bytes) -> RecordDict:
    """Bytes as the content of Flower's messages."""
    return RecordDict({_RECORD: ConfigRecord({_CONTENT: content})})


def unpacked(message: Message) -> bytes:
    """Inverse of `packed`; no bytes where the message has none of ours."""
    record = message.content.get(_RECORD) if message.has_content() else None
    content = record.get(_CONTENT) if isinstance(record, ConfigRecord) else None
    return content if isinstance(content, bytes) else b""
