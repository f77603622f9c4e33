"""Tasks to devices and their answers, by Flower's store within this process.

Flower's Grid asks its own server over HTTP and believes a message about what it answers. Here the store's
record says which task an answer is to, what a device's message holds can't raise, and what isn't of the
present round is deleted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import Status
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import NoObjectInStoreError
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from device_runner.fleet.network.client import packed, unpacked
from prge.errors import RunError, shown

# For an answer that is made when its round ends, and may be asked for again.
_LATE_SECONDS = 600.0
# A message with its records; Flower tries again where a connection breaks.
_MOST_OBJECTS, _MOST_TRIES = 3, 8


@dataclass
class Sent:
    """A task on its way: to which node, in which round, and how often an answer to it was begun."""

    node: int
    round: int
    tries: int = 0


@dataclass(frozen=True)
class Reply:
    """What came of a task: the device's bytes, or why there are none."""

    sent: Sent
    content: bytes | None
    problem: str = ""


class Post:
    """The messages of a run of Flower's; `admit` is for Flower's web application, in another thread."""

    def __init__(self, state: LinkState) -> None:
        self._state = state
        self.run_id, self._number = 0, -1
        self._out: dict[str, Sent] = {}
        self._begun: dict[str, Message] = {}

    def nodes(self) -> list[int]:
        """Devices that are there."""
        return list(self._state.get_nodes(self.run_id))

    def begin(self, number: int) -> None:
        """Keep nothing of other rounds than `number`."""
        if number != self._number:
            self._number, self._out = number, {}
            self._begun.clear()
            self._state.cleanup_run(self.run_id)

    def send(self, tasks: Mapping[int, bytes], number: int, seconds: float) -> list[Sent]:
        """Send tasks of a round to devices' nodes; those that are on their way.

        Raises:
            RunError: Flower has given the run up, as it does when this machine sleeps for a minute.
        """
        (run,) = self._state.get_run_info(run_ids=[self.run_id])
        if run.status.status != Status.RUNNING:
            raise RunError(
                "Flower has given the run up, as it does when this machine sleeps",
                remedy="go on with it: prge fleet serve --resume FOLDER",
            )
        return [
            sent
            for node, task in tasks.items()
            if (sent := self._send(Sent(node, number), task, seconds + _LATE_SECONDS)) is not None
        ]

    def _send(self, sent: Sent, task: bytes, seconds: float) -> Sent | None:
        message = Message(
            packed(task),
            dst_node_id=sent.node,
            message_type="train",
            group_id=str(sent.round + 1),
            ttl=seconds,
        )
        with no_object_id_recompute():
            name = message.object_id
            message.metadata.__dict__["_message_id"] = name
            objects, tree = get_all_nested_objects(message), get_object_tree(message)
            session = self._state.start_session(self.run_id)
            # Before a device can ask for it: its answer may come at once.
            self._out[name] = sent
            empty = remove_content_from_message(message)
            stored, missing = self._state.store_message_and_object_tree(empty, tree, session)
            if not stored:
                return self._out.pop(name) and None
            for name in missing:
                self._state.store_object(self.run_id, session, name, objects[name].deflate())
        return sent

    def replies(self) -> Iterator[Reply]:
        """What has come since it was last asked for."""
        for message in self._come(set(self._out) - set(self._begun)):
            self._begun[message.metadata.reply_to_message_id] = message
        for name, message in list(self._begun.items()):
            failed = message.has_error()
            content = None if failed else self._content(message.metadata.message_id)
            if failed or content is not None:
                del self._begun[name]
                self._state.delete_messages({name})
                yield Reply(self._out.pop(name), content, shown(message.error.reason) if failed else "")

    def _come(self, names: set[str]) -> list[Message]:
        """Flower's records of answers; one that it fails over is deleted, for it would fail again."""
        try:
            return self._state.get_message_res(set(names), self.run_id) if names else []
        except (LookupError, TypeError, ValueError):
            if len(names) > 1:
                return [message for name in names for message in self._come({name})]
            self._state.delete_messages(names)
            return []

    def _content(self, name: str) -> bytes | None:
        """A device's bytes; none of ours are b"", and None is for those that are still coming."""
        store = self._state.object_store
        try:
            names = [tree.object_id for tree in iterate_object_tree(store.get_object_tree(name))]
        except NoObjectInStoreError:
            return None
        contents = {each: store.get(each) or b"" for each in names}
        if not all(contents.values()):
            return None
        store.delete(name)
        try:
            message = inflate_object_from_contents(name, contents)
            return unpacked(message) if isinstance(message, Message) else b""
        except Exception:  # a stranger to every rule of Flower's raises any of its errors
            return b""

    async def admit(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Starlette middleware: devices may only answer their own tasks, each once."""
        if self._is_in_order(getattr(request.state, "protobuf_request", None)):
            return await call_next(request)
        # To a SuperNode this says that the run is over: it drops the answer and goes on.
        return JSONResponse({"detail": "not a task of this node's"}, 403)

    def _is_in_order(self, asked: object) -> bool:
        match asked:
            case ConfirmMessageReceivedRequest():
                sent = self._out.get(asked.message_object_id)
                return sent is not None and sent.node == asked.node.node_id
            case PushMessagesRequest():
                return self._is_an_answer(asked)
        return True

    def _is_an_answer(self, asked: PushMessagesRequest) -> bool:
        if not len(asked.messages_list) == len(asked.message_object_trees) == 1:
            return False
        message, tree, node = asked.messages_list[0], asked.message_object_trees[0], asked.node.node_id
        said = message.metadata
        sent = self._out.get(said.reply_to_message_id)
        if sent is None:
            return False
        sent.tries += sent.node == node
        del asked.clientapp_runtime_list[:]
        return (
            sent.node == said.src_node_id == node
            and sent.tries <= _MOST_TRIES
            and said.message_id == tree.object_id
            # Flower's database keeps what is no number as nothing, and fails over it later.
            and math.isfinite(said.created_at + said.ttl)
            and not message.content.ListFields()
            and _count(tree) <= _MOST_OBJECTS
        )


def _count(tree: ObjectTree) -> int:
    return sum(1 for _ in iterate_object_tree(tree))
