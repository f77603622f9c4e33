"""Where the runs of a tuning take place: on this machine, or on a phone that adb reaches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prge.errors import PrgeError
from prge.files.run_folder import JOURNAL
from server_export.verbs import answer_of, flags_of, run_verb, wait_until_free


class Place(Protocol):
    """Takes runs."""

    def bring(self, bundle: Path) -> None:
        """Bring what all runs need, so that it is no part of a run's time; raises as `run`."""
        ...

    def run(self, folder: Path, settings: Mapping[str, Any], is_short: bool) -> None:
        """Begin the run of a folder, or go on with it; returns when it has ended and the folder holds it.

        Args:
            folder: of the run.
            settings: flags of `prge run`.
            is_short: whether it is one of a search, of which nothing but errors is shown.

        Raises:
            PrgeError: it failed, or was ended from outside. A run that diverged may raise it too.
        """
        ...


class Here:
    """Implements Place: this machine."""

    def bring(self, bundle: Path) -> None:
        """See Place."""

    def run(self, folder: Path, settings: Mapping[str, Any], is_short: bool) -> None:
        """See Place."""
        wait_until_free(folder)
        words: list[object] = ["run", "--resume", folder]
        if not (folder / JOURNAL).is_file() or not (folder / JOURNAL).stat().st_size:
            words = ["run", *flags_of({**settings, "out": folder})]
        run_verb(*words, quiet=is_short)


@dataclass(frozen=True)
class PhoneFacts:
    """What `prge android doctor` measured of a phone; None: it doesn't tell."""

    serial: str
    name: str
    free_bytes: int | None
    flops: float | None
    """Operations in float32 a second."""


class Phone:
    """Implements Place: a phone. Runs go on there without this machine, and are pulled when they have ended.

    Args:
        serial: as `adb devices` lists it.
        folder: prge's on the phone; None: the usual one.
        name: of the tuning, which the names of its runs there begin with.
    """

    def __init__(self, serial: str | None, folder: str | None, name: str) -> None:
        self._where = flags_of({"serial": serial, "folder": folder})
        self._name = name

    def facts(self) -> PhoneFacts:
        """Ask the phone.

        Raises:
            PrgeError: there is none, or it lacks something.
        """
        told = answer_of("android", "doctor", "--json", *self._where, codes=(0, 1))
        checks = {check["name"]: check for check in json.loads(told)}
        for check in checks.values():
            if check["state"] == "missing":
                raise PrgeError(
                    f"the phone can't train: {check['name']}: {check['found']}", remedy=check["remedy"]
                )
        values = {name: check["value"] for name, check in checks.items()}
        return PhoneFacts(
            values["device"], checks["device"]["found"], values.get("memory"), values.get("speed")
        )

    def run_name(self, folder: Path) -> str:
        """What a run's folder is called on the phone."""
        return f"{self._name}-{folder.name}"

    def bring(self, bundle: Path) -> None:
        """See Place."""
        run_verb("android", "push", *self._where, bundle)

    def run(self, folder: Path, settings: Mapping[str, Any], is_short: bool) -> None:
        """See Place. Of a short run nothing stays on the phone."""
        words = {**settings, "out": self.run_name(folder), "again": True, "pull": folder}
        flags = flags_of({**words, "remove": is_short or None})
        run_verb("android", "run", *self._where, *flags, quiet=is_short)
