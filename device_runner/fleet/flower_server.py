"""A fleet's rounds over Flower's Grid: tasks of a coordinator go out, answers come in until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from device_runner.fleet.flower_client import packed, unpacked
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
    late: dict[str, int] = {}
    _await_devices(grid, devices, tell)
    while not coordinator.finished:
        _await_devices(grid, 1, tell)
        tasks = coordinator.tasks(list(grid.get_node_ids()))
        answers = _round(grid, coordinator.round, tasks, seconds, late, tell) if tasks else {}
        tell(str(coordinator.receive(answers)))


def _await_devices(grid: Grid, devices: int, tell: Callable[[str], None]) -> None:
    told = -1
    while (there := len(list(grid.get_node_ids()))) < devices:
        if there != told:
            tell(f"{there} of {devices} devices are there")
            told = there
        time.sleep(POLL_SECONDS)


def _round(
    grid: Grid,
    number: int,
    tasks: Mapping[int, bytes],
    seconds: float,
    late: dict[str, int],
    tell: Callable[[str], None],
) -> dict[int, bytes]:
    """Send tasks; the answers that come in time, by node. `late`: rounds of older messages, by their ids."""
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
    sent = {name: node for name, node in zip(grid.push_messages(messages), tasks, strict=True) if name}
    late.update(dict.fromkeys(sent, number))
    answers: dict[int, bytes] = {}
    waiting = set(sent.values())
    while waiting and time.monotonic() < deadline:
        for reply in grid.pull_messages(list(late)):
            node, of = reply.metadata.src_node_id, late.pop(reply.metadata.reply_to_message_id, -1)
            # A round that nobody answered is asked for again: an answer to the first asking is one.
            if of != number or node in answers:
                tell(f"device {node} answers round {of + 1} in round {number + 1}: too late, dropped")
                continue
            waiting.discard(node)
            if reply.has_error():
                tell(f"device {node} fails in round {number + 1}: {shown(reply.error.reason)}")
            else:
                answers[node] = unpacked(reply)
        time.sleep(POLL_SECONDS if waiting else 0)
    return answers
