"""What prge asks for of other packages, and the commands that bring it.

No index has prge itself: commands name the packages instead of `prge[extra]`.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prge.errors import PrgeError


def requirement(name: str) -> str:
    """What prge asks for by that name, such as `torch==2.13.0`; the bare name if that can't be told."""
    for wanted, _ in _required():
        if _plain_name(re.split(r"[\[<>=!~ ]", wanted)[0]) == _plain_name(name):
            return wanted
    return name


def install(wanted: Iterable[str]) -> str:
    """The command that installs these requirements."""
    return f"pip install {shlex.join(wanted)}"


def install_extra(*extras: str) -> str:
    """The command that installs the packages of some of prge's extras; "" has those that all verbs need."""
    wanted = dict.fromkeys(each for each, extra in _required() if extra in extras)
    return install(wanted or ["-e", f".[{','.join(extras)}]"])


def _required() -> list[tuple[str, str]]:
    """Requirements of the installed package, each with the extra that it belongs to."""
    try:
        lines = importlib.metadata.requires("prge") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    marked = [line.partition(";") for line in lines]
    extras = [re.search(r"extra == ['\"](.+?)['\"]", marker) for _, _, marker in marked]
    return [
        (wanted.strip(), found[1] if found else "")
        for (wanted, *_), found in zip(marked, extras, strict=True)
    ]


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Turn the lack of a package inside the block into a PrgeError that names the extra; "" names none."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "prge", "server_export", "device_runner") or os.environ.get("PRGE_DEBUG"):
            raise
        raise PrgeError(
            f"the package {missing} is not installed",
            remedy=f"{install_extra('', extra)}\n  `prge doctor` shows what is missing",
            code="package-missing",
        ) from None
