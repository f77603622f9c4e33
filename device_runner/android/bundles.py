"""Exporting the bundles of a bench on the workstation, one after another, into a cache."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device_runner.android.packages import digest
from prge import __version__
from prge.cli.subprocesses import output_of, run_verb, write_verb_config
from prge.errors import PrgeError, RunError
from prge.formats.bundle import MANIFEST
from prge.formats.run_folder import as_run_error
from prge.system.progress import format_duration
from prge.system.user_cache import user_cache
from prge.training.costs import format_bytes
from prge.training.trials import Trial

_SCHEME = "8da4w"
_PARAMETER_BYTES = 2  # random weights are bfloat16


@dataclass(frozen=True)
class BenchModel:
    """The model of a trial: its shape with random weights, or a folder or hub id with this shape."""

    trial: Trial
    real: str | None = None
    tiny: bool = False

    @property
    def name(self) -> str:
        """The value of `prge export --model`."""
        return self.real or f"random:{self.trial.shape}{':tiny' * self.tiny}"

    @property
    def label(self) -> str:
        """The name for published results, which shows no path of this machine."""
        return Path(self.name).name if Path(self.name).is_dir() else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the export; trials with equal settings share a bundle."""
        trial, layers = self.trial, self.trial.layers
        return {
            "model": self.name,
            "quantize": _SCHEME,
            "rank": trial.rank,
            "target_modules": layers if isinstance(layers, str) else list(layers),
            # The published figures are for training both matrices.
            "adapter": "lora",
            "roles": list(trial.roles),
            "sequence_length": trial.tokens,
        }

    @property
    def folder(self) -> str:
        """Name of the bundle's folder."""
        return f"{self.trial.shape}-{digest(json.dumps([self.settings, __version__]))[:12]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BenchModel) and self.settings == other.settings

    def __hash__(self) -> int:
        return hash(self.folder)


def make_bundles(models: Sequence[BenchModel], cache: Path | None) -> dict[BenchModel, Path | PrgeError]:
    """Return the bundle of each model, exported if necessary, or the error of its export.

    Raises:
        RunError: the storage has too little room for the bundles to export.
    """
    folder = user_cache("bench") if cache is None else cache.absolute()
    with as_run_error(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    bundles: dict[BenchModel, Path | PrgeError] = {model: folder / model.folder for model in models}
    lacking = [model for model in bundles if not (folder / model.folder / MANIFEST).is_file()]
    if not lacking:
        return bundles
    _check_storage(folder, lacking)
    from tqdm import tqdm

    with tqdm(lacking, desc="bundles", unit="bundle", disable=None) as bar:
        for model in bar:
            bar.set_postfix_str(model.trial.shape)
            if bar.disable:
                print(f"bundle of {model.name}", flush=True)
            try:
                settings = {**model.settings, "out": folder / model.folder, "overwrite": True}
                run_verb(*write_verb_config("export", settings, folder / f"{model.folder}.yaml"), quiet=True)
            except PrgeError as error:
                bundles[model] = error
    return bundles


def _check_storage(folder: Path, models: Sequence[BenchModel]) -> None:
    """Print the storage and time that exports take; raises RunError if the storage is too small."""
    if all(model.tiny for model in models):
        return
    sizes, seconds, temporary = [], 0.0, 0
    for model in models:
        print(f"estimating {model.name}", file=sys.stderr, flush=True)
        words = write_verb_config(
            "estimate", {**model.settings, "json": True}, folder / f"{model.folder}.yaml"
        )
        estimate = json.loads(output_of(*words))
        sizes.append(estimate["weights_bytes"] + estimate["programs_bytes"])
        seconds += estimate["export"]["seconds"]
        if model.real is None:  # the random weights are stored during the export
            temporary = max(temporary, _PARAMETER_BYTES * estimate["model"]["parameters"])
    needed, free = sum(sizes) + temporary, shutil.disk_usage(folder).free
    print(
        f"{len(models)} bundles in {folder}: {format_bytes(sum(sizes))}, and temporarily "
        f"{format_bytes(temporary)} more; about {format_duration(seconds)}",
        flush=True,
    )
    if needed > free:
        raise RunError(
            f"{folder} has {format_bytes(free)} free, but {format_bytes(needed)} are needed.",
            remedy="Free some storage, give another folder with --cache, or choose fewer trials with --only.",
            code="storage-full",
        )
