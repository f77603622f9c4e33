"""A real, tiny model in numpy that answers the contract: an oracle whose gradient is known in closed form.

A bigram model with LoRA-FA on its only layer: logits = (W + lora_a.T @ lora_b).T @ embedding[token].
The encoder variant answers the mean embedding, through the same layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from prge.contract import AdaptedModule, Contract
from prge.engine import Array, FloatArray

MODULE = "layer"


class NumpyEngine:
    """Implements prge.engine.Engine in float64, so that differences show the method's error alone."""

    def __init__(
        self,
        copies: int = 1,
        batch_size: int = 4,
        *,
        vocabulary: int = 11,
        width: int = 6,
        rank: int = 3,
        positions: int = 4,
        sequence_length: int = 8,
        encoder: bool = False,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        out = width if encoder else vocabulary
        self.embedding = random.normal(size=(vocabulary, width))
        self.weight = random.normal(size=(width, out))
        self.lora_a = random.normal(size=(rank, width))
        self.calls = 0
        self.contract = Contract(
            kind="stack",
            readout="pooled" if encoder else "logprobs",
            copies=copies,
            batch_size=batch_size,
            sequence_length=sequence_length,
            positions=0 if encoder else positions,
            width=width if encoder else 0,
            vocabulary_size=vocabulary,
            label_tokens=(),
            modules=(AdaptedModule(MODULE, rank, width, out),),
        )

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine.forward."""
        self.calls += 1
        for spec in self.contract.inputs:
            assert inputs[spec.name].shape == spec.shape, spec
            assert inputs[spec.name].dtype == spec.dtype, spec
        copies, rows = self.contract.copies, self.contract.rows
        lora_b = inputs[f"lora_b.{MODULE}"].astype(np.float64)
        states = self.embedding[inputs["tokens"]].reshape(copies, rows // copies, -1, self.embedding.shape[1])
        update = np.einsum("rd,cro->cdo", self.lora_a, lora_b)
        outputs = np.einsum("cntd,cdo->cnto", states, self.weight + update).reshape(rows, states.shape[2], -1)
        if self.contract.is_encoder:
            mask = inputs["attention_mask"][..., None]
            return {"pooled": (np.tanh(outputs) * mask).sum(1) / mask.sum(1)}
        logprobs = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
        read = np.take_along_axis(logprobs, inputs["positions"][..., None], 1)
        return {"logprobs": np.take_along_axis(read, inputs["targets"][..., None], 2)[..., 0]}

    def with_copies(self, copies: int) -> NumpyEngine:
        """The same model exported with another number of copies."""
        contract = self.contract
        return NumpyEngine(
            copies,
            contract.batch_size,
            vocabulary=len(self.embedding),
            width=self.embedding.shape[1],
            rank=contract.modules[0].rank,
            positions=max(contract.positions, 1),
            sequence_length=contract.sequence_length,
            encoder=contract.is_encoder,
        )


def completion_gradient(engine: NumpyEngine, lora_b: FloatArray, tokens: Array, slots: Array) -> FloatArray:
    """Exact d loss / d lora_b [rank, out] of one row; its loss is the mean over (position, target) slots."""
    gradient = np.zeros(lora_b.shape)
    for position, target in slots:
        state = engine.embedding[tokens[position]]
        logits = state @ (engine.weight + engine.lora_a.T @ lora_b)
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        probability[target] -= 1
        gradient += np.outer(engine.lora_a @ state, probability) / len(slots)
    return gradient
