"""Running other verbs of prge as steps of a verb, each in a child process that ends with this one."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prge.cli.settings import format_yaml
from prge.errors import INTERRUPTED, PrgeError, RunError
from prge.formats.run_folder import LOCK, as_run_error, run_lock
from prge.system.atomic import write_file
from prge.system.parents import environment_of_child, python_command

# Time for a verb to save its state after SIGTERM, and to react to the terminal's own SIGINT.
_SECONDS_TO_END, _SECONDS_TO_INTERRUPT = 30.0, 3.0


def run_verb(*words: object, quiet: bool = False) -> None:
    """Run a verb in a child process; `quiet` shows only errors.

    Raises:
        PrgeError: The verb failed; its own message is on the terminal.
        KeyboardInterrupt: The verb was interrupted, by the terminal or by another process.
    """
    if not quiet:
        print(f"$ prge {shlex.join(map(str, words))}", flush=True)
    code = exit_code_of(*words, stdout=subprocess.DEVNULL if quiet else None)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise _failed(words, code)


def run_verb_here(main: Callable[[Sequence[str]], int], *words: object) -> None:
    """Run a verb in this process, which has already imported what the verb needs.

    Args:
        main: `prge.cli.main`.
        words: The verb's command line.

    Raises:
        PrgeError, KeyboardInterrupt: As `run_verb`.
    """
    print(f"$ prge {shlex.join(map(str, words))}", flush=True)
    code = main([*map(str, words)])
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise _failed(words, code)


def output_of(*words: object, codes: Container[int] = (0,)) -> str:
    """Run a verb in a child process and return its standard output.

    Raises:
        PrgeError: The exit code is not one of `codes`; the verb's own message is on the terminal.
    """
    with started(*words, stdout=subprocess.PIPE, text=True) as child:
        output = str(child.communicate()[0])
    if child.returncode not in codes:
        raise _failed(words, child.returncode)
    return output


def exit_code_of(*words: object, **options: Any) -> int:
    """Run a verb in a child process and return its exit code; `options` are as for `started`."""
    with started(*words, **options) as child:
        return child.wait()


@contextmanager
def started(
    *words: object, environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Start a verb in a child process, which is terminated if the block raises or this process ends.

    Args:
        words: The verb's command line.
        environment: Defaults of environment variables for the child alone.
        options: Arguments of subprocess.Popen.
    """
    with subprocess.Popen(
        verb_command(*words), env={**(environment or {}), **environment_of_child()}, **options
    ) as child:
        try:
            yield child
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # the terminal sends SIGINT to the child, too
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_SECONDS_TO_INTERRUPT)
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_SECONDS_TO_END)
            child.kill()
            raise


def verb_command(*words: object) -> list[str]:
    """Return the command line that starts a verb."""
    return [*python_command(), "-m", "prge.cli.main", *map(str, words)]


def write_verb_config(verb: str, settings: Mapping[str, Any], path: Path) -> list[str]:
    """Write settings of a verb to a YAML file and return the words that start the verb with it.

    Args:
        verb: A verb, such as `run` or `android run`.
        settings: Settings by name; None leaves a setting out.
        path: The YAML file; its folder is created.

    Raises:
        RunError: The file can't be written.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    with as_run_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, format_yaml(given).encode())
    return [*verb.split(), "--config", str(path)]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that a verb wrote."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def wait_until_free(run: Path, seconds: float = 10.0) -> None:
    """Wait until no process locks a run folder, such as a process that is being killed.

    Raises:
        RunError: The folder is still locked after `seconds`.
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
        f"`prge {words[0]}` ended with code {code}.",
        remedy="See its message above; `prge doctor` may show what is missing.",
        code="verb-failed",
    )
