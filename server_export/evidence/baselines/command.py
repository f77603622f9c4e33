"""`prge baseline`: train a bundle's model on the same rows by another method, in PyTorch and in this process.

config.yaml    the settings               metrics.jsonl         what to plot, as of `prge run`
inputs.json    hashes of what went in     run.json, log.txt     what, where, how it ended
final/         the result: a PEFT folder, or all trained parameters
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prge.errors import ConfigError, RunError, shown
from prge.files.bundle import Bundle, open_bundle
from prge.files.documents import DocumentError, read_json
from prge.files.run_folder import CONFIG, FINAL, SUMMARY, run_lock
from prge.host.atomic import write_file
from prge.rows.sources import Part, source_sha256
from prge.rows.task import Task, load_task
from prge.verbs.settings import parse_settings, read_settings, settings_to_yaml
from server_export.evidence.baselines.inputs import read_inputs
from server_export.evidence.baselines.settings import BaselineSettings

INPUTS = "inputs.json"
# What may differ between the parts of one run: where things lie, how fast it goes and how it looks.
_NOT_IDENTITY = frozenset(
    {"bundle", "model", "train", "dev", "test", "task", "out", "resume", "threads", "quiet"}
)


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge baseline --help`."""
    settings = parse_settings(BaselineSettings, argv, "prge baseline")
    print(run(settings))
    return 0


def run(settings: BaselineSettings) -> Path:
    """Train, and write everything into `settings.out`; returns its `final/` folder.

    A folder of the same settings is gone on with; if it is finished, nothing is done.

    Raises:
        PrgeError: bad input, or a run that can't go on.
        KeyboardInterrupt: interrupted by the user; the newest checkpoint is kept.
    """
    bundle = open_bundle(settings.bundle)
    final = settings.out / FINAL
    with run_lock(settings.out):
        task = load_task(settings.task) if settings.task else None
        begin(settings, _identity(bundle, settings, task))
        if final.is_dir() and is_finished(settings.out):
            return final
        inputs = read_inputs(bundle, settings, task)
        # torch and transformers take seconds to import.
        from server_export.evidence.baselines.runner import train_baseline

        train_baseline(settings, inputs)
    return final


def begin(settings: BaselineSettings, identity: dict[str, Any]) -> None:
    """Write down what a new run is, or compare one that was begun with what it was begun as.

    Raises:
        ConfigError: every setting and input that differs.
        RunError: the folder holds a run of another verb.
    """
    config, inputs = settings.out / CONFIG, settings.out / INPUTS
    if not inputs.is_file():
        if (settings.out / SUMMARY).exists():
            raise RunError(
                f"{settings.out} holds a run of another kind", remedy="give another folder with --out"
            )
        write_file(config, settings_to_yaml(settings.resolved()).encode())
        write_file(inputs, (json.dumps(identity, indent=1) + "\n").encode())
        return
    before = asdict(read_settings(BaselineSettings, config, "prge baseline"))
    problems = [
        f"{name} was {shown(before[name])}, is {shown(now)}"
        for name, now in asdict(settings).items()
        if name not in _NOT_IDENTITY and before[name] != now
    ]
    try:
        stored = read_json(inputs)
    except DocumentError as error:
        raise RunError(f"{inputs} is damaged: {error}", remedy="start a new run in another folder") from None
    problems += [f"the {name} is another one" for name in identity if stored.get(name) != identity[name]]
    if problems:
        raise ConfigError(
            "the run was begun with other settings:",
            problems,
            remedy="go on with those, or start a new run in another folder",
        )


def is_finished(folder: Path) -> bool:
    """Whether a run folder's summary says that the run came to its end."""
    try:
        status = read_json(folder / SUMMARY)["run"]["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return status in ("completed", "stopped early")


def _identity(bundle: Bundle, settings: BaselineSettings, task: Task | None) -> dict[str, Any]:
    named: dict[Part, Path | None] = {"train": settings.train, "dev": settings.dev, "test": settings.test}
    return {
        "bundle": bundle.sha256,
        **{part: None if where is None else source_sha256(where, part) for part, where in named.items()},
        # As JSON reads it back.
        "task": json.loads(json.dumps(asdict(task))) if task else None,
    }
