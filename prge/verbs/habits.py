"""What people type who come from other tools, and what it is called here: habits.yaml as hints of errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path

from prge.errors import PrgeError, shown
from prge.files.documents import read_yaml


def setting_meant(key: str, known: Collection[str], written: Callable[[str], str]) -> tuple[str, str]:
    """Which of a verb's settings an unknown one means, and what an error says of it; each may be empty.

    Args:
        key: the unknown setting, with underscores.
        known: the verb's settings.
        written: how a setting is written where the unknown one was found.
    """
    names = _habits("settings")
    key = key.lower()

    def same(theirs: str) -> list[tuple[str, str]]:
        words = [word.partition("=") for ours in names.get(theirs, ()) for word in ours.split()]
        return [(name, f"{written(name)} {value}".rstrip()) for name, _, value in words]

    for name, ours in same(key):
        if name in known:
            return name, f"; here it is {ours}"
    for told in _habits("told").get(key, ()):
        return "", f": {told}"
    elsewhere = [ours for _, ours in same(key)]
    if elsewhere:
        return "", f"; other verbs call it {elsewhere[0]}"
    near = nearest(key, known, 0.6)
    for name, ours in [(near, written(near))] if near else same(nearest(key, names, 0.85)):
        if name in known:
            return name, f"; did you mean {ours}?"
    return "", ""


def verb_error(name: str, verbs: Collection[str], prog: str) -> PrgeError:
    """There is no verb of that name; what it may mean.

    Args:
        name: the unknown verb.
        verbs: those that there are.
        prog: what stands before them, such as `prge android`.
    """
    ours = [verb for verb in _habits("verbs").get(name.lower(), ()) if verb in verbs]
    near = next(iter(ours), "") or nearest(name, verbs, 0.6)
    remedy = f"did you mean `{prog} {near}`?" if near else f"`{prog} --help` lists the verbs"
    return PrgeError(f"there is no verb {shown(name)} of {prog}", remedy=remedy, code="verb-unknown")


def nearest(name: str, names: Iterable[str], cutoff: float) -> str:
    """The name that is most like another; empty where none is like it, by a share from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, [*names], n=1, cutoff=cutoff)), "")


@cache
def _habits(table: str) -> dict[str, list[str]]:
    """Our words by those of others."""
    found: dict[str, list[str]] = {}
    for ours, theirs in read_yaml(Path(__file__).with_suffix(".yaml"))[table].items():
        for name in theirs.split():
            found.setdefault(name, []).append(ours)
    return found
