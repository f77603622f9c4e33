"""The fleet's server as a Flower ServerApp: rounds of messages over a Grid, for a coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from device_runner.fleet.flower_client import ANSWER, TASK, Fields, fields_of
from prge.errors import shown

POLL_SECONDS = 0.5
# For an answer that is made when its round ends: a late one is worth a line.
_LATE_SECONDS = 600.0


class Rounds(Protocol):
    """What chooses devices and combines answers; see `coordinator.Coordinator`."""

    finished: bool
    round: int

    def tasks(self, nodes: Sequence[int]) -> Mapping[int, Fields]:
        """Tasks of the round's devices among those there."""

    def receive(self, answers: Mapping[int, Fields]) -> object:
        """Take a round's answers; its text tells of the round."""


def server_app(
    coordinator: Rounds, devices: int, seconds: float, tell: Callable[[str], None] = print
) -> ServerApp:
    """The app that takes a fleet's rounds from the coordinator's on to its last.

    Args:
        coordinator: the fleet's.
        devices: a round waits until so many are there.
        seconds: a round waits so long for its answers.
        tell: takes a line about each round.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        late: dict[str, int] = {}
        while not coordinator.finished:
            _await_devices(grid, devices, tell)
            tasks = coordinator.tasks(list(grid.get_node_ids()))
            if tasks:
                answers = _round(grid, coordinator.round, tasks, seconds, late, tell)
                tell(str(coordinator.receive(answers)))
            else:
                time.sleep(POLL_SECONDS)

    return app


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
    tasks: Mapping[int, Fields],
    seconds: float,
    late: dict[str, int],
    tell: Callable[[str], None],
) -> dict[int, Fields]:
    """Send tasks; the answers that come in time, by node. `late`: rounds of older messages, by their ids."""
    deadline = time.monotonic() + seconds
    messages = [
        Message(
            RecordDict({TASK: ConfigRecord(dict(fields))}),
            dst_node_id=node,
            message_type="train",
            group_id=str(number),
            ttl=seconds + _LATE_SECONDS,
        )
        for node, fields in tasks.items()
    ]
    waiting = {sent for sent in grid.push_messages(messages) if sent}
    answers: dict[int, Fields] = {}
    while waiting and time.monotonic() < deadline:
        for reply in grid.pull_messages([*waiting, *late]):
            sent, node = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
            if sent in late:
                tell(f"device {node} answers round {late.pop(sent)} in round {number}: too late, dropped")
            elif reply.has_error():
                waiting.discard(sent)
                tell(f"device {node} fails in round {number}: {shown(reply.error.reason)}")
            else:
                waiting.discard(sent)
                answers[node] = fields_of(reply, ANSWER)
        time.sleep(POLL_SECONDS if waiting else 0)
    late.update(dict.fromkeys(waiting, number))
    return answers
