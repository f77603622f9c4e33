"""How a fleet stands, from the server's folder alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from device_runner.fleet.coordinator import agreement_of
from device_runner.fleet.serve import NAMES
from prge.errors import RunError
from prge.files.documents import DocumentError, read_json
from prge.files.journal import Journal, Record
from prge.files.run_folder import FINAL, JOURNAL, is_held

# Of an evaluation's record: what is no score.
_NO_SCORES = ("kind", "step", "value", "examples")


@dataclass
class DeviceStatus:
    """What a device has done: rounds that it answered, was silent in, and why it refused or was refused."""

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
class Status:
    """How a fleet stands. Bytes are of all rounds; `privacy_epsilon` is the largest that a device spent."""

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
        """Lines for a terminal."""
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


def read_status(folder: Path) -> Status:
    """How the fleet of a server's folder stands; the server may run meanwhile.

    Raises:
        RunError: it is no fleet's folder, or its journal is damaged.
    """
    if not (folder / JOURNAL).is_file():
        raise RunError(
            f"{folder} is no fleet's folder",
            remedy="give the --out of `prge fleet serve`",
            code="not-a-fleet",
        )
    plan = agreement_of(folder).plan
    journal = Journal(folder / JOURNAL, writable=False)
    rounds, evaluations = (
        [record for record in journal.records if record["kind"] == each] for each in ("round", "evaluation")
    )
    names = _names(folder)
    devices = {name: DeviceStatus() for name in names.values()}
    for record in rounds:
        with journal.reading(record):
            _count(record, names, devices)
    state = "done" if (folder / FINAL).is_dir() else "running" if is_held(folder) else "stopped"
    scores = evaluations[-1] if evaluations else {}
    return Status(
        *(str(folder), state, len(rounds), plan.rounds, journal.steps, devices),
        bytes_up=sum(record["bytes_up"] for record in rounds),
        bytes_down=sum(record["bytes_down"] for record in rounds),
        loss=rounds[-1]["loss"] if rounds else None,
        privacy_epsilon=max((record["privacy_epsilon"] for record in rounds), default=0.0),
        evaluation={name: value for name, value in scores.items() if name not in _NO_SCORES},
    )


def _count(record: Record, names: dict[int, str], devices: dict[str, DeviceStatus]) -> None:
    """Add what devices did in a round, by its line in the journal."""

    def device(node: int) -> DeviceStatus:
        return devices.setdefault(names.get(node, str(node)), DeviceStatus())

    for node in record["answered"]:
        device(node).answered += 1
    for node in record["silent"]:
        device(node).silent += 1
    for node, reason in record["refused"].items():
        device(int(node)).refused.append(reason)


def _names(folder: Path) -> dict[int, str]:
    """What devices are called whose keys the server knows, by the ids of their nodes."""
    if not (folder / NAMES).is_file():
        return {}
    try:
        return {int(node): str(name) for node, name in read_json(folder / NAMES).items()}
    except (DocumentError, AttributeError, ValueError) as error:
        raise RunError(
            f"{folder / NAMES} can't be read: {error}", remedy="remove it", code="file-unreadable"
        ) from None
