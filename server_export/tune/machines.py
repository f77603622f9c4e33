"""The machines that a tuning's runs take place on: this one, or a phone through adb."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prge.cli.subprocesses import output_of, run_verb, wait_until_free, write_verb_config
from prge.errors import PrgeError
from prge.formats.run_folder import JOURNAL


class Machine(Protocol):
    """A machine that executes runs."""

    def send_bundle(self, bundle: Path) -> None:
        """Send the bundle before the first run, so that no run's time includes it; see `run` for errors."""
        ...

    def run(self, folder: Path, settings: Mapping[str, Any], is_short: bool) -> None:
        """Start or resume a run, and wait until it has ended and its folder is on this machine.

        Args:
            folder: folder of the run.
            settings: settings of `prge run`, by name.
            is_short: whether the run is part of a search, of which only errors are printed.

        Raises:
            PrgeError: the run failed, or was ended from outside. A run that diverged may raise it too.
        """
        ...


class LocalMachine:
    """Implements Machine: runs on this machine.

    Args:
        settings: folder for the settings files of verbs.
    """

    def __init__(self, settings: Path) -> None:
        self._settings = settings

    def send_bundle(self, bundle: Path) -> None:
        """Do nothing; see Machine."""

    def run(self, folder: Path, settings: Mapping[str, Any], is_short: bool) -> None:
        """Start or resume a run; see Machine."""
        wait_until_free(folder)
        words = write_verb_config("run", {**settings, "out": folder}, self._settings / f"{folder.name}.yaml")
        if (folder / JOURNAL).is_file() and (folder / JOURNAL).stat().st_size:
            # All paths are given again, since the folder of the tuning may have been moved.
            words += ["--resume", str(folder)]
        run_verb(*words, quiet=is_short)


@dataclass(frozen=True)
class PhoneFacts:
    """Measurements of a phone by `prge android doctor`; None if a value isn't known."""

    serial: str
    name: str
    free_bytes: int | None
    """Free memory."""
    flops: float | None
    """Operations per second in float32."""


class PhoneMachine:
    """Implements Machine: runs on a phone, which continue without this machine and are pulled at their end.

    Args:
        serial: serial of the phone, as `adb devices` lists it; None: the only one.
        folder: prge's folder on the phone; None: the default.
        name: prefix of the names of the tuning's runs on the phone.
        settings: folder for the settings files of verbs.
    """

    def __init__(self, serial: str | None, folder: str | None, name: str, settings: Path) -> None:
        self._phone = {"serial": serial, "folder": folder}
        self._name = name
        self._settings = settings

    def facts(self) -> PhoneFacts:
        """Run `prge android doctor` and return its measurements.

        Raises:
            PrgeError: there is no phone, or it can't train.
        """
        # A temporary folder, since the folder of the tuning may not exist yet.
        with tempfile.TemporaryDirectory(prefix="prge-") as folder:
            settings = {**self._phone, "json": True}
            words = write_verb_config("android doctor", settings, Path(folder) / "doctor.yaml")
            output = output_of(*words, codes=(0, 1))
        checks = {check["name"]: check for check in json.loads(output)}
        for check in checks.values():
            if check["state"] == "missing":
                raise PrgeError(
                    f"The phone can't train: {check['name']}: {check['detail']}",
                    remedy=check["remedy"],
                    code="phone-cannot-train",
                )
        values = {name: check["value"] for name, check in checks.items()}
        return PhoneFacts(
            values["device"], checks["device"]["detail"], values.get("memory"), values.get("speed")
        )

    def run_name(self, folder: Path) -> str:
        """Return the name of a run on the phone."""
        return f"{self._name}-{folder.name}"

    def send_bundle(self, bundle: Path) -> None:
        """Push the bundle to the phone; see Machine."""
        push_settings = {**self._phone, "paths": [bundle]}
        run_verb(*write_verb_config("android push", push_settings, self._settings / "push.yaml"))

    def run(self, folder: Path, settings: Mapping[str, Any], is_short: bool) -> None:
        """Start or resume a run on the phone, which keeps no files of a short run; see Machine."""
        job = {"out": self.run_name(folder), "again": True, "pull": folder, "remove": is_short}
        run_settings = {**settings, **self._phone, **job}
        words = write_verb_config("android run", run_settings, self._settings / f"{folder.name}.yaml")
        run_verb(*words, quiet=is_short)
