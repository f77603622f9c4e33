"""Estimates of an export's size, memory and time, from the model's configuration alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prge.errors import ConfigError
from prge.formats.signatures import DECODE, FORWARD, PREFILL
from prge.model_spec import ModelSpec
from prge.system.atomic import check_writable_folder
from prge.system.memory import available_memory, memory_info
from prge.system.progress import format_duration
from prge.training.costs import (
    ModelSizes,
    StepShape,
    WeightBytes,
    estimate_export_memory,
    estimate_export_seconds,
    estimate_program_bytes,
    estimate_weight_bytes,
    format_bytes,
    format_megabytes,
)
from prge.training.estimators.table import ESTIMATORS, EstimatorName, available_estimators
from server_export.settings import EstimateConfig, ExportConfig

if TYPE_CHECKING:
    from server_export.source import ExportSource


@dataclass(frozen=True)
class Estimate:
    """Sizes and costs of a bundle that is not exported yet.

    Attributes:
        outline: sizes of the model.
        weights: bytes of the weights.
        scheme: quantization of the frozen weights.
        roles: roles of the programs.
        readout: `logprobs` of a decoder, or `pooled` of an encoder.
        vocabulary_size: number of tokens in the vocabulary.
        positions: number of positions of the model; None: unlimited.
        calibrates: whether the export calibrates int4 layers, if there are any.
    """

    outline: ModelSizes
    weights: WeightBytes
    scheme: str
    roles: tuple[str, ...]
    readout: str
    vocabulary_size: int
    positions: int | None
    calibrates: bool = False

    def exported_as(self, scheme: str, roles: Collection[str]) -> Estimate:
        """Return the estimate of the same model with another quantization and other roles."""
        roles = _own_roles(self.readout, roles)
        weights = estimate_weight_bytes(self.outline, scheme, _has_int8_table(self.outline, scheme), roles)
        return replace(self, weights=weights, scheme=scheme, roles=roles)

    @property
    def export_bytes(self) -> int:
        """Peak memory of the export, in bytes."""
        return estimate_export_memory(self.outline, self.scheme, self.roles, self._calibrates)

    @property
    def export_seconds(self) -> float:
        """Duration of the export in seconds, on two cores of a server."""
        return estimate_export_seconds(self.outline, self.roles, self._calibrates)

    @property
    def _calibrates(self) -> bool:
        return self.calibrates and self.scheme == "8da4w"

    @property
    def program_bytes(self) -> int:
        """Size of the programs, in bytes."""
        return estimate_program_bytes(self.outline, self.roles)

    @property
    def estimators(self) -> list[EstimatorName]:
        """The estimators that the roles allow, the best first."""
        return available_estimators(self.roles)

    @property
    def model(self) -> ModelSpec:
        """Description of the model for callers of an engine."""
        return ModelSpec(
            self.readout, self.outline.width, self.vocabulary_size, self.outline.longest, self.outline.modules
        )

    def shape(self, config: EstimateConfig, estimator: EstimatorName, tokens: int, targets: int) -> StepShape:
        """Return the shape of a run's steps.

        Args:
            config: settings of the run.
            estimator: estimator of the run.
            tokens: most tokens of a sequence.
            targets: most targets of a sequence.

        Raises:
            ConfigError: the bundle has no room for the rows, or lacks the estimator's role.
        """
        entry = ESTIMATORS[estimator]
        problems: dict[str, str] = {}
        if tokens > self.outline.longest:
            longest = self.outline.longest
            problems["row-too-long"] = f"tokens is {tokens}, rows of the bundle have up to {longest}"
        if entry.role not in self.roles:
            problems["role-missing"] = f"estimator is {estimator}, but roles lack {entry.role}"
        if problems:
            raise ConfigError("The run doesn't fit the bundle:", problems.values(), code=next(iter(problems)))
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
    """Estimate an export with these settings, without loading weights.

    Raises:
        PrgeError: the model or the settings can't be used, with the error of an export.
    """
    from server_export.source import open_source

    return estimate_source(config, open_source(config))


def estimate_source(config: ExportConfig, source: ExportSource) -> Estimate:
    """Estimate an export of a model that is already open."""
    from server_export.checkpoint.loading import vocabulary_size
    from server_export.trace.positions import position_count

    outline, readout = source.costs, source.readout
    roles = _own_roles(readout, config.roles)
    weights = estimate_weight_bytes(
        outline, config.quantize, _has_int8_table(outline, config.quantize), roles
    )
    vocabulary, most = vocabulary_size(source.loaded.model), position_count(source.loaded)
    calibrates = config.rounding != "nearest"
    return Estimate(outline, weights, config.quantize, roles, readout, vocabulary, most, calibrates)


def _own_roles(readout: str, roles: Collection[str]) -> tuple[str, ...]:
    """Return the roles of a bundle with this readout: `forward` always, generation for decoders only."""
    excluded = () if readout == "logprobs" else (PREFILL, DECODE)
    return tuple(role for role in dict.fromkeys((FORWARD, *roles)) if role not in excluded)


def _has_int8_table(outline: ModelSizes, scheme: str) -> bool:
    """Return whether the export stores the embedding table in int8."""
    from server_export.quantize.quantization import EMBEDDING_BYTES

    return scheme != "fp32" and 4 * outline.table_numbers >= EMBEDDING_BYTES


def print_estimate(estimated: Estimate) -> None:
    """Print the estimated memory, time and size of an export."""
    print(
        f"estimated  {format_bytes(estimated.export_bytes)} of memory at the peak of the export, "
        f"{format_duration(estimated.export_seconds)}, weights {format_bytes(estimated.weights.stored)}",
        flush=True,
    )


def check_resources(estimated: Estimate, folder: Path, memory: int | None = None) -> None:
    """Refuse an export that needs more memory or storage than this machine has.

    Args:
        estimated: estimate of the export.
        folder: parent folder of the bundle.
        memory: bytes of memory that the export may use; None: all that is available.

    Raises:
        ConfigError: the export needs more memory.
        RunError: the storage is too small, or can't be written.
    """
    check_writable_folder(folder, estimated.weights.stored + estimated.program_bytes)
    limit = memory
    if limit is None:
        swap = memory_info().get("SwapFree", 0)
        limit = available + swap if (available := available_memory()) else None
    if limit is not None and estimated.export_bytes > limit:
        bound = (
            f"--memory is {format_megabytes(limit)}" if memory else f"{format_megabytes(limit)} are available"
        )
        raise ConfigError(
            "There is too little memory for the export:",
            [f"it takes about {format_megabytes(estimated.export_bytes)}, {bound}"],
            remedy="Close other programs, export fewer --roles, or allow more with --memory.",
            code="memory-too-little",
        )
