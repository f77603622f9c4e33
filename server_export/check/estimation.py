"""What an export would make and cost, in numbers, from a configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prge.contract import Contract
from prge.costs import (
    PROGRAM_BYTES,
    Outline,
    RunMemory,
    Weights,
    arena_bytes,
    bytes_text,
    estimated_memory,
    export_memory,
    export_seconds,
    file_bytes,
    together,
    weights_of,
    work_of,
)
from prge.errors import PrgeError
from prge.exact import ROWS_OF_A_STEP
from prge.memory import memory_info
from prge.progress import duration
from server_export.settings import ExportConfig

if TYPE_CHECKING:
    from server_export.check.calibration import Rates
    from server_export.model.loading import LoadedModel

ENGINES = ("native", "torch")


@dataclass(frozen=True)
class RowLengths:
    """An epoch of training rows: how many, and by batch the length of the method that it takes."""

    rows: int
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """A program that isn't there yet, in numbers."""

    config: ExportConfig
    outline: Outline
    contract: Contract
    score: Contract | None
    weights: Weights
    stored_bytes: int
    score_weights: Weights
    data: RowLengths | None = None

    @property
    def calls(self) -> int:
        """Calls of the program in a step."""
        if self.contract.kind != "stack":
            return 1
        return math.ceil(2 * self.config.queries / self.contract.copies)

    @property
    def steps(self) -> list[Contract]:
        """Contracts of the methods that take steps, shortest rows first."""
        return self._variants(self.contract)

    @property
    def methods(self) -> list[Contract]:
        """Contracts of all methods of the program; a trunk and the step above it count as one."""
        return [*self.steps, *([] if self.score is None else self._variants(self.score))]

    @property
    def export_bytes(self) -> int:
        """Peak memory of the export."""
        return export_memory(
            self.outline, self.weights, self.config.quantize, self.stored_bytes, self.methods
        )

    @property
    def export_seconds(self) -> float:
        """Time of the export on two cores of a server."""
        return export_seconds(self.outline, len(self.methods))

    @property
    def program_bytes(self) -> int:
        """Bytes of the program's file."""
        return file_bytes(self.outline, self.methods, self.weights)

    def memory(self, engine: str, scoring: bool = False) -> RunMemory:
        """Memory of a run on an engine while it takes steps, or scores with a method of its own.

        Methods of several lengths are loaded side by side where a run would do so by itself, each with its
        own copy of the weights; the native engine may do with one.
        """
        contract, weights = self.contract, self.weights
        if scoring and self.score is not None:
            contract, weights = self.score, self.score_weights
        variants = self._variants(contract)
        arenas = sum(arena_bytes(self.outline, variant) for variant in variants)
        if weights.stored * len(variants) + arenas > PROGRAM_BYTES:
            variants = variants[-1:]
        return together([estimated_memory(self.outline, variant, weights, engine) for variant in variants])

    def to_json(self, rates: Rates | None) -> dict[str, Any]:
        """All of it, with seconds where rates of this machine are known."""
        contract = self.contract
        rows = ROWS_OF_A_STEP * contract.rows if contract.is_exact else contract.computed_rows
        steps = [
            {"sequence_length": variant.sequence_length, **self.cost(variant, rates)}
            for variant in self.steps
        ]
        step = {
            "calls": self.calls,
            "rows": rows * self.calls,
            **steps[-1],
            "lengths": steps[:-1],
        }
        scoring = None
        if self.score is not None:
            score = work_of(self.outline, self.score)
            scoring = {
                "rows": self.score.rows,
                "operations": score.operations,
                "seconds": rates.seconds(score) if rates else None,
            }
        return {
            "model": {
                "name_or_path": self.config.model,
                "parameters": self.outline.parameters,
                "blocks": self.outline.blocks,
                "adapted_layers": len(contract.modules),
                "adapter_parameters": sum(module.rank * module.out_features for module in contract.modules),
            },
            "program_bytes": self.program_bytes,
            "weights": {
                "packed_bytes": self.weights.packed,
                "table_bytes": self.weights.table,
                "other_bytes": self.weights.other,
            },
            "step": step,
            "scoring": scoring,
            "data": None if self.data is None else self._data_json(self.data, rates),
            "run_memory": {engine: self.memory(engine).to_json() for engine in ENGINES},
            "score_memory": None
            if self.score is None
            else {engine: self.memory(engine, scoring=True).to_json() for engine in ENGINES},
            "export": {"peak_bytes": self.export_bytes, "seconds": self.export_seconds},
            "rates": None if rates is None else rates.to_json(),
        }

    def cost(self, contract: Contract, rates: Rates | None) -> dict[str, Any]:
        """What a step of one length computes and takes, also above a trunk that is cached."""
        parts = {"": "whole", **({"cached_": "step"} if self.config.trunk_cache else {})}
        cost: dict[str, Any] = {}
        for prefix, part in parts.items():
            work = work_of(self.outline, contract, part)
            cost[f"{prefix}operations"] = work.operations * self.calls
            cost[f"{prefix}seconds"] = rates.seconds(work) * self.calls if rates else None
        return cost

    def _variants(self, contract: Contract) -> list[Contract]:
        """A contract for every length, shortest first."""
        return [*(contract.shortened(length) for length in self.config.shorter_lengths), contract]

    def _data_json(self, data: RowLengths, rates: Rates | None) -> dict[str, Any]:
        """What an epoch of the rows takes: every batch runs at the length that holds its longest row."""
        costs = {variant.sequence_length: self.cost(variant, rates) for variant in self.steps}
        batches = {length: data.batches.count(length) for length in costs}

        def total(name: str) -> Any:
            return sum(count * costs[length][name] for length, count in batches.items())

        return {
            "rows": data.rows,
            "steps": len(data.batches),
            "steps_of_length": {str(length): count for length, count in batches.items()},
            "operations": total("operations"),
            "seconds": total("seconds") if rates else None,
        }


