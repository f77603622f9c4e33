"""Rounds of a fleet over the network: sends a coordinator's tasks, and collects replies until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from device_runner.fleet.coordinator import Coordinator
from device_runner.fleet.network.post import Mailbox

POLL_SECONDS = 0.5


def run_rounds(
    mailbox: Mailbox, coordinator: Coordinator, devices: int, log: Callable[[str], None] = print
) -> None:
    """Run a fleet's rounds, from the coordinator's next round to its last.

    Args:
        mailbox: carries messages to the devices.
        coordinator: the coordinator of the fleet.
        devices: number of devices to wait for before the first of these rounds.
        log: called with a line about each round.
    """
    _await_devices(mailbox, devices, log)
    while not coordinator.finished:
        _await_devices(mailbox, 1, log)
        tasks = coordinator.tasks(mailbox.nodes())
        seconds = coordinator.flags.seconds
        replies = _round(mailbox, coordinator.round, tasks, seconds, log) if tasks else {}
        log(str(coordinator.receive(replies)))


def _await_devices(mailbox: Mailbox, devices: int, log: Callable[[str], None]) -> None:
    last_count = -1
    while (count := len(mailbox.nodes())) < devices:
        if count != last_count:
            log(f"{count} of {devices} devices are connected")
            last_count = count
        time.sleep(POLL_SECONDS)


def _round(
    mailbox: Mailbox, number: int, tasks: Mapping[int, bytes], seconds: float, log: Callable[[str], None]
) -> dict[int, bytes]:
    """Send tasks, and return the replies that arrive in time, by node."""
    deadline = time.monotonic() + seconds
    mailbox.begin(number)
    waiting = {sent.node for sent in mailbox.send(tasks, number, seconds)}
    replies: dict[int, bytes] = {}
    while True:
        # A round without enough results is asked for again, and late replies to the first tasks still count.
        for reply in mailbox.replies():
            node = reply.sent.node
            waiting.discard(node)
            if reply.content is None:
                log(f"device {node} failed: {reply.problem}")
            else:
                replies[node] = reply.content
        if not waiting or time.monotonic() >= deadline:
            return replies
        time.sleep(POLL_SECONDS)
