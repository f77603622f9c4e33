"""The command `prge <verb>`, which imports a verb's module only when the verb is called."""

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
    """A verb: the module with its `main(argv) -> exit code`, its help, and the extra that it needs or ""."""

    module: str
    help: str
    extra: str


# The verbs by the headings of their groups in `prge --help`.
VERB_GROUPS = {
    "train a model": {
        "tune": Verb(
            "server_export.tune.command", "fine-tune a model on your data with one command", "export"
        ),
        "export": Verb(
            "server_export.export", "export a model as a bundle that a device can train", "export"
        ),
        "estimate": Verb("server_export.estimate", "estimate the costs of an export and its runs", "export"),
        "run": Verb("device_runner.run", "train the adapter of a bundle", "device"),
        "eval": Verb("device_runner.evaluate", "evaluate an adapter on the rows of a task", "device"),
        "baseline": Verb(
            "server_export.evidence.baselines.command", "train the same model by another method", "export"
        ),
        "compare": Verb(
            "server_export.evidence.compare.command", "compare training methods at equal quality", "export"
        ),
    },
    "use a trained model": {
        "generate": Verb("device_runner.generate", "generate a model's answers to prompts", "device"),
        "chat": Verb("device_runner.chat", "chat with a model and its adapters in the terminal", "device"),
        "serve": Verb("device_runner.serve", "serve a model and its adapters by OpenAI's protocol", "serve"),
        "publish": Verb("server_export.publish", "publish a trained adapter for PEFT, or merge it", "export"),
    },
    "train on a phone": {
        "android": Verb("device_runner.android.command", "train on a phone over adb", ""),
    },
    "train on many devices": {
        "fleet": Verb("device_runner.fleet.command", "train one adapter on many devices", "fleet"),
        "leak": Verb(
            "server_export.evidence.leak.command", "try to reconstruct rows from a fleet's messages", "export"
        ),
    },
    "inspect and clean up": {
        "inspect": Verb("device_runner.inspect_bundle", "show the contents and requirements of a bundle", ""),
        "report": Verb(
            "device_runner.report", "write a report on runs: curves, samples, settings, costs", "device"
        ),
        "watch": Verb("device_runner.watch", "watch runs in the browser while they train", "serve"),
        "replay": Verb("device_runner.replay", "recompute a run's adapter from its journal", ""),
        "rows": Verb("device_runner.rows", "show rows of feedback, and remove some", ""),
        "cache": Verb("device_runner.cache", "show or empty the cache of programs and packed weights", ""),
        "doctor": Verb("device_runner.doctor", "check this machine and list what is missing", ""),
    },
}
VERBS = {name: verb for verbs in VERB_GROUPS.values() for name, verb in verbs.items()}

ABOUT = (
    "Fine-tune language models on a phone with nothing but an inference engine.\n"
    "`prge --version` prints the version."
)
BROKEN_PIPE = 141
DEFECT = 1
# A flag without its value, which may be private.
_FLAG = re.compile(r"--[a-z][a-z0-9-]*(?==|$)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; errors that a user can act on are printed without a traceback.

    Any other exception is a defect of prge: the command line prints its traceback and asks the user to report
    it; a caller in Python, who passes `argv`, gets the exception. With PRGE_DEBUG=1 in the environment every
    error keeps its traceback.
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
    except KeyboardInterrupt:  # no verb has begun yet
        return _interrupted("prge")


def _main(words: list[str]) -> int:
    if words[:1] in (["-V"], ["--version"]):
        return _run_guarded("prge", lambda: print(f"prge {__version__}"))
    actions = {
        name: Action(verb.help, partial(_start, verb), group)
        for group, verbs in VERB_GROUPS.items()
        for name, verb in verbs.items()
    }
    return _run_guarded(_prog(words), lambda: run_action(words, actions, "prge", ABOUT))


def _prog(words: Sequence[str]) -> str:
    return " ".join(["prge", *(name for name in words[:1] if name in VERBS)])


def _print_defect(error: Exception, words: Sequence[str]) -> int:
    """Print the traceback of a defect and ask the user to report it, without the values of flags."""
    prog = _prog(words)
    flags = (match[0] for word in words if (match := _FLAG.match(word)))
    flush(sys.stdout)
    with best_effort(sys.stderr):
        traceback.print_exception(error)
    return _fail(
        prog,
        f"This is a defect of prge {__version__}: please report it with the traceback above and the command "
        f"`{' '.join(dict.fromkeys([prog, *flags]))}`",
        DEFECT,
    )


def _start(verb: Verb, argv: list[str]) -> int:
    with require_extra(verb.extra):
        return int(importlib.import_module(verb.module).main(argv))


def _run_guarded(prog: str, work: Callable[[], int | None]) -> int:
    """Call `work` and return an exit code; errors and a closed standard output become messages."""
    code = _exit_code(prog, work)
    error = flush(sys.stdout)
    if error is not None and code == 0:
        if isinstance(error, BrokenPipeError):
            code = BROKEN_PIPE
        else:
            code = _fail(prog, f"error: standard output: {error.strerror}", RunError.exit_code)
    flush(sys.stderr)
    return code


def _exit_code(prog: str, work: Callable[[], int | None]) -> int:
    try:
        try:
            return work() or 0
        finally:
            ignore_interrupts()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        return _fail(prog, str(stop.code), 1)
    except KeyboardInterrupt:
        return _interrupted(prog)
    except BrokenPipeError:
        silence(sys.stdout)
        return BROKEN_PIPE
    except PrgeError as error:
        if os.environ.get("PRGE_DEBUG"):
            raise
        return _fail(prog, f"error: {error}", error.exit_code)
    except Exception as error:
        if os.environ.get("PRGE_DEBUG"):
            raise
        if is_out_of_memory(error):
            details = f": {error}" if str(error) else ""
            message = f"error: There is not enough memory{details}\n  {OUT_OF_MEMORY_REMEDY}"
            return _fail(prog, message, PrgeError.exit_code)
        # An OSError without a file name is more likely a defect than a full disk or a missing permission.
        if not isinstance(error, OSError) or (error.filename is None and error.errno != errno.ENOSPC):
            raise
        return _fail(prog, f"error: {error.filename or 'a write'}: {error.strerror}", RunError.exit_code)


def _interrupted(prog: str) -> int:
    if os.environ.get("PRGE_DEBUG"):
        raise  # re-raises the KeyboardInterrupt that the caller is handling
    return _fail(prog, "interrupted", INTERRUPTED)


def _fail(prog: str, message: str, code: int) -> int:
    with best_effort(sys.stderr):
        print(f"{prog}: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
