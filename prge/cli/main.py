"""`prge <verb>`: finds the verb's module by name and imports it only then."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from prge import __version__
from prge.cli.help import completion_argv
from prge.cli.subcommands import Action, run_action
from prge.errors import INTERRUPTED, PrgeError, RunError
from prge.system.interrupts import ignore_interrupts, single_interrupt
from prge.system.memory import OUT_OF_MEMORY_REMEDY, is_out_of_memory
from prge.system.packages import require_extra
from prge.system.parents import end_with_starter
from prge.system.terminal import best_effort, flush, open_standard_files, silence


@dataclass(frozen=True)
class Verb:
    """Where a verb's `main(argv) -> exit code` lives, what it does, and the extra that it needs, if any."""

    module: str
    help: str
    extra: str


VERBS = {
    "tune": Verb("server_export.tune.command", "tune a model on rows with one command", "export"),
    "export": Verb("server_export.export", "turn a model into a bundle that a device can train", "export"),
    "estimate": Verb("server_export.estimate", "tell what an export and its runs would cost", "export"),
    "inspect": Verb("device_runner.inspect_bundle", "show what a bundle holds and needs", ""),
    "run": Verb("device_runner.run", "fine-tune the adapter of a bundle", "device"),
    "eval": Verb("device_runner.evaluate", "measure an adapter on rows of a task", "device"),
    "generate": Verb("device_runner.generate", "write what a model answers to prompts", "device"),
    "chat": Verb("device_runner.chat", "talk to a model and its adapters in the terminal", "device"),
    "serve": Verb("device_runner.serve", "serve a bundle and its adapters by OpenAI's protocol", "serve"),
    "baseline": Verb(
        "server_export.evidence.baselines.command", "train the same model by another method", "export"
    ),
    "replay": Verb("device_runner.replay", "compute a run's adapter again from its journal", ""),
    "report": Verb(
        "device_runner.report", "write a page about runs: curves, samples, settings, costs", "device"
    ),
    "watch": Verb("device_runner.watch", "look at runs in the browser while they go on", "serve"),
    "publish": Verb("server_export.publish", "give a trained adapter to PEFT or merge it", "export"),
    "compare": Verb(
        "server_export.evidence.compare.command", "compare training methods at equal quality", "export"
    ),
    "leak": Verb(
        "server_export.evidence.leak.command", "try to read rows from what a fleet sends of them", "export"
    ),
    "android": Verb("device_runner.android.command", "train on a phone over adb", ""),
    "fleet": Verb("device_runner.fleet.command", "train one adapter on many devices", "fleet"),
    "rows": Verb("device_runner.rows", "show rows of feedback, and forget some", ""),
    "cache": Verb("device_runner.cache", "show or empty the cache of packed weights", ""),
    "doctor": Verb("device_runner.doctor", "check what this machine has and what is missing", ""),
}

ABOUT = (
    "Fine-tune language models on a phone with nothing but an inference engine.\n"
    "`prge --version` tells the version."
)
BROKEN_PIPE = 141
DEFECT = 1
# A flag without its value, which may say something of the user.
_FLAG = re.compile(r"--[a-z][a-z0-9-]*(?==|$)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. Errors that a user can act on are printed without a traceback.

    Any other exception is a defect of prge: the command line prints its traceback and asks to report it, and
    a caller in Python, who gives `argv`, gets the exception. With PRGE_DEBUG=1 in the environment every error
    keeps its traceback.
    """
    end_with_starter()
    try:
        open_standard_files()
        with single_interrupt(restored=argv is not None):
            if argv is not None:
                return _main(list(argv))
            words = completion_argv(sys.argv[1:])
            try:
                return _main(words)
            except Exception as error:
                if os.environ.get("PRGE_DEBUG"):
                    raise
                return _print_defect(error, words)
    except KeyboardInterrupt:  # before a verb has begun
        return _interrupted("prge")


def _main(words: list[str]) -> int:
    if words[:1] in (["-V"], ["--version"]):
        return _guarded("prge", lambda: print(f"prge {__version__}"))
    actions = {name: Action(verb.help, partial(_start, verb)) for name, verb in VERBS.items()}
    return _guarded(_prog(words), lambda: run_action(words, actions, "prge", ABOUT))


def _prog(words: Sequence[str]) -> str:
    return " ".join(["prge", *(name for name in words[:1] if name in VERBS)])


def _print_defect(error: Exception, words: Sequence[str]) -> int:
    """Print the traceback of a defect and ask to report it; values of flags are left out."""
    prog = _prog(words)
    flags = (match[0] for word in words if (match := _FLAG.match(word)))
    flush(sys.stdout)
    with best_effort(sys.stderr):
        traceback.print_exception(error)
    return _tell(
        prog,
        f"this is a defect of prge {__version__}: please report it with the traceback above and the command "
        f"`{' '.join(dict.fromkeys([prog, *flags]))}`",
        DEFECT,
    )


def _start(verb: Verb, argv: list[str]) -> int:
    with require_extra(verb.extra):
        return int(importlib.import_module(verb.module).main(argv))


def _guarded(prog: str, work: Callable[[], int | None]) -> int:
    """Do `work`; errors become a message and an exit code, and so does a reader that has gone."""
    code = _outcome(prog, work)
    error = flush(sys.stdout)
    if error is not None and code == 0:
        if isinstance(error, BrokenPipeError):
            code = BROKEN_PIPE
        else:
            code = _tell(prog, f"error: standard output: {error.strerror}", RunError.exit_code)
    flush(sys.stderr)
    return code


def _outcome(prog: str, work: Callable[[], int | None]) -> int:
    try:
        try:
            return work() or 0
        finally:
            ignore_interrupts()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        return _tell(prog, str(stop.code), 1)
    except KeyboardInterrupt:
        return _interrupted(prog)
    except BrokenPipeError:
        silence(sys.stdout)
        return BROKEN_PIPE
    except PrgeError as error:
        if os.environ.get("PRGE_DEBUG"):
            raise
        return _tell(prog, f"error: {error}", error.exit_code)
    except Exception as error:
        if os.environ.get("PRGE_DEBUG"):
            raise
        if is_out_of_memory(error):
            wanted = f": {error}" if str(error) else ""
            message = f"error: there is not enough memory{wanted}\n  {OUT_OF_MEMORY_REMEDY}"
            return _tell(prog, message, PrgeError.exit_code)
        # Without a file name it is more likely a mistake in prge than a full disk or a missing right.
        if not isinstance(error, OSError) or (error.filename is None and error.errno != errno.ENOSPC):
            raise
        return _tell(prog, f"error: {error.filename or 'a write'}: {error.strerror}", RunError.exit_code)


def _interrupted(prog: str) -> int:
    if os.environ.get("PRGE_DEBUG"):
        raise  # what its caller has caught
    return _tell(prog, "interrupted", INTERRUPTED)


def _tell(prog: str, message: str, code: int) -> int:
    with best_effort(sys.stderr):
        print(f"{prog}: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
