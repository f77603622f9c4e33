"""A fleet's rounds over Flower's Grid: tasks of a coordinator go out, answers come in until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from device_runner.fleet.network.client import packed, unpacked
from prge.errors import shown

POLL_SECONDS = 0.5
# For an answer that is made when its round ends: a late one is worth a line.
_LATE_SECONDS = 600.0


class Rounds(Protocol):
    """What chooses devices and combines answers; see `coordinator.Coordinator`."""

    @property
    def finished(self) -> bool:
        """Whether all rounds are over."""

    @property
    def round(self) -> int:
        """Rounds that are over."""

    def tasks(self, nodes: Sequence[int]) -> Mapping[int, bytes]:
        """Tasks of the round's devices among those there."""

    def receive(self, answers: Mapping[int, bytes]) -> object:
        """Take a round's answers; its text tells of the round."""


def take_rounds(
    grid: Grid, coordinator: Rounds, devices: int, seconds: float, tell: Callable[[str], None] = print
) -> None:
    """Take a fleet's rounds, from the coordinator's next on to its last.

    Args:
        grid: sends messages to the devices.
        coordinator: the fleet's.
        devices: the first of these rounds waits until so many are there.
        seconds: a round waits so long for its answers.
        tell: takes a line about each round.
    """
    out: dict[str, _Sent] = {}
    _await_devices(grid, devices, tell)
    while not coordinator.finished:
        _await_devices(grid, 1, tell)
        tasks = coordinator.tasks(list(grid.get_node_ids()))
        answers = _round(grid, coordinator.round, tasks, seconds, out, tell) if tasks else {}
        tell(str(coordinator.receive(answers)))


def _await_devices(grid: Grid, devices: int, tell: Callable[[str], None]) -> None:
    told = -1
    while (there := len(list(grid.get_node_ids()))) < devices:
        if there != told:
            tell(f"{there} of {devices} devices are there")
            told = there
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class _Sent:
    """A message to which no answer has come."""

    node: int
    round: int


def _round(
    grid: Grid,
    number: int,
    tasks: Mapping[int, bytes],
    seconds: float,
    out: dict[str, _Sent],
    tell: Callable[[str], None],
) -> dict[int, bytes]:
    """Send tasks; the answers that come in time, by node. `out`: messages by their ids, older ones too."""
    deadline = time.monotonic() + seconds
    messages = [
        Message(
            packed(task),
            dst_node_id=node,
            message_type="train",
            group_id=str(number + 1),
            ttl=seconds + _LATE_SECONDS,
        )
        for node, task in tasks.items()
    ]
    sent = {
        name: _Sent(node, number)
        for name, node in zip(grid.push_messages(messages), tasks, strict=True)
        if name
    }
    out.update(sent)
    answers: dict[int, bytes] = {}
    waiting = set(sent)
    while waiting and time.monotonic() < deadline:
        for reply in grid.pull_messages(list(out)):
            name = reply.metadata.reply_to_message_id
            message = out.pop(name)
            waiting.discard(name)
            if reply.has_error():
                if name in sent:
                    tell(f"device {message.node} fails: {shown(reply.error.reason)}")
            elif message.round != number:
                tell(f"device {message.node} answers round {message.round + 1}, too late: dropped")
            else:
                # A round that nobody answered is asked for again: an answer to the first asking is one.
                answers[message.node] = unpacked(reply)
                waiting -= {other for other in waiting if sent[other].node == message.node}
        time.sleep(POLL_SECONDS if waiting else 0)
    return answers
