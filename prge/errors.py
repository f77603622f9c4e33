"""One family of errors: what happened, the value seen, what to do."""

from __future__ import annotations

from collections.abc import Iterable


class PrgeError(Exception):
    """An error that a user can act on; the command line prints it without a traceback and exits with 2."""

    exit_code = 2

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(f"{what}\n  {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class ProblemsError(PrgeError):
    """Several problems of one kind, told at once so that one correction is enough."""

    def __init__(self, what: str, problems: Iterable[str], *, remedy: str = "") -> None:
        self.problems = list(problems)
        super().__init__("\n".join([what, *(f"  - {problem}" for problem in self.problems)]), remedy=remedy)


class ConfigError(ProblemsError):
    """Settings that don't exist, don't fit their type, or contradict each other."""


class BundleError(PrgeError):
    """A bundle, manifest or program that is missing, damaged, or not what it says."""


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
