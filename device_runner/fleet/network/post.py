"""Tasks to devices and their answers, by Flower's store within this process.

Flower's Grid asks its own server over HTTP and believes a message about what it answers. Here the store's
record says which task an answer is to, what a device's message holds can't raise, and what isn't of the
present round is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from device_runner.fleet.network.flower import Answer, FleetState, Push, Receipt
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
    """The messages of a run of Flower's; `allows` is for Flower's web application, in another thread."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._number = -1
        self._out: dict[str, Sent] = {}
        self._begun: dict[str, Answer] = {}

    def nodes(self) -> list[int]:
        """Devices that are there."""
        return self._state.nodes()

    def begin(self, number: int) -> None:
        """Keep nothing of other rounds than `number`."""
        if number != self._number:
            self._number, self._out = number, {}
            self._begun.clear()
            self._state.clean()

    def send(self, tasks: Mapping[int, bytes], number: int, seconds: float) -> list[Sent]:
        """Send tasks of a round to devices' nodes; those that are on their way.

        Raises:
            RunError: Flower has given the run up, as it does when this machine sleeps for a minute.
        """
        if not self._state.is_running():
            raise RunError(
                "Flower has given the run up, as it does when this machine sleeps",
                remedy="go on with it: prge fleet serve --resume FOLDER",
                code="flower-stopped",
            )
        out = [Sent(node, number) for node in tasks]
        return [sent for sent in out if self._send(sent, tasks[sent.node], seconds + _LATE_SECONDS)]

    def _send(self, sent: Sent, task: bytes, seconds: float) -> bool:
        """Send a task, which counts as sent before a device can ask for it; False if the device is gone."""
        names: list[str] = []

        def expect(name: str) -> None:
            names.append(name)
            self._out[name] = sent

        if self._state.send(task, sent.node, str(sent.round + 1), seconds, expect):
            return True
        for name in names:
            del self._out[name]
        return False

    def replies(self) -> Iterator[Reply]:
        """What has come since it was last asked for."""
        for answer in self._come(set(self._out) - set(self._begun)):
            self._begun[answer.task] = answer
        for name, answer in list(self._begun.items()):
            failed = answer.problem is not None
            content = None if failed else self._state.content(answer.name)
            if failed or content is not None:
                del self._begun[name]
                self._state.delete([name])
                yield Reply(self._out.pop(name), content, shown(answer.problem or ""))

    def _come(self, names: set[str]) -> list[Answer]:
        """Flower's records of answers; one that it fails over is deleted, for it would fail again."""
        try:
            return self._state.answers(names) if names else []
        except (LookupError, TypeError, ValueError):
            if len(names) > 1:
                return [answer for name in names for answer in self._come({name})]
            self._state.delete(names)
            return []

    def allows(self, change: Receipt | Push) -> bool:
        """Whether a device may make this change: it may only answer its own tasks, each once."""
        sent = self._out.get(change.task)
        if sent is None:
            return False
        if isinstance(change, Receipt):
            return sent.node == change.node
        sent.tries += sent.node == change.node
        return (
            sent.node == change.source == change.node
            and sent.tries <= _MOST_TRIES
            and change.is_sound
            and change.objects <= _MOST_OBJECTS
        )
