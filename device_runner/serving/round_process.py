"""A child process that runs one round of learning, which the server can pause, resume and kill.

    the server                                  its child process
    start    --- the round, by standard input --->
             <---------------- `ready` -----------
    pause         SIGSTOP and SIGCONT                steps, checkpoints, the adapter
    poll     <-- the outcome, by standard output -

The child ends with the server, however the server ends. It also inherits the lock of the server's folder, so
that no other server can start before the child has ended.
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
from prge.system.memory import PeakMemory
from prge.system.parents import end_with_starter, environment_of_child, python_command

if TYPE_CHECKING:
    from device_runner.serving.rounds import Round

# Requests wait less for a process of lower priority, in the moment before it is stopped.
_NICENESS = 5


class RoundProcess:
    """A child process that runs a round; all methods return at once.

    Args:
        round: the round to run.
        lock: file descriptor that the child inherits; None: none.

    Raises:
        OSError: the process can't be started.
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
        with (
            suppress(BrokenPipeError),
            self._process.stdin as stdin,
        ):  # the child has ended: `poll` reports it
            pickle.dump(round, stdin)
        # Wait for `ready`: before that, a stopped child would outlive this process.
        self._process.stdout.readline()

    @property
    def peak_bytes(self) -> int:
        """The most memory that the child was seen to use; 0 if the system does not report it."""
        return self._memory.peak or 0

    @property
    def cpu_seconds(self) -> float:
        """Processor time that the child has used so far; 0 if the system does not report it."""
        try:
            user, system = (self._status / "stat").read_text().rpartition(")")[2].split()[11:13]
        except (OSError, ValueError):
            return 0.0
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def poll(self) -> dict[str, Any] | None:
        """Return the round's outcome, see device_runner.serving.rounds.round_outcome; None while it runs.

        Raises:
            RunError: the process has ended without an outcome.
        """
        self._memory.sample()
        if (code := self._process.poll()) is None:
            return None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            outcome: dict[str, Any] = json.loads(line)
            return outcome
        reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise RunError(f"The learning process {reason}.", code="round-process-ended")

    def pause(self, is_paused: bool) -> None:
        """Stop or continue the child's computation."""
        if is_paused != self._is_paused:
            self._process.send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)
        self._is_paused = is_paused

    def end(self) -> None:
        """Kill the child; another one can resume from the files that it has written."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def main() -> None:
    """Run the round from standard input, in the child process."""
    end_with_starter()
    # A process group of its own, because Ctrl-C is for the server. A system that does not kill a stopped
    # child with its server sends SIGHUP to the orphaned group.
    os.setpgid(0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.nice(_NICENESS)
    pickled = sys.stdin.buffer.read()
    # Output of libraries goes to standard error.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print("ready", file=output, flush=True)

    from device_runner.serving.rounds import round_outcome
    from device_runner.session.generation import print_note

    print(json.dumps(round_outcome(pickle.loads(pickled), print_note)), file=output, flush=True)


if __name__ == "__main__":
    main()
