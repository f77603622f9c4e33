"""Everything that fleets use of Flower, written for Flower 1.41.0; no other file imports Flower.

The records and messages of `flwr.app` are public. The rest has no public API: Flower's public ways to connect
a server and its devices are commands. `flower-superlink` lets anyone who reaches its port start apps, and
`flower-supernode` runs the app that a server sends. The private parts are needed

- on a device, to use the Fleet API without an app: the HTTP client with its version and signature headers,
  the protobuf messages, and the object trees in which messages travel;
- on the server, to keep nodes, one run and its messages in Flower's database: the link state, its object
  store, and the identity of the sending task;
- on the server, to answer devices: the routes of the Fleet API with the middleware that they rely on;
- before a body is read: the names of the signed headers, and how a key is encoded and verified.

`tests/device_runner/fleet/network/test_flower.py` lists each of them with its signature. Imports of a
database are inside the functions that need them, because a phone has none.
"""

from __future__ import annotations

import datetime
import math
import threading
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import FastAPI
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL as HEARTBEAT_SECONDS
from flwr.common.constant import (
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    ErrorCode,
    Status,
    SubStatus,
)
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    NOOP_FEDERATION_ID,
    TaskType,
)
from flwr.supercore.error import ApiErrorCode, FlowerError, http_error_translator
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes, verify_signature
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES, ProtobufTranslationMiddleware
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from prge.errors import RunError

if TYPE_CHECKING:
    from flwr.server.superlink.linkstate import LinkState

VERSION = "1.41.0"
LOGGER = FLOWER_LOGGER
_FLEET = "/v1/fleet/"
FLEET_PATHS = frozenset(path for _, path in PROTOBUF_REQUEST_TYPES if path.startswith(_FLEET))
PUSH_OBJECT, _ACTIVATE = f"{_FLEET}push-object", f"{_FLEET}activate-node"
_RECORD, _CONTENT = "fleet", "content"
_SECONDS_TO_PULL = 60.0


@contextmanager
def call_repeatedly(call: Callable[[], object], seconds: float = HEARTBEAT_SECONDS * 2 / 3) -> Iterator[None]:
    """Call a function now and every `seconds` in another thread, until the block ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            call()
            ended.wait(seconds)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def encode_content(content: bytes) -> RecordDict:
    """Encode bytes as the content of a message."""
    return RecordDict({_RECORD: ConfigRecord({_CONTENT: content})})


def decode_content(message: Message) -> bytes:
    """Return the bytes of a message's content; empty if `encode_content` did not write it."""
    record = message.content.get(_RECORD) if message.has_content() else None
    content = record.get(_CONTENT) if isinstance(record, ConfigRecord) else None
    return content if isinstance(content, bytes) else b""


def _identify(message: Message, name: str) -> Message:
    """Set a message's id to the hash of its objects, as Flower does for messages that it sends."""
    message.metadata.__dict__["_message_id"] = name
    return message


def _without_content(message: Message) -> Message:
    return remove_content_from_message(message) if message.has_content() else message


@dataclass(frozen=True)
class TaskOffer:
    """A task that waits at the server: its run, and the object tree of its message."""

    run: int
    tree: ObjectTree


@dataclass(frozen=True)
class FlowerTask:
    """A task from a server.

    Attributes:
        content: bytes of the task.
        round: the server's number of the round.
        message: the message that carried the task.
    """

    content: bytes
    round: str
    message: Message

    def answer(self, content: bytes) -> Message:
        """Return the message with a reply."""
        return self._reply(encode_content(content))

    def failure(self, reason: str) -> Message:
        """Return a message that reports the failure of the task."""
        return self._reply(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason))

    def _reply(self, content: RecordDict | Error) -> Message:
        reply = Message(content, reply_to=self.message)
        return _identify(reply, reply.object_id)


class FleetClient:
    """A device's connection to a server's Fleet API.

    All methods raise httpx.HTTPStatusError if the server refuses, and httpx.TransportError if it is away.

    Args:
        server: HOST:PORT.
        authority: certificate that signed the server's; None: no encryption.
        key: the key that identifies the device to the server.
    """

    def __init__(self, server: str, authority: Path | None, key: ec.EllipticCurvePrivateKey) -> None:
        public = key.public_key()
        self._client = FleetHttpClient.from_server_address(
            server,
            authority is None,
            None if authority is None else str(authority),
            [RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(key, public)],
        )
        self._public, self._node = public_key_to_bytes(public), Node()

    def __enter__(self) -> FleetClient:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def register(self) -> None:
        """Register the key with a server that admits everyone."""
        self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public))

    def activate(self) -> int:
        """Become available for tasks; return the number of the device's node."""
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_SECONDS)
        self._node = Node(node_id=self._client.ActivateNode(request).node_id)
        return self._node.node_id

    def deactivate(self, node: int) -> None:
        """Become unavailable."""
        self._client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    def send_heartbeat(self) -> None:
        """Send a heartbeat."""
        self._client.SendNodeHeartbeat(
            SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_SECONDS)
        )

    def poll(self) -> TaskOffer | None:
        """Return the next task that waits for this device, or None."""
        response = self._client.PullMessages(PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        (message,), (tree,) = response.messages_list, response.message_object_trees
        return TaskOffer(message.metadata.run_id, tree)

    def fetch(self, offer: TaskOffer) -> FlowerTask:
        """Download a task."""
        message = pull_and_inflate_object_from_tree(
            offer.tree,
            make_pull_object_fn_protobuf(self._client.PullObject, self._node, offer.run),
            make_confirm_message_received_fn_protobuf(
                self._client.ConfirmMessageReceived, self._node, offer.run
            ),
            return_type=Message,
            max_time=_SECONDS_TO_PULL,
        )
        _identify(message, offer.tree.object_id)
        return FlowerTask(decode_content(message), message.metadata.group_id, message)

    def send(self, reply: Message) -> None:
        """Send the reply to a task."""
        with no_object_id_recompute():
            response = self._client.PushMessages(
                PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(_without_content(reply))],
                    message_object_trees=[get_object_tree(reply)],
                )
            )
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(
                    self._client.PushObject, self._node, reply.metadata.run_id, response.session_id
                ),
                object_ids_to_push=set(response.objects_to_push),
            )


