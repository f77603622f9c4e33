"""Requirements of prge, and the commands that install them.

prge isn't on a package index, so the commands name its dependencies instead of `prge[extra]`.
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
    """Return prge's requirement of a package, such as `torch==2.13.0`; the bare name if it is unknown."""
    for wanted, _ in _required():
        if _plain_name(re.split(r"[\[<>=!~ ]", wanted)[0]) == _plain_name(name):
            return wanted
    return name


def install(wanted: Iterable[str]) -> str:
    """Return the pip command that installs these requirements."""
    return f"pip install {shlex.join(wanted)}"


def install_extra_command(*extras: str) -> str:
    """Return the pip command for the packages of some of prge's extras; "" stands for the base packages."""
    wanted = dict.fromkeys(each for each, extra in _required() if extra in extras)
    return install(wanted or ["-e", f".[{','.join(extras)}]"])


def _required() -> list[tuple[str, str]]:
    """Return the requirements of the installed package, each with the extra that it belongs to."""
    try:
        lines = importlib.metadata.requires("prge") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    marked = [line.partition(";") for line in lines]
    extras = [re.search(r"extra == ['\"](.+?)['\"]", marker) for _, _, marker in marked]
    return [
        (wanted.strip(), match[1] if match else "")
        for (wanted, *_), match in zip(marked, extras, strict=True)
    ]


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Turn a missing package inside the block into a PrgeError that has the command to install the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "prge", "server_export", "device_runner") or os.environ.get("PRGE_DEBUG"):
            raise
        raise PrgeError(
            f"The package {missing} is not installed.",
            remedy=f"{install_extra_command('', extra)}\n  `prge doctor` shows what is missing.",
            code="package-missing",
        ) from None
