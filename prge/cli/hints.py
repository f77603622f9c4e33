"""Other names of settings and verbs, in other tools and in the previous version of prge (hints.yaml)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path

from prge.errors import PrgeError, format_value
from prge.formats.documents import read_yaml


def current_name(key: str, known: Collection[str]) -> str:
    """Return a setting's current name for the name that it had in the previous version.

    Args:
        key: A name, with underscores; it is returned unchanged unless it is such an old name.
        known: Settings of the verb.
    """
    if key in known:
        return key
    return next((name for name in _names_by_alias("renamed").get(key, ()) if name in known), key)


def suggest_setting(key: str, known: Collection[str], written: Callable[[str], str]) -> tuple[str, str]:
    """Return the setting that an unknown name means, and a hint for the error message; each may be empty.

    Args:
        key: The unknown name, with underscores.
        known: Settings of the verb.
        written: Formats a setting as the user wrote it, as a flag or a YAML key.
    """
    names = {**_names_by_alias("settings"), **_names_by_alias("renamed")}
    key = key.lower()

    def settings_of_alias(alias: str) -> list[tuple[str, str]]:
        words = [word.partition("=") for text in names.get(alias, ()) for word in text.split()]
        return [(name, f"{written(name)} {value}".rstrip()) for name, _, value in words]

    for name, text in settings_of_alias(key):
        if name in known:
            return name, f"; use {text}"
    for message in _names_by_alias("messages").get(key, ()):
        return "", f": {message}"
    elsewhere = [text for _, text in settings_of_alias(key)]
    if elsewhere:
        return "", f"; other verbs call it {elsewhere[0]}"
    matches = [(name, written(name)) for name in (closest_match(key, known, 0.85),)]
    matches += settings_of_alias(closest_match(key, names, 0.85))
    matches += [(name, written(name)) for name in (closest_match(key, known, 0.6),)]
    return next(((name, f"; did you mean {text}?") for name, text in matches if name in known), ("", ""))


def verb_error(name: str, verbs: Collection[str], prog: str) -> PrgeError:
    """Return the error for an unknown verb, with a suggestion.

    Args:
        name: The unknown verb.
        verbs: Known verbs.
        prog: The words before the verb, such as `prge android`.
    """
    matches = [verb for verb in _names_by_alias("verbs").get(name.lower(), ()) if verb in verbs]
    similar = next(iter(matches), "") or closest_match(name, verbs, 0.6)
    remedy = f"Did you mean `{prog} {similar}`?" if similar else f"`{prog} --help` lists the verbs."
    return PrgeError(f"There is no verb {format_value(name)} of {prog}.", remedy=remedy, code="verb-unknown")


def closest_match(name: str, names: Iterable[str], cutoff: float) -> str:
    """Return the most similar name; empty if no similarity reaches `cutoff` (0 to 1)."""
    return next(iter(difflib.get_close_matches(name, [*names], n=1, cutoff=cutoff)), "")


@cache
def _names_by_alias(table: str) -> dict[str, list[str]]:
    """Return prge's names by the names that other tools use."""
    aliases: dict[str, list[str]] = {}
    for name_here, alias_text in read_yaml(Path(__file__).with_suffix(".yaml"))[table].items():
        for name in alias_text.split():
            aliases.setdefault(name, []).append(name_here)
    return aliases
