"""Other verbs of prge as steps of one: each in a process of its own, which ends with this one."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prge.errors import INTERRUPTED, PrgeError, RunError
from prge.files.run_folder import LOCK, reported, run_lock
from prge.host.atomic import write_file
from prge.host.parents import environment_of_child, python_command
from prge.verbs.settings import yaml_of

# For what a verb saves when it is told to stop, and when a terminal has told it.
_SECONDS_TO_END, _SECONDS_TO_OBEY = 30.0, 3.0


def run_verb(*words: object, quiet: bool = False) -> None:
    """Run one verb; `quiet` shows errors alone.

    Raises:
        PrgeError: it ended with another code than 0; its own message is on the terminal.
        KeyboardInterrupt: it was told to stop, be it by others than this process's terminal.
    """
    if not quiet:
        print(f"$ prge {shlex.join(map(str, words))}", flush=True)
    code = verb_code(*words, stdout=subprocess.DEVNULL if quiet else None)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise _failed(words, code)


def run_verb_here(main: Callable[[Sequence[str]], int], *words: object) -> None:
    """Run one verb in this process, which has imported what it needs.

    Args:
        main: `prge.cli.main`.
        words: of the verb's command line.

    Raises:
        PrgeError, KeyboardInterrupt: as `run_verb`.
    """
    print(f"$ prge {shlex.join(map(str, words))}", flush=True)
    code = main([*map(str, words)])
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise _failed(words, code)


def answer_of(*words: object, codes: Container[int] = (0,)) -> str:
    """What one verb prints.

    Raises:
        PrgeError: it ended with none of these codes; its own message is on the terminal.
    """
    with started(*words, stdout=subprocess.PIPE, text=True) as child:
        told = str(child.communicate()[0])
    if child.returncode not in codes:
        raise _failed(words, child.returncode)
    return told


def verb_code(*words: object, **options: Any) -> int:
    """Run one verb, by options as of `started`; returns its exit code."""
    with started(*words, **options) as child:
        return child.wait()


@contextmanager
def started(
    *words: object, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A verb in a process of its own: told to stop where the block raises, killed when this process ends.

    Args:
        words: of its command line.
        environment: variables for it alone, where they aren't set.
        options: of subprocess.Popen.
    """
    with subprocess.Popen(
        command_of(*words), env={**(environment or {}), **environment_of_child()}, **options
    ) as child:
        try:
            yield child
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # of which a terminal tells the child too
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_SECONDS_TO_OBEY)
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_SECONDS_TO_END)
            child.kill()
            raise


def command_of(*words: object) -> list[str]:
    """The command line of a verb."""
    return [*python_command(), "-m", "prge.cli", *map(str, words)]


def configured(verb: str, settings: Mapping[str, Any], path: Path) -> list[str]:
    """Words that start a verb with settings, which are written to a file that stays.

    Args:
        verb: such as `run` or `android run`.
        settings: of the verb, by their names; None leaves one out.
        path: the YAML file; its folder is made.

    Raises:
        RunError: the file can't be written.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, yaml_of(given).encode())
    return [*verb.split(), "--config", str(path)]


def json_of(path: Path) -> dict[str, Any]:
    """What a verb wrote with `--json`, or into a run folder."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def wait_until_free(run: Path, seconds: float = 10.0) -> None:
    """Wait for the process that still holds a run folder, such as one that is just being killed.

    Raises:
        RunError: it holds it for longer.
    """
    deadline = time.monotonic() + seconds
    while (run / LOCK).exists():
        try:
            with run_lock(run):
                return
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _failed(words: Sequence[object], code: int) -> PrgeError:
    return PrgeError(
        f"`prge {words[0]}` ended with code {code}",
        remedy="its message is above; `prge doctor` may tell more",
        code="verb-failed",
    )
