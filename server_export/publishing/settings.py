"""Settings of `prge publish`. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prge.bounds import bound_problems
from prge.errors import ConfigError


@dataclass(frozen=True)
class PublishConfig:
    """Publish a trained adapter."""

    source: Path
    """Run folder, checkpoint or PEFT folder with the trained adapter."""

    out: Path
    """Folder to write."""

    bundle: Path | None = None
    """Bundle that the adapter was trained with; without it the one that the run's config.yaml names."""

    model: str | None = None
    """Folder or hub id of the base model; without it the one that the bundle records, if still there."""

    revision: str | None = None
    """Revision of a hub model; without it the one that the bundle names."""

    format: Literal["peft", "merged", "program"] = "peft"
    """peft: an adapter for PEFT; merged: a Hugging Face model; program: an ExecuTorch inference program."""

    sequence_length: int | None = None
    """program: tokens that it takes; without it the bundle's length."""

    quantize: str | None = None
    """program: quantization of the frozen weights; without it the bundle's."""

    overwrite: bool = False
    """Replace the folder if it was published before."""

    def __post_init__(self) -> None:
        problems = bound_problems(self)
        if self.format != "program":
            problems += [
                f"{name} is for the format program, but format is {self.format}"
                for name in ("sequence_length", "quantize")
                if getattr(self, name) is not None
            ]
        if problems:
            raise ConfigError("these settings can't be used:", problems)
