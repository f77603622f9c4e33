"""Settings of `prge baseline`; those that `prge run` has too mean the same. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prge.errors import ConfigError
from prge.learning.estimators.table import ESTIMATORS
from prge.running.training_flags import TrainingFlags
from prge.verbs.bounds import flag
from prge.verbs.inputs import TestRows
from server_export.evidence.baselines.methods import METHODS, BaselineOptimizer, MethodName

# Parameters of the best step, in the run folder while it trains.
BEST = "best.pt"

SearchName = Literal["greedy", "evolutionary"]
# Settings that one method has.
_OWN: dict[str, MethodName] = {
    "epsilon": "mezo",
    "retention": "far",
    "keep_primed": "far",
    "memory_share": "sparse-bp",
    "search": "sparse-bp",
}


@dataclass(frozen=True, kw_only=True)
class BaselineSettings(TrainingFlags):
    """Train the model of a bundle by another method, in PyTorch.

    Of the bundle its adapter, tokenizer, longest row and quantization are used.
    """

    method: MethodName
    """What trains."""
    model: str
    """Folder, GGUF file or hub id of the model that the bundle was exported from."""
    threads: int | None = None
    """Threads that compute; default: PyTorch's own choice."""
    test: TestRows | None = None
    """Test rows, scored once at the end with the result. Of a folder the file test."""

    epsilon: float = 1e-3
    """mezo: length of a perturbation, in units of the parameters."""
    retention: float = 0.4
    """far: share of the feed-forward nodes that learn."""
    keep_primed: bool = False
    """far: go on from the weights that the priming ends with instead of the first ones."""
    memory_share: float = 0.25
    """sparse-bp: memory limit, as a share of what a full update of all blocks takes."""
    search: SearchName = "greedy"
    """sparse-bp: how what learns is searched under the limit."""
    batch_size: int | None = None
    """Examples of a step. Default: as many as have 4 sequences together, at least 1."""
    optimizer: BaselineOptimizer | None = None
    """Default: adam, or what the method alone has."""
    beta2: float = ESTIMATORS["exact"].beta2
    """adam's and adamw's second coefficient."""

    def __post_init__(self) -> None:
        problems, entry = self.shared_problems(self.steps), METHODS[self.method]
        if self.optimizer is not None and self.optimizer not in entry.optimizers:
            problems.append(
                f"--optimizer is {self.optimizer}, {self.method} has {', '.join(entry.optimizers)} only"
            )
        problems += [
            f"{flag(name)} belongs to {owner}, the method is {self.method}"
            for name, owner in _OWN.items()
            if self.method != owner and getattr(self, name) != getattr(BaselineSettings, name)
        ]
        if problems:
            raise ConfigError(
                "these settings can't be used:",
                problems,
                remedy="`prge baseline --help` explains them",
                code="settings-unusable",
            )

    @property
    def chosen_optimizer(self) -> BaselineOptimizer:
        """The optimizer that was asked for, or the method's default."""
        return self.optimizer or METHODS[self.method].optimizers[0]
