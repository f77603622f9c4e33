"""A real, tiny model in numpy that answers the contract: an oracle whose gradient is known in closed form.

A bigram model with LoRA-FA on its only layer: logits = (W + lora_a.T @ lora_b).T @ embedding[token].
The encoder variant answers the mean embedding, through the same layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from prge.contract import Contract

from prge.engine import Array, Slope
from prge.files.adapter import Adapter
from prge.learning.examples import Batch
from prge.learning.head import Classifier, Head
from prge.learning.objectives import BatchLoss
from prge.model_spec import AdaptedModule
from tests.templates import random_adapter

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
            role="stack",
            readout="pooled" if encoder else "logprobs",
            copies=copies,
            batch_size=batch_size,
            sequence_length=sequence_length,
            positions=0 if encoder else positions,
            width=width if encoder else 0,
            vocabulary_size=vocabulary,
            modules=(AdaptedModule(MODULE, rank, width, out),),
        )

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine.forward."""
        self.calls += 1
        check_inputs(self.contract, inputs)
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

    def tangent(self, queries: int) -> NumpyTangentEngine:
        """The same model with tangents."""
        return NumpyTangentEngine(self, queries)

    def exact(self) -> NumpyExactEngine:
        """The same model with a way back."""
        return NumpyExactEngine(self)

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


class NumpyTangentEngine:
    """Implements prge.engine.Engine for tangent calls of the model, with derivatives in closed form."""

    def __init__(self, model: NumpyEngine, queries: int) -> None:
        self.model = model
        self.calls = 0
        self.contract = replace(model.contract, role="tangent", copies=1, queries=queries)

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See prge.engine.Engine.forward."""
        self.calls += 1
        check_inputs(self.contract, inputs)
        model = self.model
        lora_b, u, v = (inputs[f"{kind}.{MODULE}"].astype(np.float64) for kind in ("lora_b", "u", "v"))
        states = model.embedding[inputs["tokens"]]
        outputs = states @ (model.weight + model.lora_a.T @ lora_b)
        tangents = np.einsum("ntd,rd,qnr,qno->qnto", states, model.lora_a, u, v)
        if self.contract.is_encoder:
            mask = inputs["attention_mask"][..., None]
            squashed = np.tanh(outputs)
            return {
                "pooled": (squashed * mask).sum(1) / mask.sum(1),
                "dpooled": ((1 - squashed**2) * tangents * mask).sum(2) / mask.sum(1),
            }
        logprobs = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
        dlogprobs = tangents - (np.exp(logprobs) * tangents).sum(-1, keepdims=True)
        row = np.arange(self.contract.rows)[:, None]
        return {
            "logprobs": logprobs[row, inputs["positions"], inputs["targets"]],
            "dlogprobs": dlogprobs[:, row, inputs["positions"], inputs["targets"]],
        }


class NumpyExactEngine:
    """Implements prge.engine.Engine for exact calls of the model, with the gradient in closed form."""

    def __init__(self, model: NumpyEngine) -> None:
        self.model = model
        self.calls = 0
        self.contract = replace(model.contract, role="back", copies=1)

    def gradient(self, inputs: Mapping[str, Array], slope: Slope) -> tuple[Array, dict[str, Array]]:
        """See prge.engine.Engine.gradient."""
        self.calls += 1
        check_inputs(self.contract, inputs)
        model = self.model
        states = model.embedding[inputs["tokens"]]
        outputs = states @ (model.weight + model.lora_a.T @ inputs[f"lora_b.{MODULE}"].astype(np.float64))
        if self.contract.is_encoder:
            mask = inputs["attention_mask"][..., None] / inputs["attention_mask"].sum(1)[:, None, None]
            answers = (np.tanh(outputs) * mask).sum(1)
            by_output = slope(answers)[:, None] * mask * (1 - np.tanh(outputs) ** 2)
        else:
            probability = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
            row = np.arange(self.contract.rows)[:, None]
            at = row, inputs["positions"], inputs["targets"]
            answers = np.log(probability[at])
            slopes = slope(answers)
            by_output = np.zeros(outputs.shape)
            np.add.at(by_output, at, slopes)
            np.add.at(by_output, at[:2], -slopes[..., None] * probability[at[:2]])
        return answers, {f"lora_b.{MODULE}": np.einsum("rd,ntd,nto->ro", model.lora_a, states, by_output)}


def adapter_of(engine: NumpyEngine | NumpyTangentEngine | NumpyExactEngine) -> Adapter:
    """One that changes the answers of a model."""
    return random_adapter(engine.contract.modules, seed=2, size=0.3)


def check_inputs(contract: Contract, inputs: Mapping[str, Array]) -> None:
    """Shapes and dtypes are the contract's, and there are no other inputs."""
    assert set(inputs) == {spec.name for spec in contract.inputs}
    for spec in contract.inputs:
        assert inputs[spec.name].shape == spec.shape, spec
        assert inputs[spec.name].dtype == spec.dtype, spec


def head_with(values: Array) -> Head:
    """A head of three classes for an encoder's states."""
    head = Head(3, 6)
    head.values[:] = values
    return head


def head_of(seed: int = 0) -> Head:
    """A head of random numbers."""
    return head_with(np.random.default_rng(seed).normal(size=Head(3, 6).size))


def losses_of(
    model: NumpyEngine, values: Array, batches: Sequence[Batch], head: Classifier | None = None
) -> Array:
    """Loss of every example with an adapter of these values, from answers alone."""
    lora_b = {f"lora_b.{MODULE}": Adapter(model.contract.modules, values).lora_b[MODULE][None]}
    found = []
    for batch in batches:
        outputs = model.forward({**batch.inputs(1, model.contract.is_encoder), **lora_b})
        found.append(BatchLoss(batch, outputs[model.contract.answer], head=head).losses[0])
    return np.concatenate(found)


def slopes_of(function: Callable[[Array], Any], values: Array) -> Array:
    """Derivatives of a function by each of its float32 values, by central differences; they come last."""
    steps = np.eye(len(values), dtype=np.float32) * np.float32(2**-12)
    return np.stack([(function(values + step) - function(values - step)) * 2**11 for step in steps], -1)
