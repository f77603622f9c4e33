"""Errors that a user can act on: messages contain the fact, the value seen, and a remedy."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

SHOWN_PROBLEMS = 40
LONGEST_LINE = 1000
LONGEST_VALUE = 100
# The exit code of a verb that a user or the system interrupted.
INTERRUPTED = 130
# Control characters other than line breaks and tabs, which could control a terminal, and lone surrogates,
# which can't be written.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def format_value(value: object) -> str:
    """Return the shortened repr of a value, for use in a message."""
    try:
        return shortened(_REPR.repr(value), LONGEST_VALUE)
    except ValueError:  # Python doesn't convert integers of thousands of digits
        return "a number of thousands of digits"


def shortened(text: str, longest: int) -> str:
    """Return the text, without its middle if it has more than `longest` characters."""
    if len(text) <= longest:
        return text
    remaining = longest - 3
    return f"{text[: remaining - remaining // 3]}...{text[len(text) - remaining // 3 :]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def as_clause(sentence: str) -> str:
    """Return the first line of an error's sentence for the middle of another: without capital and period.

    A first word with more capitals, such as UTF-8, keeps them.
    """
    line = sentence.partition("\n")[0]
    if line[:1].isupper() and (len(line) == 1 or line[1].islower() or line[1].isspace()):
        line = line[0].lower() + line[1:]
    return line.rstrip(".:")


def printable(text: str) -> str:
    """Return an untrusted text for a terminal, with long lines shortened and control characters escaped."""
    return escape_control("\n".join(shortened(line, LONGEST_LINE) for line in text.split("\n")))


def escape_control(text: str) -> str:
    """Return an untrusted text for a terminal or a log, with control characters escaped."""
    return _UNPRINTABLE.sub(lambda character: ascii(character[0])[1:-1], text)


class PrgeError(Exception):
    """An error that a user can act on; the command line prints it without a traceback and exits with code 2.

    Args:
        what: what happened, with the value seen, in a sentence.
        remedy: what the user can do.
        code: a short, stable name such as `rows-empty`, by which tests and tables identify the error; the
            message may be reworded.
    """

    exit_code = 2

    def __init__(self, what: str, *, remedy: str = "", code: str = "") -> None:
        super().__init__(printable(f"{what}\n  {remedy}" if remedy else what))
        self.what = what
        self.remedy = remedy
        self.code = code


class ProblemsError(PrgeError):
    """Several problems, reported together so that they can be corrected at once; at most 40 are shown.

    Args:
        what: what they have in common, in a sentence.
        problems: the problems, each in a sentence.
        remedy: what the user can do.
        code: see PrgeError.
    """

    def __init__(self, what: str, problems: Iterable[str], *, remedy: str = "", code: str = "") -> None:
        self.problems = list(problems)
        listed = [f"  - {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if len(self.problems) > SHOWN_PROBLEMS:
            rest = len(self.problems) - SHOWN_PROBLEMS
            listed.append(f"  - ... and {rest} more ({len(self.problems)} in all)")
        super().__init__("\n".join([what, *listed]), remedy=remedy, code=code)


class ConfigError(ProblemsError):
    """Settings are unknown, have invalid values, or contradict each other."""


class BundleError(PrgeError):
    """A bundle, its manifest or one of its files is missing, damaged or inconsistent."""


class Refusal(BundleError):  # noqa: N818
    """An export doesn't support the model or the combination of settings.

    Args:
        code: see PrgeError; such as `operator-without-derivative`.
        what: what isn't supported, in a sentence.
        operator: the unsupported operator of the graph, if an operator is the reason.
        module: the module of the model that contains the operator.
        remedy: what the user can do.
    """

    def __init__(
        self, code: str, what: str, *, operator: str = "", module: str = "", remedy: str = ""
    ) -> None:
        super().__init__(what, remedy=remedy, code=code)
        self.operator = operator
        self.module = module


@contextmanager
def refused_as(
    code: str,
    what: str,
    errors: type[Exception] | tuple[type[Exception], ...],
    *,
    remedy: str = "",
) -> Iterator[None]:
    """Convert exceptions of a library inside the block into a Refusal, which quotes their first line.

    The block should contain calls of that library only: all other exceptions are defects and aren't
    converted.

    Args:
        code: code of the refusal.
        what: what isn't supported, in a sentence.
        errors: types of exceptions that the library raises for unsupported input.
        remedy: what the user can do.

    Raises:
        Refusal: one of these exceptions was raised inside the block.
    """
    try:
        yield
    except PrgeError:
        raise
    except errors as error:
        raise Refusal(code, f"{what}: {type(error).__name__}: {first_line(error)}", remedy=remedy) from error


class AdapterError(ProblemsError):
    """An adapter is damaged, or doesn't fit the model, the rank or the adapted modules."""


class DataError(ProblemsError):
    """Rows can't be read or can't be trained on; each problem names its row."""


class RewardError(PrgeError):
    """The reward of a completion can't be computed."""


class EngineError(PrgeError):
    """The inference engine rejected a program or an input, or failed."""


class RunError(PrgeError):
    """A run folder is in use, belongs to other settings, or can't be written."""


class DeviceError(PrgeError):
    """A phone isn't connected, doesn't respond, refuses a command, or lacks something."""


class DivergenceError(PrgeError):
    """The loss is no longer finite, or far above the first loss."""


_REPR = reprlib.Repr()  # doesn't build the whole repr of a long value
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = LONGEST_VALUE
_REPR.maxlevel = 3
