"""A device that uses Flower's protocol directly, and can send what no SuperNode sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from flwr.app import ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from device_runner.fleet.network.flower import decode_content, encode_content
from device_runner.fleet.network.keys import DeviceKeys

SUPERLINK = 1


@dataclass(frozen=True)
class PulledTask:
    """A task that was received, with Flower's metadata."""

    content: bytes
    metadata: Metadata


class HostileDevice:
    """A device's connection to a fleet's server."""

    def __init__(self, server: str, keys: Path) -> None:
        own = DeviceKeys.open(keys)
        key = own.key
        self.public = public_key_to_bytes(key.public_key())
        self.client = FleetHttpClient.from_server_address(
            server,
            False,
            str(own.authority),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(key, key.public_key()),
            ],
        )
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=1800)
        self.node = Node(node_id=self.client.ActivateNode(request).node_id)

    def __enter__(self) -> HostileDevice:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def leave(self) -> None:
        """Deactivate the node."""
        self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))

    def pull(self) -> PulledTask | None:
        """Return the next task, or None."""
        reply = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not reply.messages_list:
            return None
        metadata = message_from_proto(reply.messages_list[0]).metadata
        (tree,) = reply.message_object_trees
        contents = {
            each.object_id: self.client.PullObject(
                PullObjectRequest(node=self.node, run_id=metadata.run_id, object_id=each.object_id)
            ).object_content
            for each in iterate_object_tree(tree)
        }
        if not all(contents.values()):  # the round has ended meanwhile
            return None
        message = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(message, Message)
        self.client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.node, run_id=metadata.run_id, message_object_id=tree.object_id
            )
        )
        return PulledTask(decode_content(message), metadata)

    def reply(self, task: PulledTask, content: bytes | RecordDict | Error, **changes: Any) -> Message:
        """Return the message of a reply; `changes` overrides its metadata."""
        fields: dict[str, Any] = {
            "run_id": task.metadata.run_id,
            "message_id": "",
            "src_node_id": self.node.node_id,
            "dst_node_id": SUPERLINK,
            "reply_to_message_id": task.metadata.message_id,
            "group_id": task.metadata.group_id,
            "created_at": now().timestamp(),
            "ttl": 60.0,
            "message_type": "train",
        }
        metadata = Metadata(**{**fields, **changes})
        if isinstance(content, Error):
            message = make_message(metadata=metadata, error=content)
        else:
            records = encode_content(content) if isinstance(content, bytes) else content
            message = make_message(metadata=metadata, content=records)
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def push(
        self,
        message: Message,
        *,
        objects: dict[str, bytes] | None = None,
        tree: ObjectTree | None = None,
        node: Node | None = None,
        change: Callable[[Message], Message] = lambda message: message,
    ) -> None:
        """Send a message; `change` changes the message without its objects.

        Raises:
            httpx.HTTPStatusError: the server refuses.
        """
        objects = objects or {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
        tree = tree or get_object_tree(message)
        bare = remove_content_from_message(message) if message.has_content() else message
        bare.metadata.__dict__["_message_id"] = tree.object_id
        response = self.client.PushMessages(
            PushMessagesRequest(
                node=node or self.node,
                messages_list=[message_to_proto(change(bare))],
                message_object_trees=[tree],
                clientapp_runtime_list=[0.1],
            )
        )
        for name in response.objects_to_push:
            self.client.PushObject(
                PushObjectRequest(
                    node=self.node,
                    run_id=message.metadata.run_id,
                    session_id=response.session_id,
                    object_id=name,
                    object_content=objects.get(name, b""),
                )
            )

    def push_objects(self, task: PulledTask, contents: Sequence[bytes]) -> None:
        """Reply with raw objects, the message first, each the child of the previous one."""
        names = [get_object_id(content) for content in contents]
        tree = ObjectTree(object_id=names[-1])
        for name in reversed(names[:-1]):
            tree = ObjectTree(object_id=name, children=[tree])
        message = self.reply(task, b"")
        self.push(message, objects=dict(zip(names, contents, strict=True)), tree=tree)


def object_of(object_type: str, body: bytes, children: Sequence[bytes] = ()) -> bytes:
    """Encode an object as Flower does: its type, the hashes of its children, its length, and its body."""
    names = ",".join(get_object_id(child) for child in children)
    return f"{object_type} {names} {len(body)}".encode() + b"\0" + body


def garbage(object_type: str = "ConfigRecord", body: bytes = b"\xff" * 40) -> list[bytes]:
    """Return the objects of a message whose innermost object is invalid protobuf."""
    record = object_of(object_type, body)
    records = RecordDict({"fleet": ConfigRecord({"content": b""})}).deflate().partition(b"\0")[2]
    middle = object_of("RecordDict", records, [record])
    return [object_of("Message", b"\xfe" * 30, [middle]), middle, record]
