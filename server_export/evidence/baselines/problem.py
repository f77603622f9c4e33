"""The model, rows and loss of a bundle in PyTorch, the same for every method.

The model is the one of transformers. If the bundle is quantized, the frozen layers hold the dequantized
values of the same quantization as floats; activations are not quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from prge.formats.adapter import Adapter
from prge.formats.bundle import Bundle
from prge.formats.peft import read_peft
from prge.objectives.classification_head import Head
from prge.objectives.examples import Example, sequences_of
from prge.objectives.objective import Loss
from prge.training.encoder_heads import Heads, fit_heads
from server_export.checkpoint.loading import LoadedModel
from server_export.oracle import TorchEngine


class ModelProblem:
    """A bundle's model with its training rows.

    `engine` computes the outputs of a device's engine. `values` f32 [adapter size] are the adapter's values
    after `insert_adapter`, and None before it or after `merge_adapter`.

    Args:
        bundle: gives the adapter and the bounds of rows.
        base: the model, as `open_base` returns it; a method changes it in place.
        train: training rows as examples of the bundle.
        pad: padding token.
        batch_size: examples of a step.
        seed: seed of the run.
        head_folds: folds that cross-fit an encoder's heads on the training rows.
        head: the checkpoint's own head, instead of fitted ones.
    """

    def __init__(
        self,
        bundle: Bundle,
        base: LoadedModel,
        train: Sequence[Example],
        pad: int,
        batch_size: int,
        seed: int,
        head_folds: int = 10,
        head: Head | None = None,
    ) -> None:
        self.bundle = bundle
        self.model: nn.Module = base.model
        self.train = train
        self.pad = pad
        self.batch_size = batch_size
        self.seed = seed
        self.heads = Heads(head)
        self.engine = TorchEngine.of(bundle, base, padding=pad)
        self.values: nn.Parameter | None = None
        self._head_folds = head_folds
        self._start()

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder with pooled hidden states."""
        return self.bundle.chain.is_encoder

    @property
    def adapter(self) -> Adapter:
        """The adapter with its current values; zeros if none was inserted."""
        modules = self.engine.model.modules
        return (
            Adapter.zeros(modules) if self.values is None else Adapter(modules, self.values.detach().numpy())
        )

    def forward_passes(self, examples: Sequence[Example]) -> int:
        """Return the forward passes of these examples, one for each sequence."""
        return len(sequences_of(examples))

    def loss(self, examples: Sequence[Example]) -> torch.Tensor:
        """Return the mean loss of training examples, f64 [], as prge/objectives/objective.py defines it."""
        head = None
        if self.is_encoder:
            # The heads of the training rows are constants of the loss.
            heads = self.prepare_heads()
            head = heads.cross_fitted or heads.head
        outputs = self.engine.outputs(sequences_of(examples), self.values)
        loss = Loss(examples, outputs.detach().numpy()[None], head=head)
        # The product of the outputs and their gradients has the loss's derivatives; the value is added.
        by_output = torch.from_numpy(loss.grad_outputs / len(examples))
        product = (outputs.double() * by_output).sum()
        return product + (float(loss.losses.mean()) - product.detach())

    def prepare_heads(self) -> Heads:
        """Return an encoder's heads; the first call fits them on the training rows with the current model."""
        if self.is_encoder and self.heads.head is None:
            self.heads = fit_heads(self.engine, self.adapter, self.train, self._head_folds)
        return self.heads

    def insert_adapter(self, *, trains_a: bool = False) -> nn.Parameter:
        """Insert the bundle's adapter into the model and return its values.

        Args:
            trains_a: whether `lora_a` is trained too, whatever the bundle trains.
        """
        self.values = nn.Parameter(torch.from_numpy(self._start(trains_a=trains_a).values))
        return self.values

    def merge_adapter(self) -> None:
        """Add the bundle's adapter to the weights, for methods that don't train it."""
        with torch.no_grad():
            for name, lora_b in self._start().lora_b.items():
                change = torch.from_numpy(lora_b).T @ self.engine.lora_a[name]
                self.model.get_submodule(name).weight += change

    def _start(self, *, trains_a: bool = False) -> Adapter:
        """Return the bundle's adapter with the matrices that are trained."""
        modules = tuple(replace(module, trains_a=trains_a) for module in self.bundle.chain.modules)
        self.engine.model = replace(self.engine.model, modules=modules)
        return read_peft(self.bundle.adapter, modules)
