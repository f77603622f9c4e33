"""A reward function of the user's own Python file, in a process of its own.

The file is the user's own code and runs with the user's rights. The process bounds its time and its output:
it is killed if a call takes too long, and its crash is an error of the row that it was called with. It has a
session of its own: Ctrl-C doesn't reach it, so that the run can finish its step.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

from prge.errors import ConfigError, RewardError, format_value
from prge.formats.documents import DocumentError, parse_json
from prge.rewards.reward import MAX_SECONDS, check_reward
from prge.system.parents import environment_of_child, python_command

# Bytes of a response, and of the end of what the function prints, which errors quote.
_MAX_RESPONSE, _MAX_PRINTED = 1 << 16, 1 << 11
DEFAULT_FUNCTION = "reward"
_CHILD = "prge.rewards.child"
_REMEDY = "Correct the file: the function takes prompt, completion and row, and returns a number."


class PythonReward:
    """Implements Reward with `function(prompt, completion, row)` of a Python file.

    Args:
        path: the Python file.
        function: name of the function; by default `reward`.
        seconds: seconds that loading the file, and each call, may take.

    Raises:
        ConfigError: the file can't be loaded, or has no such function.
    """

    def __init__(self, path: Path, function: str = "", seconds: float = MAX_SECONDS) -> None:
        self._name = f"{path.name}:{function or DEFAULT_FUNCTION}"
        self._seconds = seconds
        self._process = subprocess.Popen(
            [*python_command(), "-m", _CHILD, str(path.resolve()), function or DEFAULT_FUNCTION],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment_of_child(),
            start_new_session=True,
        )
        self._received, self._printed = b"", b""
        self._reader = Thread(target=self._keep_printed, daemon=True)
        self._reader.start()
        try:
            self._receive()
        except RewardError as error:
            self.close()
            raise ConfigError(
                f"--reward {self._name} can't be used:",
                [error.what],
                remedy=_REMEDY,
                code="reward-unusable",
            ) from None

    def __call__(self, prompt: Any, completion: str, row: Mapping[str, Any]) -> float:
        """See Reward."""
        line = json.dumps({"prompt": prompt, "completion": completion, "row": row}, default=str)
        with suppress(BrokenPipeError):  # `_receive` reports that the process has ended
            _pipe(self._process.stdin).write(line.encode() + b"\n")
            _pipe(self._process.stdin).flush()
        return check_reward(self._receive().get("reward"))

    def close(self) -> None:
        """See Reward."""
        self._kill()
        # A process that the function moved to another session may keep standard error open.
        self._reader.join(timeout=1)
        streams = [self._process.stdin, self._process.stdout]
        for stream in streams if self._reader.is_alive() else [*streams, self._process.stderr]:
            with suppress(BrokenPipeError):
                _pipe(stream).close()

    def _kill(self) -> int:
        """Kill the process and those that it started, and return its exit code."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _receive(self) -> dict[str, Any]:
        """Return the next response; raises RewardError if it is an error, or if there is none in time."""
        deadline, descriptor = time.monotonic() + self._seconds, _pipe(self._process.stdout).fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    self._kill()
                    raise self._error(f"did not return within {self._seconds:g} seconds", "reward-too-slow")
                part = os.read(descriptor, _MAX_RESPONSE)
                if not part or len(self._received) > _MAX_RESPONSE:
                    raise self._error(f"ended its process with code {self._kill()}", "reward-ended")
                self._received += part
        line, _, self._received = self._received.partition(b"\n")
        try:
            response = parse_json(line)
        except DocumentError:
            response = None
        if not isinstance(response, dict):
            raise self._error(f"gave the response {format_value(line)}", "reward-ended")
        if "error" in response:
            raise self._error(f"raised an error: {_last_line(response['error'])}", "reward-raised")
        return response

    def _error(self, problem: str, code: str) -> RewardError:
        printed = self._printed.decode(errors="replace").strip()
        quoted = f"; it printed {format_value(printed)}" if printed else ""
        return RewardError(f"The reward {self._name} {problem}{quoted}.", remedy=_REMEDY, code=code)

    def _keep_printed(self) -> None:
        """Keep the end of what the function prints, and discard the rest."""
        descriptor = _pipe(self._process.stderr).fileno()
        while part := os.read(descriptor, _MAX_PRINTED):
            self._printed = (self._printed + part)[-_MAX_PRINTED:]


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _last_line(traceback: object) -> str:
    """Return the last line of a traceback, with the line of the user's file that it names."""
    lines = [line.strip() for line in str(traceback).strip().splitlines() if line.strip()]
    positions = [line for line in lines if line.startswith("File ")]
    where = f" ({positions[-1].rpartition(', in')[0]})" if positions else ""
    return f"{lines[-1] if lines else 'without a message'}{where}"
