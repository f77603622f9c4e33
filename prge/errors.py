"""One family of errors: what happened, the value seen, what to do."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

SHOWN_PROBLEMS = 40
LONGEST_LINE = 1000
LONGEST_VALUE = 100
# The exit code of a verb that was told to stop.
INTERRUPTED = 130
# What would move a terminal's cursor or ring its bell, or can't be written at all; but line breaks and tabs.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def shown(value: object) -> str:
    """A value from elsewhere as a message shows it: its repr, shortened."""
    try:
        return shortened(_REPR.repr(value), LONGEST_VALUE)
    except ValueError:  # Python doesn't print integers of thousands of digits
        return "a number of thousands of digits"


def shortened(text: str, longest: int) -> str:
    """A text of at most `longest` characters: what is longer loses its middle."""
    if len(text) <= longest:
        return text
    kept = longest - 3
    return f"{text[: kept - kept // 3]}...{text[len(text) - kept // 3 :]}"


def first_line(error: BaseException) -> str:
    """What an exception of a library says first."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def printable(text: str) -> str:
    """A text that may hold anything, for a terminal: lines shortened, control characters written out."""
    return visible("\n".join(shortened(line, LONGEST_LINE) for line in text.split("\n")))


def visible(text: str) -> str:
    """A text that may hold anything, for a terminal or a log: its control characters are written out."""
    return _UNPRINTABLE.sub(lambda character: ascii(character[0])[1:-1], text)


class PrgeError(Exception):
    """An error that a user can act on; the command line prints it without a traceback and exits with 2.

    Args:
        what: what happened, with the value seen, in a sentence.
        remedy: what a user may do.
        code: a short name that tests and tables go by, such as `rows-empty`; a message may be reworded.
    """

    exit_code = 2

    def __init__(self, what: str, *, remedy: str = "", code: str = "") -> None:
        super().__init__(printable(f"{what}\n  {remedy}" if remedy else what))
        self.what = what
        self.remedy = remedy
        self.code = code


class ProblemsError(PrgeError):
    """Several problems of one kind, told at once so that one correction is enough; of many, the first."""

    def __init__(self, what: str, problems: Iterable[str], *, remedy: str = "", code: str = "") -> None:
        self.problems = list(problems)
        listed = [f"  - {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
        if len(self.problems) > SHOWN_PROBLEMS:
            rest = len(self.problems) - SHOWN_PROBLEMS
            listed.append(f"  - ... and {rest} more ({len(self.problems)} in all)")
        super().__init__("\n".join([what, *listed]), remedy=remedy, code=code)


class ConfigError(ProblemsError):
    """Settings that don't exist, don't fit their type, or contradict each other."""


class BundleError(PrgeError):
    """A bundle, manifest or program that is missing, damaged, or not what it says."""


class Refusal(BundleError):  # noqa: N818
    """A model, or a combination of settings, that an export knows that it can't carry out.

    Args:
        code: as of every PrgeError, such as `operator-without-derivative`.
        what: what can't be done, in a sentence.
        operator: of the graph where it was noticed, if it is one.
        module: of the model where that operator stands.
        remedy: what a user may do.
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
    """Raise a Refusal where a library raises one of its own exceptions, whose first line it quotes.

    Calls of that library alone belong inside; every other exception is a defect and passes.

    Args:
        code: of the refusal.
        what: what can't be done, in a sentence.
        errors: types that the library raises where it knows why.
        remedy: what a user may do.

    Raises:
        Refusal: one of these was raised inside.
    """
    try:
        yield
    except PrgeError:
        raise
    except errors as error:
        raise Refusal(code, f"{what}: {type(error).__name__}: {first_line(error)}", remedy=remedy) from error


class AdapterError(ProblemsError):
    """An adapter of another rank, model or module set."""


class DataError(ProblemsError):
    """Rows that can't be read or can't be learnt from; each problem names its row."""


class EngineError(PrgeError):
    """The inference engine refused a program or an input."""


class RunError(PrgeError):
    """A run folder that is in use, belongs to other settings, or can't be written."""


class DeviceError(PrgeError):
    """A phone that is not there, does not answer, refuses, or lacks something."""


class DivergenceError(PrgeError):
    """The loss is no longer finite, or far above where it began."""


_REPR = reprlib.Repr()  # never makes the whole text of a long value
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = LONGEST_VALUE
_REPR.maxlevel = 3
