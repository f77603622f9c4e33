"""Settings of `prge baseline`; those that `prge run` has too mean the same. Importable without torch."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from prge.errors import ConfigError
from prge.learning.estimators.table import ESTIMATORS
from prge.running.training_flags import TrainingFlags
from prge.verbs.bounds import flag
from server_export.evidence.baselines.methods import METHODS, BaselineOptimizer, Optimizer, find_method

# Parameters of the best step, in the run folder while it trains.
BEST = "best.pt"

SearchName = Literal["greedy", "evolutionary"]


@dataclass(frozen=True, kw_only=True)
class BaselineSettings(TrainingFlags):
    """Train the model of a bundle by another method, in PyTorch.

    Of the bundle its adapter, tokenizer, longest row and quantization are used.
    """

    method: str
    """What trains: backprop-lora-fa, backprop-lora, backprop-full, mezo, executorch-training, far,
    tinytl-biases, tinytl-lite-residual, sparse-bp, quantized-training."""
    model: str
    """Folder or hub id of the model that the bundle was exported from."""
    threads: int | None = None
    """Threads that compute; default: PyTorch's own choice."""
    test: Path | None = None
    """Test rows, scored once at the end with the result. Of a folder the file test."""

    epsilon: float = 1e-3
    """mezo: length of a perturbation, in units of the parameters."""
    retention: float = 0.4
    """far: share of the feed-forward nodes that learn."""
    nodes: Literal["primed", "random"] = "primed"
    """far: those that a priming moves most, or random ones."""
    priming_share: float = 0.05
    """far: steps of full fine-tuning beforehand, as a share of all."""
    priming_learning_rate: float = 2e-5
    """far: rate of these."""
    keep_primed: bool = False
    """far: go on from the weights that the priming ends with instead of the first ones."""
    branch_pool: int = 2
    """tinytl-lite-residual: tokens that a branch makes one of."""
    branch_width: float = 0.125
    """tinytl-lite-residual: width of a branch as a share of the model's."""
    memory_share: float = 0.25
    """sparse-bp: memory limit, as a share of what a full update of all blocks takes."""
    channel_fractions: list[float] = field(default_factory=lambda: [0.25, 1.0])
    """sparse-bp: shares of its input channels that a layer may learn with."""
    top_blocks: int = 0
    """sparse-bp: consider the top blocks alone, so many; 0: all."""
    analysis_steps: int = 4
    """sparse-bp: steps that every candidate is tried for."""
    analysis_learning_rate: float = 1e-4
    """sparse-bp: rate of these."""
    search: SearchName = "greedy"
    """sparse-bp: how what learns is searched under the limit: greedy or evolutionary."""
    held_out: int = 32
    """sparse-bp: training rows that candidates are judged by."""
    rounding: Literal["stochastic", "nearest", "latent"] = "stochastic"
    """quantized-training: how codes are rounded after a step; latent: kept as floats, rounded when used."""
    scaling: bool = True
    """quantized-training: divide gradients by the squares of their units."""
    calibration_rows: int = 16
    """quantized-training: rows that the units of layer inputs are measured on."""
    batch_size: int | None = None
    """Sequences of a step; default: 4, or as many as the widest row has."""
    optimizer: BaselineOptimizer | None = None
    """sgd, momentum, adam or adamw; default: adam, or what the method alone has."""
    beta2: float = ESTIMATORS["exact"].beta2
    """adam's and adamw's second coefficient."""

    def resolved(self) -> BaselineSettings:
        """The same settings with absolute paths, for whoever uses them in another folder."""
        rest = super().resolved()
        return replace(rest, model=str(Path(self.model).resolve())) if Path(self.model).exists() else rest

    def __post_init__(self) -> None:
        entry = find_method(self.method)
        problems = self.shared_problems(self.steps)
        defaults = {
            item.name: item.default if item.default_factory is MISSING else item.default_factory()
            for item in fields(self)
        }
        if not self.channel_fractions:
            problems.append("--channel-fractions is empty, must have a share or more")
        if self.optimizer is not None and self.optimizer not in entry.optimizers:
            problems.append(
                f"--optimizer is {self.optimizer}, {self.method} has {', '.join(entry.optimizers)} only"
            )
        problems += [
            f"{flag(name)} belongs to {', '.join(owners)}, the method is {self.method}"
            for name, owners in _owners().items()
            if self.method not in owners and getattr(self, name) != defaults[name]
        ]
        if problems:
            raise ConfigError(
                "these settings can't be used:", problems, remedy="`prge baseline --help` explains them"
            )

    @property
    def chosen_optimizer(self) -> Optimizer:
        """The optimizer that was asked for, or the method's default."""
        return Optimizer(self.optimizer or find_method(self.method).optimizers[0], self.beta2)


def _owners() -> dict[str, list[str]]:
    """Settings of single methods, with the methods that have them."""
    owners: dict[str, list[str]] = {}
    for method, entry in METHODS.items():
        for name in entry.settings:
            owners.setdefault(name, []).append(method)
    return owners
