"""Where the runs of a tuning take place: on this machine, or on a phone that adb reaches."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prge.errors import PrgeError
from prge.files.run_folder import JOURNAL
from prge.verbs.starting import answer_of, configured, run_verb, wait_until_free


class Place(Protocol):
    """Takes runs."""

    def bring(self, bundle: Path) -> None:
        """Bring what all runs need, so that it is no part of a run's time; raises as `run`."""
        ...

    def run(self, folder: Path, settings: Mapping[str, Any], is_short: bool) -> None:
        """Begin the run of a folder, or go on with it; returns when it has ended and the folder holds it.

        Args:
            folder: of the run.
            settings: of `prge run`, by their names.
            is_short: whether it is one of a search, of which nothing but errors is shown.

        Raises:
            PrgeError: it failed, or was ended from outside. A run that diverged may raise it too.
        """
        ...


class Here:
    """Implements Place: this machine.

    Args:
        settings: folder for what runs are started with.
    """

    def __init__(self, settings: Path) -> None:
        self._settings = settings

    def bring(self, bundle: Path) -> None:
        """See Place."""

    def run(self, folder: Path, settings: Mapping[str, Any], is_short: bool) -> None:
        """See Place."""
        wait_until_free(folder)
        words = configured("run", {**settings, "out": folder}, self._settings / f"{folder.name}.yaml")
        if (folder / JOURNAL).is_file() and (folder / JOURNAL).stat().st_size:
            # With all places named again: the tuning may have been moved.
            words += ["--resume", str(folder)]
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
        settings: folder for what verbs are started with.
    """

    def __init__(self, serial: str | None, folder: str | None, name: str, settings: Path) -> None:
        self._where = {"serial": serial, "folder": folder}
        self._name = name
        self._settings = settings

    def facts(self) -> PhoneFacts:
        """Ask the phone.

        Raises:
            PrgeError: there is none, or it lacks something.
        """
        with tempfile.TemporaryDirectory(prefix="prge-") as place:  # the tuning's folder may not be begun
            asked = {**self._where, "json": True}
            words = configured("android doctor", asked, Path(place) / "doctor.yaml")
            told = answer_of(*words, codes=(0, 1))
        checks = {check["name"]: check for check in json.loads(told)}
        for check in checks.values():
            if check["state"] == "missing":
                raise PrgeError(
                    f"the phone can't train: {check['name']}: {check['found']}",
                    remedy=check["remedy"],
                    code="phone-cannot-train",
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
        pushed = {**self._where, "paths": [bundle]}
        run_verb(*configured("android push", pushed, self._settings / "push.yaml"))

    def run(self, folder: Path, settings: Mapping[str, Any], is_short: bool) -> None:
        """See Place. Of a short run nothing stays on the phone."""
        there = {"out": self.run_name(folder), "again": True, "pull": folder, "remove": is_short}
        asked = {**settings, **self._where, **there}
        words = configured("android run", asked, self._settings / f"{folder.name}.yaml")
        run_verb(*words, quiet=is_short)
