"""The model and rows of a bundle, the same for every method: the driver's objectives, in PyTorch.

The model is the one that transformers has. Where the bundle is quantized, its frozen layers hold the values
that the same quantization leaves of the weights, as floats; activations are not quantized.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from prge.engine import Array, Call, FloatArray, IntArray, TokenSequence
from prge.files.adapter import Adapter
from prge.files.bundle import Bundle
from prge.files.peft import read_lora
from prge.learning.encoder_heads import Heads, fit_heads
from prge.learning.examples import Example, sequences_of
from prge.learning.head import Head
from prge.learning.objectives import Loss
from prge.model_spec import ModelSpec
from server_export.checkpoint.classifier import states_of
from server_export.checkpoint.loading import LoadedModel
from server_export.trace import readout
from server_export.trace.positions import position_numbers


class ModelProblem:
    """A bundle's model with its training rows; `engine` is what the driver's own code scores with.

    `modules` are the layers that the bundle adapts. By their names, `lora_a` [rank, in] are its frozen
    matrices, unscaled, `lora_b` [out, rank] is where training starts, and `scales` are alpha / rank.

    Args:
        bundle: gives the adapter, and what its programs read of a row.
        base: the model, as `open_base` gives it; a method changes it in place.
        train: training rows as examples of the bundle.
        pad: token to fill rows up with.
        batch_size: examples of a step.
        seed: of the run.
        head_folds: encoders: folds of the heads for the training rows.
        head: the checkpoint's own, in the place of fitted ones.
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
        # A method trains what it says, whatever the bundle's own adapter is.
        self.modules = tuple(replace(module, trains_a=False) for module in bundle.chain.modules)
        self.engine = ProblemEngine(self, bundle.chain.model)
        self.positions = position_numbers(base, bundle.chain.model.sequence_length)
        self.accepted = frozenset(inspect.signature(self.model.forward).parameters)
        start, names = read_lora(bundle.adapter), [module.name for module in self.modules]
        self.lora_a = {name: torch.from_numpy(start.lora_a[name]) for name in names}
        self.lora_b = {name: torch.from_numpy(start.lora_b[name]) for name in names}
        self.scales = {name: start.scale_of(name) for name in names}
        self._head_folds = head_folds
        self._asked: torch.Tensor | None = None
        self._pool = readout.pooling_of(bundle.pooling)
        if not self.is_encoder:
            self.model.get_output_embeddings().register_forward_pre_hook(self._keep_asked)

    @property
    def is_encoder(self) -> bool:
        """Whether the model has pooled states."""
        return self.bundle.chain.is_encoder

    def rows(self, examples: Sequence[Example]) -> int:
        """Rows that one forward of these examples computes."""
        return len(sequences_of(examples))

    def loss(self, examples: Sequence[Example]) -> torch.Tensor:
        """Mean loss of training examples as prge/learning/objectives.py has it, f64 []."""
        head = None
        if self.is_encoder:
            # The heads of the training rows are constants of the loss.
            heads = self.prepare_heads()
            head = heads.cross_fitted or heads.head
        outputs = self.outputs(sequences_of(examples))
        loss = Loss(examples, outputs.detach().numpy()[None], head=head)
        # The outputs times their slopes: it has the loss's derivatives, and gets its value.
        slopes = torch.from_numpy(loss.by_output / len(examples))
        along = (outputs.double() * slopes).sum()
        return along + (float(loss.losses.mean()) - along.detach())

    def outputs(self, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        """What an engine answers of sequences: f32 [targets], or [sequences, width] of an encoder."""
        tokens, mask = padded(sequences, self.pad)
        if self.is_encoder:
            return self._pooled(tokens, mask)
        counts = [len(sequence.targets) for sequence in sequences]
        targets = [target for sequence in sequences for target in sequence.targets]
        positions = np.array([target.position for target in targets])
        asked = np.array([target.token for target in targets])
        return self._log_probabilities(tokens, np.repeat(np.arange(len(counts)), counts), positions, asked)

    def prepare_heads(self) -> Heads:
        """Fit an encoder's heads on the training rows with the model as it is, unless they are there."""
        if self.is_encoder and self.heads.head is None:
            zeros = Adapter.zeros(self.modules)
            self.heads = fit_heads(self.engine, zeros, self.train, self._head_folds)
        return self.heads

    def merge_adapter(self) -> None:
        """Add the bundle's adapter to the weights, for methods that have no place for it."""
        with torch.no_grad():
            for name, lora_b in self.lora_b.items():
                self.model.get_submodule(name).weight += self.scales[name] * (lora_b @ self.lora_a[name])

    def _pooled(self, tokens: Array, mask: Array) -> torch.Tensor:
        """States of an encoder's rows, f32 [rows, width], of tokens and mask i64 [rows, length]."""
        longest = int(mask.sum(1).max())
        seen = torch.from_numpy(mask[:, :longest])
        output = self._call(tokens[:, :longest], attention_mask=seen)
        return self._pool(states_of(output, longest), seen.to(torch.float32))

    def _log_probabilities(self, tokens: Array, row: Array, position: Array, target: Array) -> torch.Tensor:
        """log p(target) at some positions of some rows, f32 [asked]; `row`, `position`, `target` i64 [asked].

        The vocabulary head sees each position once that is asked for, and no other.
        """
        longest = int(position.max()) + 1
        asked, where = np.unique(row * longest + position, return_inverse=True)
        self._asked = torch.from_numpy(asked)
        try:
            logits = self._call(tokens[:, :longest]).logits[0]
        finally:
            self._asked = None
        logprobs = torch.log_softmax(logits, -1)
        return logprobs[torch.from_numpy(where), torch.from_numpy(target)]

    def _call(self, tokens: Array, **more: torch.Tensor) -> Any:
        arguments: dict[str, Any] = {"use_cache": False, "position_ids": self.positions[:, : tokens.shape[1]]}
        taken = {name: value for name, value in arguments.items() if name in self.accepted}
        return self.model(input_ids=torch.from_numpy(tokens), return_dict=True, **taken, **more)

    def _keep_asked(self, head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if self._asked is None:
            return inputs
        states = inputs[0]
        return (states.reshape(-1, states.shape[-1]).index_select(0, self._asked)[None],)


class ProblemEngine:
    """Implements prge.engine.ForwardEngine; the adapter is the one inside the model, whatever is given."""

    def __init__(self, problem: ModelProblem, model: ModelSpec) -> None:
        self._problem = problem
        self.model = model

    def forward(self, call: Call) -> FloatArray:
        """See ForwardEngine."""
        with torch.no_grad():
            outputs: FloatArray = self._problem.outputs(call.sequences).numpy()[None]
        return outputs


def padded(sequences: Sequence[TokenSequence], pad: int) -> tuple[IntArray, IntArray]:
    """Tokens of sequences, and a mask of them, i64 [sequences, longest]."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    tokens = np.full((len(sequences), longest), pad, np.int64)
    mask = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
        mask[row, : len(sequence.tokens)] = 1
    return tokens, mask
