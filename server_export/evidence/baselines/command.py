"""`prge baseline`: train a bundle's model on the same rows with another method, in PyTorch.

config.yaml    the settings               metrics.jsonl         metrics to plot, as `prge run` writes them
final/         the result: a PEFT folder, or all trained parameters
run.json, log.txt                         summary and log of the run
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from prge.cli.settings import is_config_of, parse_settings, settings_to_yaml
from prge.errors import RunError
from prge.formats.bundle import open_bundle
from prge.formats.documents import DocumentError, read_json
from prge.formats.run_folder import (
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
from prge.system.atomic import write_file
from server_export.evidence.baselines.inputs import read_inputs
from server_export.evidence.baselines.settings import BEST, BaselineSettings


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge baseline --help`."""
    print(run(parse_settings(BaselineSettings, argv, "prge baseline")))
    return 0


def run(settings: BaselineSettings) -> Path:
    """Train, write all files into `settings.out`, and return its `final/` folder.

    A run that was killed starts again from the beginning in the same folder.

    Raises:
        PrgeError: the input is bad, the folder holds something else, or the training diverged.
        KeyboardInterrupt: the user interrupted the run.
    """
    settings = settings.with_date()
    bundle = open_bundle(settings.bundle)
    with run_lock(settings.out):
        _check_folder(settings.out)
        inputs = read_inputs(bundle, settings)
        _remove_leftovers(settings.out)
        write_file(settings.out / CONFIG, settings_to_yaml(settings.resolved()).encode())
        # Imported late: torch and transformers take seconds to import.
        from server_export.evidence.baselines.training import train_baseline

        train_baseline(settings, bundle, inputs)
    return settings.out / FINAL


def _check_folder(folder: Path) -> None:
    """Raise RunError unless the folder is empty or holds a baseline that was killed."""
    if (folder / SUMMARY).exists() or (folder / JOURNAL).exists():
        try:
            run = read_json(folder / SUMMARY)["run"]
            is_baseline, is_finished = "method" in run, run["status"] in FINISHED
        except (OSError, DocumentError, KeyError, TypeError):
            is_baseline = is_finished = False
        if not is_baseline or is_finished:
            code, content = (
                ("run-exists", "a finished run")
                if is_baseline
                else ("folder-occupied", "a run that is no baseline")
            )
            raise RunError(f"{folder} holds {content}.", remedy="Give another folder with --out.", code=code)
    elif not is_config_of(BaselineSettings, folder / CONFIG):
        check_new_run(folder, [BEST])


def _remove_leftovers(folder: Path) -> None:
    """Remove the files that a killed baseline left in a folder."""
    for name in (SUMMARY, METRICS, LOG, BEST):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / FINAL, ignore_errors=True)
