"""`prge replay`: compute a run's adapter again from its journal, without an engine and without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from device_runner.session.replay import replay
from prge.cli.inputs import BundleInput, InputFolder
from prge.cli.outputs import OutputFolder
from prge.cli.settings import parse_settings
from prge.errors import RunError
from prge.formats.journal import Journal
from prge.formats.peft import HEAD, read_peft
from prge.formats.run_folder import FINAL, JOURNAL
from prge.formats.tune_folder import resolve_bundle
from prge.system.regular_files import read_regular
from prge.training.checkpoint import write_result


@dataclass(frozen=True)
class ReplaySettings:
    """Compute a run's adapter again from its journal alone, and compare it with the run's result."""

    EXAMPLE: ClassVar = "run --out replayed"

    run: InputFolder
    """Run folder."""
    out: OutputFolder
    """PEFT folder to write."""
    bundle: BundleInput | None = None
    """Bundle of the run, for the frozen lora_A; default: the run's result, which has it too."""
    step: int | None = None
    """Step to stop after; default: the step of the run's result."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge replay --help`."""
    settings = parse_settings(ReplaySettings, argv, "prge replay", ["run"])
    path = settings.run / JOURNAL
    if not path.is_file():
        raise RunError(
            f"{settings.run} is not a run: it has no {JOURNAL}.",
            remedy="Use the folder of a run.",
            code="not-a-run",
        )
    with Journal(path, writable=False) as journal:
        state = replay(journal, settings.step)
    final = settings.run / FINAL
    template = resolve_bundle(settings.bundle) / "adapter" if settings.bundle else final
    write_result(settings.out, state, template)
    print(f"{settings.out}: step {state.step} of {journal.steps}")
    if settings.step is None and final.is_dir():
        stored = read_peft(final, state.adapter.modules)
        same = np.array_equal(stored.values, state.adapter.values) and _head(final) == _head(settings.out)
        print(f"{final}: {'the same bits' if same else 'DIFFERENT'}")
        return 0 if same else 1
    return 0


def _head(folder: Path) -> bytes | None:
    """Return the file of a classification head; None in a decoder's folder."""
    path = folder / HEAD
    return read_regular(path) if path.exists() else None
