"""`prge fleet serve`: begins a fleet or goes on with one, and takes its rounds over the network."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

from device_runner.fleet.agreement import Agreement, Plan, task_sha256
from device_runner.fleet.common import first_state, pack_state
from device_runner.fleet.coordinator import AGREEMENT, Coordinator, begin_fleet
from prge.atomic import write_file
from prge.bundle import Bundle, open_bundle
from prge.checkpoint import HEAD, TrainingState, read_head
from prge.engine import EngineName
from prge.errors import ConfigError, RunError
from prge.head import Head
from prge.journal import Record
from prge.peft import find_adapter, read_peft
from prge.rows.task import Task, load_task
from prge.run_folder import run_lock
from prge.settings import Bytes, read_settings, settings_to_yaml
from prge.terminal import best_effort

SETTINGS = "serve.yaml"


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Plan):
    """Begin a fleet: wait for devices, take its rounds, write the adapter."""

    bundle: Path
    """Folder that `prge export` wrote; every device has the same one."""
    out: Path
    """Folder of the fleet to make: journal, checkpoints, the adapter in final/."""
    task: str | None = None
    """Task name or YAML file, as of `prge run`; every device has the same one."""
    adapter: Path | None = None
    """Where to start: a run, checkpoint or PEFT folder. An encoder's fleet starts from a run's, for its head:
    train a few steps on rows of your own. Default: the bundle's adapter."""
    dev: Path | None = None
    """Development rows that the server has, to score the adapter on; the best is kept."""
    columns: list[str] = field(default_factory=list)
    """Names for columns of the rows: prompt=question completion=answer."""
    dev_limit: int | None = None
    """Score the first so many of them."""
    evaluate_every: int = 1
    """Rounds between scores."""
    per_round: int = 10
    """Devices that a round asks."""
    least_devices: int = 2
    """A round waits until so many devices are there, and needs as many answers."""
    seconds: float = 600.0
    """A round waits so long for answers; devices that have said nothing then are left out."""
    host: str = "127.0.0.1"
    """Address to listen at; other machines reach 0.0.0.0 or ::."""
    port: int = 9092
    """Port to listen at; 0: a free one. It is printed."""
    keys: Path | None = None
    """The folder server/ of `prge fleet keys`: encryption, and only devices whose keys are in it."""
    insecure: bool = False
    """Instead of --keys: no encryption, and anyone who reaches the address may join. To try things out."""
    engine: EngineName = "auto"
    """Scores --dev; see `prge run --help`."""
    threads: int | None = None
    """Threads of the engine."""
    memory: Bytes | None = None
    """Weights that may stay loaded, such as 200MB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.keys is None) != self.insecure:
            raise ConfigError(
                "these settings can't be used:",
                ["give --keys or --insecure, and not both"],
                remedy="`prge fleet keys` makes keys",
            )


def serve(settings: ServeSettings, resume: bool = False) -> Path:
    """Take a fleet's rounds; returns the folder of the final adapter.

    Args:
        settings: of the fleet.
        resume: go on with the fleet that is in `out`.

    Raises:
        PrgeError: bad input, an address that can't be listened at, no answers round after round.
    """
    from flwr.app import Context, RecordDict

    from device_runner.fleet.flower_server import server_app
    from device_runner.fleet.keys import ServerKeys
    from device_runner.fleet.superlink import superlink

    keys = None if settings.keys is None else ServerKeys.open(settings.keys)
    bundle = open_bundle(settings.bundle)
    task = load_task(settings.task) if settings.task else None
    if not resume:
        _begin(settings, bundle, task)
    with (
        run_lock(settings.out),
        _coordinator(settings, bundle, task) as coordinator,
        superlink(settings.out, settings.host, settings.port, keys) as link,
    ):
        _tell(f"{settings.out}: {coordinator.round} of {coordinator.rounds} rounds are done")
        _tell(f"listening at {link.address} for {_whom(keys)}; Ctrl-C ends it")
        with link.run() as grid:
            app = server_app(coordinator, settings.least_devices, settings.seconds, _tell)
            app(grid=grid, context=Context(0, 0, {}, RecordDict(), {}))
        final = coordinator.write_final()
    _tell(str(final))
    return final


def resumed(folder: Path) -> ServeSettings:
    """The settings that a fleet's folder was begun with.

    Raises:
        RunError: it is no fleet's folder.
    """
    if not (folder / AGREEMENT).is_file() or not (folder / SETTINGS).is_file():
        raise RunError(f"{folder} is no fleet's folder", remedy="begin a fleet with `prge fleet serve`")
    return read_settings(ServeSettings, folder / SETTINGS, "prge fleet serve")


def _begin(settings: ServeSettings, bundle: Bundle, task: Task | None) -> None:
    """Make a fleet's folder."""
    plan = Plan(**{item.name: getattr(settings, item.name) for item in fields(Plan)})
    source, head, start = None, None, ""
    if settings.adapter is not None:
        source = find_adapter(settings.adapter)
        adapter = read_peft(source, bundle.contract.modules, bundle.adapter)
        head = _head(source, bundle, task)
        start = hashlib.sha256(pack_state(first_state(plan, adapter, head))).hexdigest()
    if bundle.contract.is_encoder and head is None:
        raise ConfigError(
            "these settings can't be used:",
            ["--adapter is missing: an encoder's fleet starts from a run that has a head"],
            remedy="train a few steps on rows of your own with `prge run`, and give its folder",
        )
    agreement = Agreement(plan, bundle.sha256, task_sha256(task), start)
    begin_fleet(settings.out, bundle, agreement, head, source)
    write_file(settings.out / SETTINGS, settings_to_yaml(settings).encode())


def _head(source: Path, bundle: Bundle, task: Task | None) -> Head | None:
    if not (bundle.contract.is_encoder and task is not None and (source / HEAD).is_file()):
        return None
    head = Head(len(task.classes), bundle.contract.width)
    read_head(source / HEAD, head)
    return head


@contextmanager
def _coordinator(settings: ServeSettings, bundle: Bundle, task: Task | None) -> Iterator[Coordinator]:
    with Coordinator(
        settings.out,
        bundle,
        settings.per_round,
        settings.least_devices,
        settings.seconds,
        _scorer(settings, bundle, task),
        settings.evaluate_every,
    ) as coordinator:
        yield coordinator


def _scorer(
    settings: ServeSettings, bundle: Bundle, task: Task | None
) -> Callable[[TrainingState], Record] | None:
    """What scores development rows; None without."""
    if settings.dev is None:
        return None
    from device_runner.engines.opening import open_engines
    from prge.rows.example_building import load_examples
    from prge.rows.readers import Selection
    from prge.rows.scoring import evaluate
    from prge.rows.sources import read_source
    from prge.rows.tokenizer import bundle_tokenizer

    tokenizer = bundle_tokenizer(bundle)
    examples, report = load_examples(
        read_source(settings.dev, "dev", settings.columns),
        tokenizer,
        bundle.score_contract,
        task,
        Selection(limit=settings.dev_limit),
        training=False,
    )
    _tell(report.text())
    engine = open_engines(bundle, settings.threads, settings.engine, settings.memory, only_scoring=True).score

    def score(state: TrainingState) -> Record:
        return evaluate(engine, state.adapter, examples, task, state.head, tokenizer.pad_id)[0]

    return score


def _whom(keys: object) -> str:
    from device_runner.fleet.keys import ServerKeys

    if not isinstance(keys, ServerKeys):
        return "anyone, without encryption"
    return f"{len(keys.devices)} devices with keys"


def _tell(line: str) -> None:
    with best_effort(sys.stdout):
        print(line, flush=True)