def estimate(config: ExportConfig) -> Estimate:
    """What an export with these settings would make, without loading weights.

    Raises:
        PrgeError: the model or the settings can't be used, as the export itself would say.
    """
    from server_export.model.loading import outline_model
    from server_export.quiet import quiet_libraries

    quiet_libraries()
    pooled = None if config.readout is None else config.readout == "pooled"
    return estimate_of(config, outline_model(config.model, pooled=pooled, revision=config.revision))


def estimate_of(config: ExportConfig, loaded: LoadedModel) -> Estimate:
    """The same for a model, which may lack its weights; it is changed."""
    from server_export.model.loading import checkpoint_bytes
    from server_export.model.lora_fa import convert_conv1d
    from server_export.model.outline import outline_of
    from server_export.model.program import planned_contracts
    from server_export.model.quantization import EMBEDDING_BYTES

    convert_conv1d(loaded.model)
    # Their number is all that counts.
    label_tokens = range(len(config.label_words or []))
    contract, score, below = planned_contracts(config, loaded, label_tokens)
    outline = outline_of(loaded, contract, below, config.shorter_lengths)
    int8_table = config.quantize != "fp32" and 4 * outline.table_numbers >= EMBEDDING_BYTES
    weights, score_weights = (
        weights_of(outline, method, config.quantize, int8_table) for method in (contract, score or contract)
    )
    return Estimate(config, outline, contract, score, weights, checkpoint_bytes(loaded), score_weights)


def announce(config: ExportConfig) -> None:
    """Print what an export will take, before it begins, and a warning if the machine lacks the memory."""
    try:
        estimated = estimate(config)
    except PrgeError:
        return  # the export says it better, or can do without
    print(
        f"estimated  {bytes_text(estimated.export_bytes)} of memory at the peak of the export, "
        f"{duration(estimated.export_seconds)}, program {bytes_text(estimated.program_bytes)}",
        flush=True,
    )
    available = memory_info().get("MemAvailable")
    if available is not None and estimated.export_bytes > available:
        print(f"hint: this machine has {bytes_text(available)} of memory available", flush=True)
