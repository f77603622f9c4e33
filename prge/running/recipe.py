"""A run's recipe: all settings that determine its bits, and what they make.

It is what a journal begins with and what a resumed run is compared with. Where things lie, what computes
them, how fast, and when, is no part of it: hashes tell what the bundle and the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from prge.errors import ConfigError
from prge.files.adapter import Adapter, adapter_size
from prge.files.journal import Record
from prge.learning.checkpoint import TrainingState
from prge.learning.encoder_heads import Heads
from prge.learning.estimators.protocol import Estimator
from prge.learning.estimators.table import EstimatorFlags, make_estimator
from prge.learning.examples import Example
from prge.learning.optimizers import Optimizer, OwnRates, make_optimizer, schedule
from prge.learning.preferences import ObjectiveFlags
from prge.learning.sampling import Sampler
from prge.model_spec import AdaptedModule, matrices
from prge.rows.tokenization.control_tokens import ControlTokens
from prge.running.training_flags import CourseFlags, OptimizerFlags

Precision = Literal["float32", "float16"]


@dataclass(frozen=True, kw_only=True)
class RunFlags(OptimizerFlags, EstimatorFlags, ObjectiveFlags, CourseFlags):
    """The run: what determines its bits, but for its rows and bundle."""

    epochs: float | None = None
    """Times that every training row is seen, instead of --steps; may be a part, such as 0.5."""
    batch_size: int | None = None
    """Examples of an optimizer step: texts, completions, chats, pairs, or rows of a task. Default: as many as
    have 4 sequences together, which is 2 pairs; at least 1."""
    head_learning_rate: float = 0.0
    """Encoders: train the fitted head by its exact gradient at this peak rate, without folds; 0 keeps it."""
    trunk_cache_dtype: Precision = "float32"
    """Precision of what --trunk-cache-bytes keeps. float16 takes half the room and rounds the states."""
    checkpoint_dtype: Precision = "float32"
    """exact: precision of the states between blocks that the way back goes through. float16 takes half the
    room and rounds them. Above --memory they lie in a file of the run folder."""


@dataclass(frozen=True, kw_only=True)
class Recipe(RunFlags):
    """What a run is.

    `columns`, `control_tokens` and `append_eos` say how rows become examples.
    """

    columns: list[str] = field(default_factory=list)
    control_tokens: ControlTokens = "special"
    append_eos: bool = True

    @classmethod
    def of(cls, settings: Any) -> Recipe:
        """The recipe among settings that have all of its fields."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})

    @classmethod
    def from_record(cls, stored: Mapping[str, Any]) -> Recipe:
        """The recipe that a journal has.

        Raises:
            ConfigError: an earlier version wrote it, with settings that this one lacks.
        """
        if unknown := stored.keys() - {each.name for each in fields(cls)}:
            raise ConfigError(
                "the run was begun by an earlier version of prge:",
                [f"this version has no setting {', '.join(sorted(unknown))}"],
                remedy="finish it with the version that run.json names, or start a new run from its adapter "
                "with --adapter",
                code="run-of-other-version",
            )
        return cls(**stored)

    def to_record(self) -> Record:
        """As a journal has it."""
        return asdict(self)

    def new_estimator(self) -> Estimator:
        """What a step's gradient is made by."""
        return make_estimator(self)

    def sampler(self, examples: Sequence[Example]) -> Sampler:
        """The examples of each step; ValueError where their number is not settled."""
        if self.batch_size is None:
            raise ValueError("how many examples a step has is not settled")
        return Sampler(examples, self.batch_size, self.seed, self.loss_normalisation)

    def new_state(self, adapter: Adapter, heads: Heads) -> TrainingState:
        """The state before the first step, from the adapter that a run starts with."""
        adapter = adapter.copy()
        head_optimizer = None
        if heads.head is not None and self.head_learning_rate:
            head_optimizer = make_optimizer("adam", heads.head.size)
        optimizer = self.new_optimizer(adapter.modules)
        return TrainingState(adapter, optimizer, heads.head, head_optimizer, heads.cross_fitted)

    def new_optimizer(self, modules: Sequence[AdaptedModule]) -> Optimizer:
        """The optimizer of an adapter's values; ValueError where it is not settled."""
        if self.optimizer is None or self.beta2 is None:
            raise ValueError("which optimizer is not settled")
        optimizer = make_optimizer(
            self.optimizer,
            adapter_size(modules),
            self.momentum,
            self.momentum,
            self.beta2,
            self.weight_decay,
        )
        if self.lora_plus == 1:
            return optimizer
        trained = matrices(modules)
        ratios = (self.lora_plus if matrix.letter == "b" else 1.0 for matrix in trained)
        rates = [np.full(matrix.size, ratio) for matrix, ratio in zip(trained, ratios, strict=True)]
        return OwnRates(optimizer, np.concatenate(rates).astype(np.float32))

    def learning_rates(self) -> Callable[[int], dict[str, float]]:
        """Learning rates of a step, by their names in the journal."""
        peaks = {"learning_rate": self.learning_rate}
        if self.head_learning_rate:
            peaks["head_learning_rate"] = self.head_learning_rate
        rates = {name: schedule(self.schedule, peak, self.steps, self.rising) for name, peak in peaks.items()}
        return lambda step: {name: rate(step) for name, rate in rates.items()}
