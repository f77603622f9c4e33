"""A process that takes one round of learning, and that another one stops, continues and kills.

    the server                                  its child process
    start    --- the round, by standard input --->
             <---------------- `ready` -----------
    pause         SIGSTOP and SIGCONT                steps, checkpoints, the adapter
    poll     <-- the outcome, by standard output -

The child ends with the server, however that ends. It holds the lock of the server's folder, too: no other
server begins before it has ended.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prge.errors import RunError
from prge.host.memory import PeakMemory
from prge.host.parents import end_with_starter, environment_of_child, python_command

if TYPE_CHECKING:
    from device_runner.serving.rounds import Round

# What is answered waits less for processes of a lower priority, in the moment before these are stopped.
_NICENESS = 5


class RoundProcess:
    """A child process that takes a round; its methods return at once.

    Args:
        round: that is taken.
        lock: file descriptor that the child inherits; None: none.

    Raises:
        OSError: the process can't be had.
    """

    words = ("-m", "device_runner.serving.round_process")

    def __init__(self, round: Round, lock: int | None = None) -> None:
        self._process = subprocess.Popen(
            [*python_command(), *self.words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of_child(),
            pass_fds=() if lock is None else (lock,),
        )
        self._status = Path(f"/proc/{self._process.pid}")
        self._memory = PeakMemory(self._status / "status")
        self._is_paused = False
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError), self._process.stdin as given:  # it has ended: `poll` tells
            pickle.dump(round, given)
        # Before this a stopped child would outlive this process.
        self._process.stdout.readline()

    @property
    def peak_bytes(self) -> int:
        """The most memory that it was seen to take; 0 where the system doesn't tell."""
        return self._memory.peak or 0

    @property
    def cpu_seconds(self) -> float:
        """Processor time that it has taken so far; 0 where the system doesn't tell."""
        try:
            user, system = (self._status / "stat").read_text().rpartition(")")[2].split()[11:13]
        except (OSError, ValueError):
            return 0.0
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def poll(self) -> dict[str, Any] | None:
        """What became of the round, see device_runner.serving.rounds.outcome_of; None while it is taken.

        Raises:
            RunError: the process has ended and doesn't tell.
        """
        self._memory.sample()
        if (code := self._process.poll()) is None:
            return None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            outcome: dict[str, Any] = json.loads(line)
            return outcome
        why = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise RunError(f"the process that learns {why}", code="round-process-ended")

    def pause(self, is_paused: bool) -> None:
        """Let it compute nothing, or go on."""
        if is_paused != self._is_paused:
            self._process.send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)
        self._is_paused = is_paused

    def end(self) -> None:
        """Kill it where it is; what it has written another one goes on with."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def main() -> None:
    """The child: take the round of the standard input."""
    end_with_starter()
    # A group of its own: Ctrl-C is for the server. Where the system doesn't kill a stopped child whose server
    # ended, it sends SIGHUP to the group, for which nobody is left.
    os.setpgid(0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.nice(_NICENESS)
    given = sys.stdin.buffer.read()
    # What libraries print goes to the standard error.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print("ready", file=answer, flush=True)

    from device_runner.serving.rounds import outcome_of
    from device_runner.session.speaking import note

    print(json.dumps(outcome_of(pickle.loads(given), note)), file=answer, flush=True)


if __name__ == "__main__":
    main()
