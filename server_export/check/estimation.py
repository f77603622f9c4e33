"""What an export would make and cost, in numbers, from a configuration alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prge.errors import ConfigError
from prge.files.signatures import DECODE, PREFILL, STACK
from prge.host.atomic import check_place
from prge.host.memory import available_memory, memory_info
from prge.host.progress import duration
from prge.learning.costs import (
    Outline,
    StepShape,
    Weights,
    bytes_text,
    export_memory,
    export_seconds,
    megabytes,
    programs_bytes,
    weights_of,
)
from prge.learning.estimators.table import ESTIMATORS, EstimatorName, fitting
from prge.model_spec import ModelSpec
from server_export.settings import EstimateConfig, ExportConfig

if TYPE_CHECKING:
    from server_export.source import Source


@dataclass(frozen=True)
class Estimate:
    """A bundle that isn't there yet, in numbers.

    `positions` are those of the model; None: any number. `calibrates`: int4 layers are calibrated, if any are
    int4.
    """

    outline: Outline
    weights: Weights
    scheme: str
    roles: tuple[str, ...]
    readout: str
    vocabulary_size: int
    positions: int | None
    calibrates: bool = False

    def exported_as(self, scheme: str, roles: Collection[str]) -> Estimate:
        """The same model with frozen weights in another scheme, and programs of other roles."""
        roles = _own_roles(self.readout, roles)
        weights = weights_of(self.outline, scheme, _has_int8_table(self.outline, scheme), roles)
        return replace(self, weights=weights, scheme=scheme, roles=roles)

    @property
    def export_bytes(self) -> int:
        """Peak memory of the export."""
        return export_memory(self.outline, self.scheme, self.roles, self._calibrates)

    @property
    def export_seconds(self) -> float:
        """Time of the export on two cores of a server."""
        return export_seconds(self.outline, self.roles, self._calibrates)

    @property
    def _calibrates(self) -> bool:
        return self.calibrates and self.scheme == "8da4w"

    @property
    def programs_bytes(self) -> int:
        """Bytes of the programs."""
        return programs_bytes(self.outline, self.roles)

    @property
    def estimators(self) -> list[EstimatorName]:
        """Those that the roles allow, the best first."""
        return fitting(self.roles)

    @property
    def model(self) -> ModelSpec:
        """What callers of an engine of the bundle must know."""
        return ModelSpec(
            self.readout, self.outline.width, self.vocabulary_size, self.outline.longest, self.outline.modules
        )

    def shape(self, config: EstimateConfig, estimator: EstimatorName, tokens: int, targets: int) -> StepShape:
        """Of a run's steps, whose sequences have so many tokens and targets at most.

        Raises:
            ConfigError: rows are longer than the bundle's, or it lacks the estimator's role.
        """
        entry = ESTIMATORS[estimator]
        problems: dict[str, str] = {}
        if tokens > self.outline.longest:
            longest = self.outline.longest
            problems["row-too-long"] = f"tokens is {tokens}, rows of the bundle have up to {longest}"
        if entry.role not in self.roles:
            problems["role-missing"] = f"estimator is {estimator}, but roles lack {entry.role}"
        if problems:
            raise ConfigError("the run doesn't fit the bundle:", problems.values(), code=next(iter(problems)))
        return StepShape(
            entry.role,
            config.batch_size,
            tokens,
            max(targets, 1),
            self.vocabulary_size,
            copies=entry.copies(config.queries),
            queries=entry.directions(config.queries),
        )


def estimate(config: ExportConfig) -> Estimate:
    """What an export with these settings would make, without loading weights.

    Raises:
        PrgeError: the model or the settings can't be used, as the export itself would say.
    """
    from server_export.source import open_source

    return estimate_of(config, open_source(config))


def estimate_of(config: ExportConfig, source: Source) -> Estimate:
    """The same of a source that is open."""
    from server_export.checkpoint.loading import vocabulary_size
    from server_export.trace.positions import position_count

    outline, readout = source.costs, source.readout
    roles = _own_roles(readout, config.roles)
    weights = weights_of(outline, config.quantize, _has_int8_table(outline, config.quantize), roles)
    vocabulary, most = vocabulary_size(source.loaded.model), position_count(source.loaded)
    calibrates = config.rounding != "nearest"
    return Estimate(outline, weights, config.quantize, roles, readout, vocabulary, most, calibrates)


def _own_roles(readout: str, roles: Collection[str]) -> tuple[str, ...]:
    """Those of the roles that a bundle with the readout has; `stack` is always there."""
    of_texts = () if readout == "logprobs" else (PREFILL, DECODE)
    return tuple(role for role in dict.fromkeys((STACK, *roles)) if role not in of_texts)


def _has_int8_table(outline: Outline, scheme: str) -> bool:
    from server_export.quantize.quantization import EMBEDDING_BYTES

    return scheme != "fp32" and 4 * outline.table_numbers >= EMBEDDING_BYTES


def announce(estimated: Estimate) -> None:
    """Print what an export will take, before it begins."""
    print(
        f"estimated  {bytes_text(estimated.export_bytes)} of memory at the peak of the export, "
        f"{duration(estimated.export_seconds)}, weights {bytes_text(estimated.weights.stored)}",
        flush=True,
    )


def check_room(estimated: Estimate, folder: Path, memory: int | None = None) -> None:
    """Refuse an export that this machine has no memory or storage for, before its minutes begin.

    Args:
        estimated: what it takes.
        folder: where the bundle's folder will be made.
        memory: bytes that the export may take; None: what is available.

    Raises:
        ConfigError: it takes more memory.
        RunError: the storage has too little room, or can't be written.
    """
    check_place(folder, estimated.weights.stored + estimated.programs_bytes)
    limit = memory
    if limit is None:
        swap = memory_info().get("SwapFree", 0)
        limit = available + swap if (available := available_memory()) else None
    if limit is not None and estimated.export_bytes > limit:
        bound = f"--memory is {megabytes(limit)}" if memory else f"{megabytes(limit)} are available"
        raise ConfigError(
            "there is too little memory for the export:",
            [f"it takes about {megabytes(estimated.export_bytes)}, {bound}"],
            remedy="close other programs, export fewer --roles, or say with --memory how much it may take",
            code="memory-too-little",
        )
