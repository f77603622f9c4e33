"""Settings of `prge baseline`, importable without torch; shared names mean the same as in `prge run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from prge.cli.bounds import flag
from prge.cli.inputs import TestRows
from prge.errors import ConfigError
from prge.training.estimators.table import ESTIMATORS
from prge.training.settings import TrainingFlags
from server_export.evidence.baselines.methods import METHODS, BaselineOptimizer, MethodName

# Parameters of the best step, kept in the run folder during training.
BEST = "best.pt"

SearchName = Literal["greedy", "evolutionary"]
_IN_BFLOAT16: tuple[MethodName, ...] = ("backprop-lora-fa", "backprop-lora")
# The method that a setting belongs to.
_OWN: dict[str, MethodName] = {
    "epsilon": "mezo",
    "retention": "far",
    "keep_primed": "far",
    "memory_share": "sparse-bp",
    "search": "sparse-bp",
}


@dataclass(frozen=True, kw_only=True)
class BaselineSettings(TrainingFlags):
    """Train the model of a bundle with another method, in PyTorch.

    The bundle gives the adapter, the tokenizer, the maximum row length and the quantization.
    """

    EXAMPLE: ClassVar = (
        "--method backprop-lora --model model --bundle bundle --train rows.jsonl --out baseline"
    )

    method: MethodName
    """Training method."""
    model: str
    """Folder, GGUF file or hub id of the model that the bundle was exported from."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the model's weights and activations, for methods of LoRA. The adapter is float32."""
    threads: int | None = None
    """Number of threads; default: PyTorch chooses."""
    test: TestRows | None = None
    """Test rows, scored once with the result. For a folder, its file test is used."""

    epsilon: float = 1e-3
    """mezo: scale of the perturbation."""
    retention: float = 0.4
    """far: share of the feed-forward nodes that are trained."""
    keep_primed: bool = False
    """far: continue from the primed weights instead of the initial ones."""
    memory_share: float = 0.25
    """sparse-bp: memory limit, as a share of the memory of a full update of all blocks."""
    search: SearchName = "greedy"
    """sparse-bp: search for the parameters to train within the limit."""
    batch_size: int | None = None
    """Examples per step. Default: as many as have 4 sequences in total, at least 1."""
    optimizer: BaselineOptimizer | None = None
    """Optimizer. Default: adam, or the only one that the method supports."""
    adam_beta2: float = ESTIMATORS["exact"].adam_beta2
    """Second coefficient of adam and adamw."""

    def __post_init__(self) -> None:
        problems, entry = self.shared_problems(self.steps), METHODS[self.method]
        if self.optimizer is not None and self.optimizer not in entry.optimizers:
            problems.append(
                f"--optimizer is {self.optimizer}, {self.method} has {', '.join(entry.optimizers)} only"
            )
        problems += [
            f"{flag(name)} belongs to {owner}, but the method is {self.method}"
            for name, owner in _OWN.items()
            if self.method != owner and getattr(self, name) != getattr(BaselineSettings, name)
        ]
        if self.dtype != "float32" and self.method not in _IN_BFLOAT16:
            problems.append(
                f"--dtype is {self.dtype}, which only {' and '.join(_IN_BFLOAT16)} support, "
                f"but the method is {self.method}"
            )
        if problems:
            raise ConfigError(
                "Cannot use these settings:",
                problems,
                remedy="`prge baseline --help` explains them.",
                code="settings-unusable",
            )

    @property
    def chosen_optimizer(self) -> BaselineOptimizer:
        """The optimizer of the settings, or else the method's default."""
        return self.optimizer or METHODS[self.method].optimizers[0]
