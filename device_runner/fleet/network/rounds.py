"""A fleet's rounds over the network: tasks of a coordinator go out, answers come in until time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from device_runner.fleet.coordinator import Coordinator
from device_runner.fleet.network.post import Post

POLL_SECONDS = 0.5


def run_rounds(
    post: Post, coordinator: Coordinator, devices: int, tell: Callable[[str], None] = print
) -> None:
    """Take a fleet's rounds, from the coordinator's next on to its last.

    Args:
        post: carries messages to the devices.
        coordinator: the fleet's.
        devices: the first of these rounds waits until so many are there.
        tell: takes a line about each round.
    """
    _await_devices(post, devices, tell)
    while not coordinator.finished:
        _await_devices(post, 1, tell)
        tasks = coordinator.tasks(post.nodes())
        seconds = coordinator.flags.seconds
        answers = _round(post, coordinator.round, tasks, seconds, tell) if tasks else {}
        tell(str(coordinator.receive(answers)))


def _await_devices(post: Post, devices: int, tell: Callable[[str], None]) -> None:
    told = -1
    while (there := len(post.nodes())) < devices:
        if there != told:
            tell(f"{there} of {devices} devices are there")
            told = there
        time.sleep(POLL_SECONDS)


def _round(
    post: Post, number: int, tasks: Mapping[int, bytes], seconds: float, tell: Callable[[str], None]
) -> dict[int, bytes]:
    """Send tasks; the answers that come in time, by node."""
    deadline = time.monotonic() + seconds
    post.begin(number)
    waiting = {sent.node for sent in post.send(tasks, number, seconds)}
    answers: dict[int, bytes] = {}
    while True:
        # A round that nobody answered is asked for again: an answer to the first asking is one.
        for reply in post.replies():
            node = reply.sent.node
            waiting.discard(node)
            if reply.content is None:
                tell(f"device {node} fails: {reply.problem}")
            else:
                answers[node] = reply.content
        if not waiting or time.monotonic() >= deadline:
            return answers
        time.sleep(POLL_SECONDS)