@dataclass(frozen=True)
class FlowerReply:
    """A reply in Flower's database.

    Attributes:
        name: id of the reply.
        task: id of the task.
        problem: why the device has no result; None if it has one.
    """

    name: str
    task: str
    problem: str | None


class FleetState:
    """A server's nodes, run and messages, in Flower's database.

    Args:
        database: file; created if there is none.
    """

    def __init__(self, database: Path) -> None:
        from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories

        _, self.factory = get_objectstore_linkstate_factories(str(database), get_federation_manager())
        self._state: LinkState = self.factory.state()
        self._run = 0

    def register(self, keys: Mapping[str, ec.EllipticCurvePublicKey]) -> None:
        """Admit the devices with these keys, by name, and no others."""
        wanted = {public_key_to_bytes(key): name for name, key in keys.items()}
        for node in self._state.get_node_info():
            if wanted.pop(node.public_key, None) is None:
                self._state.delete_node(NOOP_FLWR_AID, node.node_id)
        for key, name in wanted.items():
            self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_SECONDS, name=name)

    def names(self) -> dict[int, str]:
        """Return the names of registered devices, by node id."""
        return {node.node_id: node.name for node in self._state.get_node_info() if node.name}

    def nodes(self) -> list[int]:
        """Return the nodes of available devices."""
        return list(self._state.get_nodes(self._run))

    def delete_runs(self) -> None:
        """Delete the runs of earlier servers with their messages."""
        for run in self._state.get_run_info():
            if run.status.status != Status.FINISHED:
                self._state.stop_run(run.run_id)
            self._state.cleanup_run(run.run_id)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep a run without an app alive until the block ends; raises RunError if it can't be started."""
        state = self._state
        state.federation_manager.ensure_default_federations_exist(flwr_aid=NOOP_FLWR_AID)
        self._run = state.create_run(
            fab_id=None,
            fab_version=None,
            fab_hash=None,
            override_config={},
            federation_id=NOOP_FEDERATION_ID,
            federation_config=None,
            flwr_aid=NOOP_FLWR_AID,
            primary_task_type=TaskType.SERVER_APP,
        )
        (task,) = state.get_tasks(run_ids=[self._run])
        if state.claim_task(task.task_id) is None or not state.activate_task(task.task_id):
            raise RunError("Flower did not start the run.", code="flower-not-started")
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, self._run
        TaskIdentity.node_id = state.get_node_id()
        with call_repeatedly(lambda: state.acknowledge_task_heartbeat(task.task_id)):
            try:
                yield
            finally:
                state.finish_task(task.task_id, SubStatus.COMPLETED, "")

    def is_running(self) -> bool:
        """Return whether Flower considers the run alive; this ends after a minute without messages."""
        (run,) = self._state.get_run_info(run_ids=[self._run])
        return bool(run.status.status == Status.RUNNING)

    def clean(self) -> None:
        """Delete the run's messages."""
        self._state.cleanup_run(self._run)

    def send(
        self, content: bytes, node: int, group: str, seconds: float, before: Callable[[str], object]
    ) -> str | None:
        """Send a task.

        Args:
            content: the content of the task.
            node: the node of the device.
            group: a number that the device sees as the round.
            seconds: until the task expires.
            before: called with the task's id before the device can receive it, because a reply may come at
                once.

        Returns:
            The task's id; None if the node is no longer there.
        """
        message = Message(
            encode_content(content),
            dst_node_id=node,
            message_type=MessageType.TRAIN,
            group_id=group,
            ttl=seconds,
        )
        with no_object_id_recompute():
            name = message.object_id
            _identify(message, name)
            objects, tree = get_all_nested_objects(message), get_object_tree(message)
            session = self._state.start_session(self._run)
            before(name)
            stored, missing = self._state.store_message_and_object_tree(
                _without_content(message), tree, session
            )
            if not stored:
                return None
            for each in missing:
                self._state.store_object(self._run, session, each, objects[each].deflate())
        return name

    def answers(self, tasks: Iterable[str]) -> list[FlowerReply]:
        """Return the replies to these tasks, complete or not.

        Raises:
            LookupError, TypeError, ValueError: Flower can't read one of them.
        """
        return [
            FlowerReply(
                message.metadata.message_id,
                message.metadata.reply_to_message_id,
                message.error.reason if message.has_error() else None,
            )
            for message in self._state.get_message_res(set(tasks), self._run)
        ]

    def delete(self, tasks: Iterable[str]) -> None:
        """Delete tasks with their replies."""
        self._state.delete_messages(set(tasks))

    def content(self, answer: str) -> bytes | None:
        """Take a reply's bytes from the store.

        Returns:
            The bytes; empty if `encode_content` did not write them, None if they have not all arrived.
        """
        from flwr.supercore.object_store import NoObjectInStoreError

        store = self._state.object_store
        try:
            names = [tree.object_id for tree in iterate_object_tree(store.get_object_tree(answer))]
        except NoObjectInStoreError:
            return None
        contents = {each: store.get(each) or b"" for each in names}
        if not all(contents.values()):
            return None
        store.delete(answer)
        try:
            message = inflate_object_from_contents(answer, contents)
            return decode_content(message) if isinstance(message, Message) else b""
        except Exception:  # malformed objects can raise any of Flower's errors
            return b""


