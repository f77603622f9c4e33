"""`prge baseline`: train a bundle's model on the same rows by another method, in PyTorch and in this process.

config.yaml    the settings               metrics.jsonl         what to plot, as of `prge run`
final/         the result: a PEFT folder, or all trained parameters
run.json, log.txt                         what, where, how it ended
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from prge.errors import RunError
from prge.files.bundle import open_bundle
from prge.files.documents import DocumentError, read_json
from prge.files.run_folder import (
    CONFIG,
    FINAL,
    FINISHED,
    JOURNAL,
    LOG,
    METRICS,
    SUMMARY,
    check_new_run,
    run_lock,
)
from prge.host.atomic import write_file
from prge.verbs.settings import is_config_of, parse_settings, settings_to_yaml
from server_export.evidence.baselines.inputs import read_inputs
from server_export.evidence.baselines.settings import BEST, BaselineSettings


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge baseline --help`."""
    print(run(parse_settings(BaselineSettings, argv, "prge baseline")))
    return 0


def run(settings: BaselineSettings) -> Path:
    """Train, and write everything into `settings.out`; returns its `final/` folder.

    A run that was killed is started again in its folder.

    Raises:
        PrgeError: bad input, a folder that holds something else, or a training that diverged.
        KeyboardInterrupt: interrupted by the user.
    """
    settings = settings.dated()
    bundle = open_bundle(settings.bundle)
    with run_lock(settings.out):
        _check_folder(settings.out)
        inputs = read_inputs(bundle, settings)
        _make_room(settings.out)
        write_file(settings.out / CONFIG, settings_to_yaml(settings.resolved()).encode())
        # torch and transformers take seconds to import.
        from server_export.evidence.baselines.training import train_baseline

        train_baseline(settings, bundle, inputs)
    return settings.out / FINAL


def _check_folder(folder: Path) -> None:
    """Raises RunError unless a baseline can begin in a folder: a killed one may lie there, nothing else."""
    if (folder / SUMMARY).exists() or (folder / JOURNAL).exists():
        try:
            run = read_json(folder / SUMMARY)["run"]
            is_baseline, is_finished = "method" in run, run["status"] in FINISHED
        except (OSError, DocumentError, KeyError, TypeError):
            is_baseline = is_finished = False
        if not is_baseline or is_finished:
            code, kind = (
                ("run-exists", "a finished run")
                if is_baseline
                else ("folder-occupied", "a run of another kind")
            )
            raise RunError(f"{folder} holds {kind}", remedy="give another folder with --out", code=code)
    elif not is_config_of(BaselineSettings, folder / CONFIG):
        check_new_run(folder, [BEST])


def _make_room(folder: Path) -> None:
    """Remove what a killed baseline left in a folder."""
    for name in (SUMMARY, METRICS, LOG, BEST):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / FINAL, ignore_errors=True)
