"""Combined settings of a verb that runs another verb, read from one command line.

both = combine_settings("Run it on a phone.", JobFlags, RunSettings, without=["threads"])
given = parse_settings(both, argv, "prge android run")
job, settings = part_of(JobFlags, given), RunSettings(**shared_values(RunSettings, given), threads=2)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, get_type_hints


def combine_settings(
    about: str, *parts: type[Any], without: Collection[str] = (), example: str | None = None
) -> type[Any]:
    """Combine the fields of several settings classes into one class.

    The combined class checks types and bounds; checks across fields are left to the parts. If several parts
    have a field of the same name, the first one counts. ONE_OF has the entries of all parts.

    Args:
        about: First paragraph of the help, which shows the fields grouped by their classes.
        parts: Settings classes.
        without: Names of fields to leave out.
        example: The words after the verb in the example of a command that help begins with; None: no example.
    """
    one_of = [names for part in parts for names in getattr(part, "ONE_OF", ())]
    fields: dict[str, tuple[str, Any, Any]] = {}
    for part in parts:
        hints = get_type_hints(part, include_extras=True)
        for item in dataclasses.fields(part):
            if item.name in fields or item.name in without:
                continue
            settings: dict[str, Any] = {"default": item.default}
            if item.default_factory is not dataclasses.MISSING:
                settings = {"default_factory": item.default_factory}
            fields[item.name] = item.name, hints[item.name], dataclasses.field(**settings, kw_only=True)
    namespace = {"__doc__": about, "ONE_OF": tuple(one_of), "PARTS": parts, "EXAMPLE": example}
    return dataclasses.make_dataclass("Combined", fields.values(), namespace=namespace, frozen=True)


def shared_values(settings_type: type[Any], settings: Any) -> dict[str, Any]:
    """Return the values of those settings that are also fields of a class, by name."""
    return {
        item.name: getattr(settings, item.name)
        for item in dataclasses.fields(settings_type)
        if hasattr(settings, item.name)
    }
