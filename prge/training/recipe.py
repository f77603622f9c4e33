"""The recipe of a run: all settings that determine its bits, and the objects constructed from them.

A journal starts with the recipe, and a resumed run is compared with it. Paths, the engine, threads, memory
and constraints aren't part of it; the bundle and the rows are identified by hashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from prge.data.tokenization.control_tokens import ControlTokens
from prge.errors import ConfigError
from prge.formats.adapter import Adapter, adapter_size
from prge.formats.journal import Record
from prge.model_spec import AdaptedModule, matrices
from prge.objectives.examples import Example
from prge.objectives.preferences import ObjectiveFlags
from prge.training.checkpoint import TrainingState
from prge.training.encoder_heads import Heads
from prge.training.estimators.protocol import Estimator
from prge.training.estimators.rewards import REWARD_OBJECTIVES, RewardFlags, reward_estimator
from prge.training.estimators.table import EstimatorFlags, make_estimator
from prge.training.loop import TrainingSettings
from prge.training.optimizers import Optimizer, PerValueRates, make_optimizer, schedule
from prge.training.sampler import Sampler
from prge.training.settings import OptimizerFlags, TrainingLoopFlags

Precision = Literal["float32", "float16"]


@dataclass(frozen=True, kw_only=True)
class RunFlags(OptimizerFlags, EstimatorFlags, RewardFlags, ObjectiveFlags, TrainingLoopFlags):
    """Settings that determine the bits of a run, other than its bundle and rows."""

    epochs: float | None = None
    """Number of passes over the training rows, instead of --steps; may be a fraction, such as 0.5."""
    batch_size: int | None = None
    """Examples of an optimizer step: texts, completions, chats, pairs, or rows of a task. Default: as many
    examples as have 4 sequences together, such as 2 pairs; at least 1."""
    head_learning_rate: float = 0.0
    """Encoders: train the fitted head with its exact gradient at this peak learning rate, without folds; 0:
    keep the head fixed."""
    trunk_cache_dtype: Precision = "float32"
    """Precision of the hidden states in the cache of --trunk-cache-bytes. float16 halves its size but rounds
    them."""
    checkpoint_dtype: Precision = "float32"
    """exact: precision of the activation checkpoints between blocks. float16 halves their size but rounds
    them. If they don't fit into --memory, they are stored in a file of the run folder."""

    @property
    def steps_per_batch(self) -> int:
        """See TrainingLoopFlags."""
        return self.num_iterations if self.objective == "grpo" else 1

    def loop_settings(self, *, save_steps: int, until: int | None = None) -> TrainingSettings:
        """See TrainingLoopFlags; negative rewards and policy gradients may rise without a divergence."""
        settings = super().loop_settings(save_steps=save_steps, until=until)
        return (
            replace(settings, divergence_ratio=math.inf) if self.objective in REWARD_OBJECTIVES else settings
        )


@dataclass(frozen=True, kw_only=True)
class Recipe(RunFlags):
    """The identity of a run.

    `columns`, `control_tokens` and `append_eos` determine how rows become examples.
    """

    columns: list[str] = field(default_factory=list)
    control_tokens: ControlTokens = "special"
    append_eos: bool = True

    @classmethod
    def of(cls, settings: Any) -> Recipe:
        """Return the recipe of settings that have all of its fields."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})

    @classmethod
    def from_record(cls, stored: Mapping[str, Any]) -> Recipe:
        """Read the recipe of a journal record.

        Raises:
            ConfigError: the record has settings of an earlier version that don't exist any more.
        """
        if unknown := stored.keys() - {each.name for each in fields(cls)}:
            raise ConfigError(
                "The run was started by an earlier version of prge:",
                [f"this version has no setting {', '.join(sorted(unknown))}"],
                remedy="Finish it with the version that run.json names, or start a new run from its adapter "
                "with --adapter.",
                code="run-of-other-version",
            )
        return cls(**stored)

    def to_record(self) -> Record:
        """Return the recipe as a journal stores it."""
        return asdict(self)

    def new_estimator(self) -> Estimator:
        """Construct the estimator."""
        return reward_estimator(make_estimator(self), self.objective, self.beta, self)

    def sampler(self, examples: Sequence[Example]) -> Sampler:
        """Construct the sampler of examples; raises ValueError if `batch_size` isn't set."""
        if self.batch_size is None:
            raise ValueError("batch_size is not set")
        return Sampler(examples, self.batch_size, self.seed, self.loss_normalisation, self.steps_per_batch)

    def new_state(self, adapter: Adapter, heads: Heads) -> TrainingState:
        """Return the state before the first step, with a copy of the adapter that the run starts from."""
        adapter = adapter.copy()
        head_optimizer = None
        if heads.head is not None and self.head_learning_rate:
            head_optimizer = make_optimizer("adam", heads.head.size)
        optimizer = self.new_optimizer(adapter.modules)
        return TrainingState(adapter, optimizer, heads.head, head_optimizer, heads.cross_fitted)

    def new_optimizer(self, modules: Sequence[AdaptedModule]) -> Optimizer:
        """Construct the optimizer of an adapter; raises ValueError if its name or `adam_beta2` isn't set."""
        if self.optimizer is None or self.adam_beta2 is None:
            raise ValueError("optimizer or adam_beta2 is not set")
        optimizer = make_optimizer(
            self.optimizer,
            adapter_size(modules),
            self.momentum,
            self.momentum,
            self.adam_beta2,
            self.weight_decay,
        )
        if self.loraplus_lr_ratio == 1:
            return optimizer
        trained = matrices(modules)
        ratios = (self.loraplus_lr_ratio if matrix.letter == "b" else 1.0 for matrix in trained)
        rates = [np.full(matrix.size, ratio) for matrix, ratio in zip(trained, ratios, strict=True)]
        return PerValueRates(optimizer, np.concatenate(rates).astype(np.float32))

    def learning_rates(self) -> Callable[[int], dict[str, float]]:
        """Return a function from a step to its learning rates, by their names in the journal."""
        peaks = {"learning_rate": self.learning_rate}
        if self.head_learning_rate:
            peaks["head_learning_rate"] = self.head_learning_rate
        rates = {
            name: schedule(self.lr_scheduler_type, peak, self.steps, self.resolved_warmup_steps)
            for name, peak in peaks.items()
        }
        return lambda step: {name: rate(step) for name, rate in rates.items()}
