"""A tiny model in numpy that implements the engine; its derivatives have closed forms.

A bigram model with LoRA-FA on its only layer: logits = (W + lora_a.T @ lora_b).T @ embedding[token].
The encoder variant returns the mean over tokens of the tanh of its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prge.engine import Array, Call, Directions, Float64Array, GradFn, TokenSequence
from prge.formats.adapter import Adapter, adapter_size
from prge.model_spec import AdaptedModule, ModelSpec
from prge.objectives.classification_head import Classifier, Head
from prge.objectives.examples import Example, sequences_of
from prge.objectives.objective import Loss
from tests.templates import random_adapter

MODULE = "layer"


class NumpyEngine:
    """Implements prge.engine.Engine in float64, so that differences show only the method's error.

    `calls` counts calls, `computed` has the sequences of each; a call takes a second.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 11,
        width: int = 6,
        rank: int = 3,
        sequence_length: int = 8,
        encoder: bool = False,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        out = width if encoder else vocabulary
        self.embedding = random.normal(size=(vocabulary, width))
        self.weight = random.normal(size=(width, out))
        self.lora_a = random.normal(size=(rank, width))
        self.computed: list[tuple[TokenSequence, ...]] = []
        self.model = ModelSpec(
            readout="pooled" if encoder else "logprobs",
            width=width,
            vocabulary_size=vocabulary,
            sequence_length=sequence_length,
            modules=(AdaptedModule(MODULE, rank, width, out),),
        )

    @property
    def calls(self) -> int:
        """Number of calls."""
        return len(self.computed)

    @property
    def seconds(self) -> float:
        """See prge.engine.Engine."""
        return float(self.calls)

    def forward(self, call: Call) -> Float64Array:
        """See prge.engine.ForwardEngine."""
        self._begin(call)
        copies = [[self._logits(each, values) for each in call.sequences] for values in call.adapters]
        return np.stack([self._joined(map(self._outputs, call.sequences, logits)) for logits in copies])

    def jvp(self, call: Call, directions: Directions) -> tuple[Float64Array, Float64Array]:
        """See prge.engine.Engine."""
        self._begin(call)
        (values,) = call.adapters
        u, v = (np.asarray(directions[f"{factor}.{MODULE}"], np.float64) for factor in ("u", "v"))
        assert len(directions) == 2 and u.shape[:2] == v.shape[:2] == (len(u), len(call.sequences))
        outputs, derivatives = [], []
        for number, sequence in enumerate(call.sequences):
            logits = self._logits(sequence, values)
            changes = np.einsum(
                "td,rd,qr,qo->qto", self._states(sequence), self.lora_a, u[:, number], v[:, number]
            )
            outputs.append(self._outputs(sequence, logits))
            derivatives.append(np.einsum("kto,qto->qk", self._jacobian(sequence, logits), changes))
        return self._joined(outputs), self._joined(derivatives)

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[Float64Array, Float64Array]:
        """See prge.engine.Engine."""
        self._begin(call)
        (values,) = call.adapters
        logits = [self._logits(sequence, values) for sequence in call.sequences]
        outputs = self._joined(map(self._outputs, call.sequences, logits))
        grads = grad_fn(outputs)
        assert grads.shape == outputs.shape
        sizes = [len(sequence.targets) for sequence in call.sequences]
        of_each = grads if self.model.is_encoder else np.split(grads, np.cumsum(sizes)[:-1])
        gradient = np.zeros((len(self.lora_a), self.weight.shape[1]))
        for sequence, grad, tokens_logits in zip(call.sequences, of_each, logits, strict=True):
            by_logits = np.einsum("k,kto->to", grad, self._jacobian(sequence, tokens_logits))
            gradient += self.lora_a @ self._states(sequence).T @ by_logits
        return outputs, gradient.ravel()

    def _begin(self, call: Call) -> None:
        """Count a call and check that it fits the model."""
        model = self.model
        assert call.sequences and call.adapters.dtype == np.float32
        assert call.adapters.shape == (len(call.adapters), adapter_size(model.modules))
        for sequence in call.sequences:
            assert 1 <= len(sequence.tokens) <= model.sequence_length
            assert all(0 <= target.position < len(sequence.tokens) for target in sequence.targets)
        self.computed.append(call.sequences)

    def _states(self, sequence: TokenSequence) -> Float64Array:
        return self.embedding[list(sequence.tokens)]

    def _logits(self, sequence: TokenSequence, values: Array) -> Float64Array:
        """Return the logits of a sequence, [tokens, out]."""
        lora_b = values.reshape(len(self.lora_a), -1).astype(np.float64)
        return self._states(sequence) @ (self.weight + self.lora_a.T @ lora_b)

    def _outputs(self, sequence: TokenSequence, logits: Float64Array) -> Float64Array:
        """Return the outputs of one sequence, [targets] or [width]."""
        if self.model.is_encoder:
            return np.tanh(logits).mean(0)
        return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[_read(sequence)]

    def _jacobian(self, sequence: TokenSequence, logits: Float64Array) -> Float64Array:
        """Return the derivatives of a sequence's outputs by its logits, [outputs, tokens, out]."""
        if self.model.is_encoder:
            derivatives = (1 - np.tanh(logits) ** 2) / len(logits)
            return np.einsum("to,ko->kto", derivatives, np.eye(logits.shape[1]))
        positions, tokens = _read(sequence)
        result = np.zeros((len(positions), *logits.shape))
        at = np.arange(len(positions))
        result[at, positions, tokens] = 1
        result[at, positions] -= (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))[positions]
        return result

    def _joined(self, parts: Any) -> Float64Array:
        """Join the sequences' outputs, [..., outputs], into those of a call."""
        return np.stack([*parts], -2) if self.model.is_encoder else np.concatenate([*parts], -1)


def _read(sequence: TokenSequence) -> tuple[Array, Array]:
    """Return positions and tokens of a sequence's targets."""
    pairs = [(target.position, target.token) for target in sequence.targets]
    positions, tokens = np.array(pairs, np.int64).reshape(-1, 2).T
    return positions, tokens


def make_nonzero_adapter(engine: NumpyEngine) -> Adapter:
    """Return an adapter that changes the outputs of a model."""
    return random_adapter(engine.model.modules, seed=2, size=0.3)


def head_from_values(values: Array) -> Head:
    """Return a head of three classes for an encoder's hidden states."""
    head = Head(3, 6)
    head.values[:] = values
    return head


def random_head(seed: int = 0) -> Head:
    """Return a head with random values."""
    return head_from_values(np.random.default_rng(seed).normal(size=Head(3, 6).size))


def compute_losses(
    engine: NumpyEngine, values: Array, examples: Sequence[Example], head: Classifier | None = None
) -> Float64Array:
    """Return the loss of every example with adapter values, from outputs alone."""
    outputs = engine.forward(Call(sequences_of(examples), values[None]))
    return Loss(examples, outputs, head=head).losses[0]


def gradients_of(function: Callable[[Array], Any], values: Array) -> Array:
    """Return derivatives of a function by its float32 values, by central differences, on the last axis."""
    steps = np.eye(len(values), dtype=np.float32) * np.float32(2**-12)
    return np.stack([(function(values + step) - function(values - step)) * 2**11 for step in steps], -1)