@dataclass(frozen=True)
class Receipt:
    """A device's confirmation that it has received a task."""

    node: int
    task: str


@dataclass(frozen=True)
class Push:
    """A device's request to begin a reply.

    Args:
        node: the node of the device, according to the request.
        source: the node of the device, according to the message.
        task: the task that the message answers; empty if the request does not have exactly one message.
        objects: number of the message's objects.
        is_sound: whether Flower can store the message.
    """

    node: int
    source: int
    task: str
    objects: int
    is_sound: bool


def _describe(request: object) -> Receipt | Push | None:
    """Return how a request to the Fleet API would change messages, or None."""
    match request:
        case ConfirmMessageReceivedRequest():
            return Receipt(request.node.node_id, request.message_object_id)
        case PushMessagesRequest():
            node = request.node.node_id
            if not len(request.messages_list) == len(request.message_object_trees) == 1:
                return Push(node, node, "", 0, is_sound=False)
            message, tree = request.messages_list[0], request.message_object_trees[0]
            del request.clientapp_runtime_list[:]
            metadata = message.metadata
            # Flower's database stores NaN as NULL, and fails on it later.
            is_timed = math.isfinite(metadata.created_at + metadata.ttl)
            return Push(
                node,
                metadata.src_node_id,
                metadata.reply_to_message_id,
                sum(1 for _ in iterate_object_tree(tree)),
                is_timed and metadata.message_id == tree.object_id and not message.content.ListFields(),
            )
    return None


def fleet_application(state: FleetState, has_keys: bool, allows: Callable[[Receipt | Push], bool]) -> FastAPI:
    """Return the Fleet API as a web application, without Flower's other APIs.

    Args:
        state: the state of the server.
        has_keys: whether devices prove who they are, and can't register themselves.
        allows: a function that decides about changes of messages that devices request; called in the web
            server's thread.
    """
    from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
    from flwr.superlink.routers.fleet.router import router

    async def admit(request: Request, call_next: RequestResponseEndpoint) -> Response:
        change = _describe(getattr(request.state, "protobuf_request", None))
        if change is None or allows(change):
            return await call_next(request)
        # A SuperNode takes this as the end of the run, drops the reply and continues.
        return JSONResponse({"detail": "not a task of this node's"}, 403)

    application = FastAPI(
        openapi_url=None,
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
            Middleware(BaseHTTPMiddleware, dispatch=admit),
        ],
    )
    application.state.linkstate_factory = state.factory
    application.state.enable_supernode_auth = has_keys
    application.include_router(router)
    return application


def encode_keys(keys: Iterable[ec.EllipticCurvePublicKey]) -> frozenset[bytes]:
    """Encode public keys as requests name them."""
    return frozenset(map(public_key_to_bytes, keys))


def authenticated_key(headers: Mapping[str, str], known: Collection[bytes] | None) -> bytes | None:
    """Return the public key that signed a request's head, as `encode_keys` encodes it.

    Args:
        headers: the headers of the request.
        known: admitted keys; None: any key, and no signature is needed.

    Returns:
        The key; None if there is no valid signature of the last minutes.
    """
    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        if known is None:
            return key
        signed = headers[TIMESTAMP_HEADER]
        now = datetime.datetime.now(datetime.timezone.utc)
        age = (now - datetime.datetime.fromisoformat(signed)).total_seconds()
        if key not in known or not (
            -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        ):
            return None
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        return key if verify_signature(bytes_to_public_key(key), signed.encode(), signature) else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def refusal(path: str) -> Response:
    """Return Flower's response to a device without a known key."""
    if path != _ACTIVATE:
        return Response(status_code=401)
    code = ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
    spec = API_ERROR_MAP[code]
    return JSONResponse(FlowerError(code, "unknown key").to_json(spec.public_message), spec.http_status_code)
