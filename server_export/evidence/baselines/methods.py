"""The methods of `prge baseline` by name; their modules are imported when one is asked for.

Such a module has a function `prepare(problem: Problem, settings: BaselineSettings) -> Method`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

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
    """Where a method is and what it takes.

    `optimizers` are those that it has, its default first. `adapts`: it trains the bundle's adapter itself;
    for the others an adapter that isn't zero is merged into the model beforehand. `settings` belong to it.
    """

    module: str
    help: str
    optimizers: tuple[BaselineOptimizer, ...] = ALL_OPTIMIZERS
    adapts: bool = False
    settings: tuple[str, ...] = ()


METHODS: dict[str, MethodEntry] = {
    "backprop-lora-fa": MethodEntry(
        "server_export.evidence.baselines.lora_fa",
        "exact gradients of lora_B, what prge estimates",
        adapts=True,
    ),
    "backprop-lora": MethodEntry(
        "server_export.evidence.baselines.lora", "exact gradients of lora_A and lora_B", adapts=True
    ),
    "backprop-full": MethodEntry(
        "server_export.evidence.baselines.full", "exact gradients of every parameter"
    ),
    "mezo": MethodEntry(
        "server_export.evidence.baselines.mezo",
        "two forwards of all parameters, perturbed in place",
        optimizers=("sgd",),
        settings=("epsilon",),
    ),
    "executorch-training": MethodEntry(
        "server_export.evidence.baselines.executorch_training",
        "lora_B by ExecuTorch's own training module",
        optimizers=("sgd",),
        adapts=True,
    ),
    "far": MethodEntry(
        "server_export.evidence.baselines.far",
        "the feed-forward nodes that a priming moves most (FAR)",
        settings=("retention", "nodes", "priming_share", "priming_learning_rate", "keep_primed"),
    ),
    "tinytl-biases": MethodEntry("server_export.evidence.baselines.tinytl", "all biases (TinyTL)"),
    "tinytl-lite-residual": MethodEntry(
        "server_export.evidence.baselines.tinytl",
        "all biases, and a narrow branch beside each block (TinyTL)",
        settings=("branch_pool", "branch_width"),
    ),
    "sparse-bp": MethodEntry(
        "server_export.evidence.baselines.sparse",
        "the channels and biases that an analysis chooses under a memory limit",
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
        "server_export.evidence.baselines.quantized",
        "int8 weights themselves, their gradients scaled by their units",
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
