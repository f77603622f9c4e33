"""The bundles of a bench: made on the workstation by `prge export`, one after another, and kept there."""

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
from prge.errors import PrgeError, RunError
from prge.files.bundle import MANIFEST
from prge.files.run_folder import reported
from prge.host.progress import duration
from prge.host.user_cache import user_cache
from prge.learning.costs import bytes_text
from prge.running.trials import Trial
from prge.verbs.starting import answer_of, configured, run_verb

_SCHEME = "8da4w"
_PARAMETER_BYTES = 2  # of random weights, in bfloat16


@dataclass(frozen=True)
class Model:
    """What a trial is taken of: the shape with random weights, or a folder or hub id with that shape."""

    trial: Trial
    real: str | None = None
    tiny: bool = False

    @property
    def name(self) -> str:
        """As `prge export --model` has it."""
        return self.real or f"random:{self.trial.shape}{':tiny' * self.tiny}"

    @property
    def label(self) -> str:
        """The same for others, who don't care for a folder's place."""
        return Path(self.name).name if Path(self.name).is_dir() else self.name

    @property
    def settings(self) -> dict[str, Any]:
        """Of its export. Trials that differ in nothing else share a bundle."""
        trial, layers = self.trial, self.trial.layers
        return {
            "model": self.name,
            "quantize": _SCHEME,
            "rank": trial.rank,
            "target_modules": layers if isinstance(layers, str) else list(layers),
            # Others train both matrices.
            "adapter": "lora",
            "roles": list(trial.roles),
            "sequence_length": trial.tokens,
        }

    @property
    def folder(self) -> str:
        """The name of its bundle."""
        return f"{self.trial.shape}-{digest(json.dumps([self.settings, __version__]))[:12]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self.settings == other.settings

    def __hash__(self) -> int:
        return hash(self.folder)


def make_bundles(models: Sequence[Model], cache: Path | None) -> dict[Model, Path | PrgeError]:
    """The bundle of each model, or why there is none.

    Raises:
        RunError: there is no room for those that are lacking.
    """
    place = user_cache("bench") if cache is None else cache.absolute()
    with reported(place):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    made: dict[Model, Path | PrgeError] = {model: place / model.folder for model in models}
    lacking = [model for model in made if not (place / model.folder / MANIFEST).is_file()]
    if not lacking:
        return made
    _need_room(place, lacking)
    from tqdm import tqdm

    with tqdm(lacking, desc="bundles", unit="bundle", disable=None) as bar:
        for model in bar:
            bar.set_postfix_str(model.trial.shape)
            if bar.disable:
                print(f"bundle of {model.name}", flush=True)
            try:
                settings = {**model.settings, "out": place / model.folder, "overwrite": True}
                run_verb(*configured("export", settings, place / f"{model.folder}.yaml"), quiet=True)
            except PrgeError as error:
                made[model] = error
    return made


def _need_room(place: Path, models: Sequence[Model]) -> None:
    """Tell what bundles take; raises RunError where there is less."""
    if all(model.tiny for model in models):
        return
    sizes, seconds, beside = [], 0.0, 0
    for model in models:
        print(f"estimating {model.name}", file=sys.stderr, flush=True)
        words = configured("estimate", {**model.settings, "json": True}, place / f"{model.folder}.yaml")
        told = json.loads(answer_of(*words))
        sizes.append(told["weights_bytes"] + told["programs_bytes"])
        seconds += told["export"]["seconds"]
        if model.real is None:  # its weights are there while it is exported
            beside = max(beside, _PARAMETER_BYTES * told["model"]["parameters"])
    wanted, free = sum(sizes) + beside, shutil.disk_usage(place).free
    print(
        f"{len(models)} bundles in {place}: {bytes_text(sum(sizes))}, and {bytes_text(beside)} for a while; "
        f"about {duration(seconds)}",
        flush=True,
    )
    if wanted > free:
        raise RunError(
            f"{place} has {bytes_text(free)} free, {bytes_text(wanted)} are needed",
            remedy="free some storage, give another folder with --cache, or fewer trials with --only",
            code="storage-full",
        )
