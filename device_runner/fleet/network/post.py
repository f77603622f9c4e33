"""Sends tasks to devices and collects their replies, through Flower's store within this process.

Flower's Grid polls its own server over HTTP, and believes what a message says about the task that it answers.
Here the store's records say which task a reply belongs to, the content of a device's message can't raise
errors, and messages of other rounds are deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from device_runner.fleet.network.flower import FleetState, FlowerReply, Push, Receipt
from prge.errors import RunError, format_value

# For a reply that is being computed when its round ends: it still counts if the round is asked for again.
_LATE_SECONDS = 600.0
# Objects of a message with its records; retries of Flower after a lost connection.
_MAX_OBJECTS, _MAX_TRIES = 3, 8


@dataclass
class SentTask:
    """A task that was sent.

    Attributes:
        node: the node of the device.
        round: number of the round.
        tries: how often a reply to it was begun.
    """

    node: int
    round: int
    tries: int = 0


@dataclass(frozen=True)
class NetworkReply:
    """The outcome of a task.

    Attributes:
        sent: the task.
        content: the device's bytes; None if the task failed.
        problem: why it failed.
    """

    sent: SentTask
    content: bytes | None
    problem: str = ""


class Mailbox:
    """The messages of one Flower run; `allows` is called by Flower's web application in another thread."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._number = -1
        self._out: dict[str, SentTask] = {}
        self._begun: dict[str, FlowerReply] = {}

    def nodes(self) -> list[int]:
        """Return the nodes of available devices."""
        return self._state.nodes()

    def begin(self, number: int) -> None:
        """Delete the messages of all rounds but `number`."""
        if number != self._number:
            self._number, self._out = number, {}
            self._begun.clear()
            self._state.clean()

    def send(self, tasks: Mapping[int, bytes], number: int, seconds: float) -> list[SentTask]:
        """Send the tasks of a round to devices' nodes, and return those that were sent.

        Raises:
            RunError: Flower has given the run up, as it does if this machine sleeps for a minute.
        """
        if not self._state.is_running():
            raise RunError(
                "Flower has given up the run, as it does when this machine sleeps.",
                remedy="Resume with `prge fleet serve --resume FOLDER`.",
                code="flower-stopped",
            )
        sent_tasks = [SentTask(node, number) for node in tasks]
        return [sent for sent in sent_tasks if self._send(sent, tasks[sent.node], seconds + _LATE_SECONDS)]

    def _send(self, sent: SentTask, task: bytes, seconds: float) -> bool:
        """Send a task, recording it before a device can ask for it; False if the device is gone."""
        names: list[str] = []

        def expect(name: str) -> None:
            names.append(name)
            self._out[name] = sent

        if self._state.send(task, sent.node, str(sent.round + 1), seconds, expect):
            return True
        for name in names:
            del self._out[name]
        return False

    def replies(self) -> Iterator[NetworkReply]:
        """Yield the replies that have arrived since the last call."""
        for reply in self._read_replies(set(self._out) - set(self._begun)):
            self._begun[reply.task] = reply
        for name, reply in list(self._begun.items()):
            failed = reply.problem is not None
            content = None if failed else self._state.content(reply.name)
            if failed or content is not None:
                del self._begun[name]
                self._state.delete([name])
                yield NetworkReply(self._out.pop(name), content, format_value(reply.problem or ""))

    def _read_replies(self, names: set[str]) -> list[FlowerReply]:
        """Read Flower's records of replies; deletes records that Flower fails on, as it would fail again."""
        try:
            return self._state.answers(names) if names else []
        except (LookupError, TypeError, ValueError):
            if len(names) > 1:
                return [reply for name in names for reply in self._read_replies({name})]
            self._state.delete(names)
            return []

    def allows(self, change: Receipt | Push) -> bool:
        """Return whether a device may make a change: it may only answer its own tasks, each once."""
        sent = self._out.get(change.task)
        if sent is None:
            return False
        if isinstance(change, Receipt):
            return sent.node == change.node
        sent.tries += sent.node == change.node
        return (
            sent.node == change.source == change.node
            and sent.tries <= _MAX_TRIES
            and change.is_sound
            and change.objects <= _MAX_OBJECTS
        )
