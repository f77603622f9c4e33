"""The methods of `prge baseline` by name; their modules are imported when one is asked for.

Such a module has a function `prepare(problem: Problem, settings: BaselineSettings) -> Method`.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any, Literal

from prge.errors import ConfigError

BaselineOptimizer = Literal["adam", "adamw", "sgd", "momentum"]

ALL_OPTIMIZERS: tuple[BaselineOptimizer, ...] = ("adam", "adamw", "sgd", "momentum")


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of PyTorch; `beta2` is that of adam and adamw."""

    name: BaselineOptimizer
    beta2: float = 0.999


ADAM = Optimizer("adam")


@dataclass(frozen=True)
class MethodEntry:
    """What a method is, where it is and what it takes.

    `module` is one of this package; `title` says what the method is, and `learning_rate` is the middle of a
    search. `optimizers` are those that it has, its default first. `adapts`: it trains the bundle's adapter
    itself; for the others an adapter that isn't zero is merged into the model beforehand. `settings` belong
    to it. `forward_only`: it has no backward pass.
    """

    module: str
    title: str
    learning_rate: float
    optimizers: tuple[BaselineOptimizer, ...] = ALL_OPTIMIZERS
    adapts: bool = False
    settings: tuple[str, ...] = ()
    forward_only: bool = False

    def load(self) -> Any:
        """The method's module."""
        return importlib.import_module(f"server_export.evidence.baselines.{self.module}")


METHODS: dict[str, MethodEntry] = {
    "backprop-lora-fa": MethodEntry(
        "backpropagation", "backpropagation through the same adapter", 1e-2, adapts=True
    ),
    "backprop-lora": MethodEntry(
        "backpropagation", "backpropagation through a whole LoRA: lora_A learns too", 3e-3, adapts=True
    ),
    "backprop-full": MethodEntry("backpropagation", "backpropagation through all weights", 3e-4),
    "mezo": MethodEntry(
        "mezo",
        "MeZO: the difference between two perturbations of all weights",
        3e-4,
        optimizers=("sgd",),
        settings=("epsilon",),
        forward_only=True,
    ),
    "executorch-training": MethodEntry(
        "executorch_training",
        "ExecuTorch's training of the same adapter",
        1.0,
        optimizers=("sgd",),
        adapts=True,
    ),
    "far": MethodEntry(
        "far",
        "FAR: the nodes of the feed-forward networks that a priming moves most",
        1e-2,
        settings=("retention", "nodes", "priming_share", "priming_learning_rate", "keep_primed"),
    ),
    "tinytl-biases": MethodEntry("tinytl", "TinyTL: biases of linear layers and norms", 3e-3),
    "tinytl-lite-residual": MethodEntry(
        "tinytl",
        "TinyTL: biases, and a narrow branch beside every block",
        3e-3,
        settings=("branch_pool", "branch_width"),
    ),
    "sparse-bp": MethodEntry(
        "sparse",
        "sparse update: biases and channels that an analysis chose",
        1e-3,
        settings=(
            "memory_share",
            "channel_fractions",
            "top_blocks",
            "analysis_steps",
            "analysis_learning_rate",
            "search",
            "held_out",
        ),
    ),
    "quantized-training": MethodEntry(
        "quantized",
        "int8 weights of the blocks, trained as codes",
        1e-3,
        optimizers=("sgd",),
        settings=("rounding", "scaling", "calibration_rows"),
    ),
}


def find_method(name: str) -> MethodEntry:
    """The method of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in METHODS:
        nearest = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(
            "the method isn't known:",
            [f"--method is {name!r}{hint}"],
            remedy="methods are " + ", ".join(METHODS),
        )
    return METHODS[name]
