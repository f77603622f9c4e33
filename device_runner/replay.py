"""`prge replay`: make a run's adapter again from its journal, without an engine and without the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_runner.session.replaying import replay
from prge.errors import RunError
from prge.files.journal import Journal
from prge.files.peft import HEAD, read_peft
from prge.files.run_folder import FINAL, JOURNAL
from prge.files.tuned import bundle_at
from prge.host.regular_files import read_regular
from prge.learning.checkpoint import write_result
from prge.verbs.inputs import BundleInput, InputFolder
from prge.verbs.outputs import OutputFolder
from prge.verbs.settings import parse_settings


@dataclass(frozen=True)
class ReplaySettings:
    """Make a run's adapter again from its journal alone, and compare it with the run's result."""

    run: InputFolder
    """Run folder."""
    out: OutputFolder
    """PEFT folder to write."""
    bundle: BundleInput | None = None
    """Bundle of the run, for the frozen lora_A; default: the run's own result holds it too."""
    step: int | None = None
    """Step to go to; default: the one that the run's result has."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; see `prge replay --help`."""
    settings = parse_settings(ReplaySettings, argv, "prge replay", ["run"])
    path = settings.run / JOURNAL
    if not path.is_file():
        raise RunError(
            f"{settings.run} is no run: it has no {JOURNAL}",
            remedy="give the folder of a run",
            code="not-a-run",
        )
    with Journal(path, writable=False) as journal:
        state = replay(journal, settings.step)
    final = settings.run / FINAL
    template = bundle_at(settings.bundle) / "adapter" if settings.bundle else final
    write_result(settings.out, state, template)
    print(f"{settings.out}: step {state.step} of {journal.steps}")
    if settings.step is None and final.is_dir():
        stored = read_peft(final, state.adapter.modules)
        same = np.array_equal(stored.values, state.adapter.values) and _head(final) == _head(settings.out)
        print(f"{final}: {'the same bits' if same else 'DIFFERENT'}")
        return 0 if same else 1
    return 0


def _head(folder: Path) -> bytes | None:
    """The file of a classification head; None in a decoder's folder."""
    path = folder / HEAD
    return read_regular(path) if path.exists() else None
