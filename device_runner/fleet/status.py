"""The status of a fleet, read from the server's folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from device_runner.fleet.coordinator import read_agreement
from device_runner.fleet.serve import NAMES
from prge.errors import RunError
from prge.formats.documents import DocumentError, read_json
from prge.formats.journal import Journal, Record
from prge.formats.run_folder import FINAL, JOURNAL, is_held

# Fields of an evaluation's record that are not scores.
_NO_SCORES = ("type", "step", "value", "examples")


@dataclass
class DeviceStatus:
    """What a device did.

    Attributes:
        answered: number of rounds that it answered.
        silent: number of rounds in which it sent nothing.
        refused: why it refused rounds, or why its results were refused.
    """

    answered: int = 0
    silent: int = 0
    refused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.answered} answers"
            + f", {self.silent} silent" * bool(self.silent)
            + (f", {len(self.refused)} refused, last: {self.refused[-1]}" if self.refused else "")
        )


@dataclass(frozen=True)
class FleetStatus:
    """The status of a fleet.

    Attributes:
        folder: the folder of the server.
        state: done, running or stopped.
        rounds: the number of rounds that are over.
        of: rounds of the plan.
        steps: the number of steps of the global adapter.
        devices: the devices by name.
        bytes_up, bytes_down: the bytes of all rounds.
        loss: the loss of the last round.
        privacy_epsilon: the largest that a device has spent.
        evaluation: the newest scores on the development rows.
    """

    folder: str
    state: str
    rounds: int
    of: int
    steps: int
    devices: dict[str, DeviceStatus]
    bytes_up: int
    bytes_down: int
    loss: float | None
    privacy_epsilon: float
    evaluation: dict[str, float]

    def text(self) -> str:
        """Format the status for a terminal."""
        scores = ", ".join(f"{name} {value:.4g}" for name, value in self.evaluation.items())
        lines = (
            f"{self.folder}: {self.state}, {self.rounds} of {self.of} rounds, {self.steps} steps",
            f"{self.bytes_up:,} bytes up, {self.bytes_down:,} down",
            "" if self.loss is None else f"loss {self.loss:.4g}",
            f"development rows: {scores}" if scores else "",
            f"privacy_epsilon {self.privacy_epsilon:.3g}" if self.privacy_epsilon else "",
            *(f"{name}: {device}" for name, device in sorted(self.devices.items())),
        )
        return "\n".join(filter(None, lines))


def read_status(folder: Path) -> FleetStatus:
    """Read the status of a fleet from a server's folder, while the server may run.

    Raises:
        RunError: the folder holds no fleet, or its journal is damaged.
    """
    if not (folder / JOURNAL).is_file():
        raise RunError(
            f"{folder} does not contain a fleet.",
            remedy="Give the folder that was --out of `prge fleet serve`.",
            code="not-a-fleet",
        )
    plan = read_agreement(folder).plan
    journal = Journal(folder / JOURNAL, writable=False)
    rounds, evaluations = (
        [record for record in journal.records if record["type"] == each] for each in ("round", "evaluation")
    )
    names = _names(folder)
    devices = {name: DeviceStatus() for name in names.values()}
    for record in rounds:
        with journal.reading(record):
            _count(record, names, devices)
    state = "done" if (folder / FINAL).is_dir() else "running" if is_held(folder) else "stopped"
    scores = evaluations[-1] if evaluations else {}
    return FleetStatus(
        *(str(folder), state, len(rounds), plan.rounds, journal.steps, devices),
        bytes_up=sum(record["bytes_up"] for record in rounds),
        bytes_down=sum(record["bytes_down"] for record in rounds),
        loss=rounds[-1]["loss"] if rounds else None,
        privacy_epsilon=max((record["privacy_epsilon"] for record in rounds), default=0.0),
        evaluation={name: value for name, value in scores.items() if name not in _NO_SCORES},
    )


def _count(record: Record, names: dict[int, str], devices: dict[str, DeviceStatus]) -> None:
    """Add what devices did in a round, from the round's journal record."""

    def device(node: int) -> DeviceStatus:
        return devices.setdefault(names.get(node, str(node)), DeviceStatus())

    for node in record["answered"]:
        device(node).answered += 1
    for node in record["silent"]:
        device(node).silent += 1
    for node, reason in record["refused"].items():
        device(int(node)).refused.append(reason)


def _names(folder: Path) -> dict[int, str]:
    """Return the names of devices whose keys the server knows, by node id."""
    if not (folder / NAMES).is_file():
        return {}
    try:
        return {int(node): str(name) for node, name in read_json(folder / NAMES).items()}
    except (DocumentError, AttributeError, ValueError) as error:
        raise RunError(
            f"{folder / NAMES} can't be read: {error}", remedy="Remove it.", code="file-unreadable"
        ) from None
