"""The methods of `prge baseline` by name; a method's module is imported on use."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

BaselineOptimizer = Literal["adam", "adamw", "sgd", "momentum"]
MethodName = Literal[
    "backprop-lora-fa",
    "backprop-lora",
    "backprop-full",
    "mezo",
    "executorch-training",
    "far",
    "tinytl-biases",
    "tinytl-lite-residual",
    "sparse-bp",
    "quantized-training",
]


@dataclass(frozen=True)
class MethodEntry:
    """Description of a method.

    Attributes:
        maker: `module:callable` in this package that makes a `TrainingMethod` from a problem and settings.
        title: description of the method for reports.
        learning_rate: centre of a search for the learning rate.
        optimizers: supported optimizers, the default first.
        adapts: whether the method trains the bundle's adapter. For other methods, the adapter is merged into
            the model before the training.
        forward_only: whether the method has no backward pass.
    """

    maker: str
    title: str
    learning_rate: float
    optimizers: tuple[BaselineOptimizer, ...] = ("adam", "adamw", "sgd", "momentum")
    adapts: bool = False
    forward_only: bool = False

    def load(self) -> Any:
        """Import and return the callable that makes the method."""
        return resolve_name(f"server_export.evidence.baselines.{self.maker}")


METHODS: dict[MethodName, MethodEntry] = {
    "backprop-lora-fa": MethodEntry(
        "backpropagation:prepare", "backpropagation through the same adapter", 1e-2, adapts=True
    ),
    "backprop-lora": MethodEntry(
        "backpropagation:prepare",
        "backpropagation through LoRA with lora_A trained too",
        3e-3,
        adapts=True,
    ),
    "backprop-full": MethodEntry("backpropagation:prepare", "backpropagation through all weights", 3e-4),
    "mezo": MethodEntry(
        "mezo:MeZO",
        "MeZO: the difference between two perturbations of all weights",
        3e-4,
        optimizers=("sgd",),
        forward_only=True,
    ),
    "executorch-training": MethodEntry(
        "executorch_training:ExecutorchTraining",
        "ExecuTorch's training of the same adapter",
        1.0,
        optimizers=("sgd",),
        adapts=True,
    ),
    "far": MethodEntry(
        "far:prepare", "FAR: the nodes of the feed-forward networks that a priming moves most", 1e-2
    ),
    "tinytl-biases": MethodEntry("tinytl:prepare", "TinyTL: biases of linear layers and norms", 3e-3),
    "tinytl-lite-residual": MethodEntry(
        "tinytl:prepare", "TinyTL: biases, and a narrow branch parallel to every block", 3e-3
    ),
    "sparse-bp": MethodEntry(
        "sparse:prepare", "sparse update: biases and channels that an analysis chose", 1e-3
    ),
    "quantized-training": MethodEntry(
        "quantized:prepare", "int8 weights of the blocks, trained as codes", 1e-3, optimizers=("sgd",)
    ),
}
