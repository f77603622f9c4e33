"""The reference engine: transformers' own model with an adapter, in eager PyTorch.

    layer(x) + (x lora_a^T) lora_b        at every adapted layer

Engines of devices are compared with it, baselines train it, and attacks on reports use it. It does not use
chains, blocks or programs.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from prge.engine import Array, Call, Directions, FloatArray, GradFn, IntArray, TokenSequence
from prge.errors import BundleError, EngineError
from prge.formats.bundle import Bundle
from prge.formats.chain import OWN_HEAD
from prge.formats.peft import PeftAdapter, read_lora
from prge.model_spec import AdaptedModule, ModelSpec, matrices
from server_export.adapter.layers import convert_conv1d
from server_export.checkpoint.base_model import content_problems, model_problems
from server_export.checkpoint.classifier import hidden_states_of
from server_export.checkpoint.loading import LoadedModel, load_model
from server_export.quantize.bundle_layers import rounded_layers_of
from server_export.quantize.quantization import quantize_layers, round_base
from server_export.trace.positions import position_numbers


class TorchEngine:
    """An implementation of `prge.engine.Engine` with a transformers model.

    Arrays have the precision of the network: float32, or float64 for references. With a network in bfloat16,
    outputs are float32, and an adapter's values are rounded to bfloat16 where they are used.

    Sequences are computed one by one, since some models are wrong for padded batches, or all at once with
    `padding`.

    Attributes:
        network: the transformers model, without an adapter.
        model: the sizes of the model and its adapted layers. If a layer trains `lora_a` too, adapter values
            include it.
        lora_a: [rank, in] by adapted layer, with the scale, for layers whose `lora_a` is frozen.
        scales: the scales of the other layers, alpha / rank by name; default: 1.
        pooling: how an encoder's hidden states are pooled: `first`, or the mean of all tokens.
        padding: the token that pads sequences.
        positions: the position ids i64 [1, length] of padded sequences; None: the network's own.
    """

    def __init__(
        self,
        network: Any,
        model: ModelSpec,
        lora_a: Mapping[str, torch.Tensor],
        *,
        scales: Mapping[str, float] | None = None,
        pooling: str = "mean",
        padding: int | None = None,
    ) -> None:
        self.network = network
        self.model = model
        self.lora_a = dict(lora_a)
        self.scales = scales or {}
        self.pooling = pooling
        self.padding = padding
        self.positions: torch.Tensor | None = None
        self._takes_cache = "use_cache" in inspect.signature(network.forward).parameters
        self._seconds = 0.0

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        loaded: LoadedModel,
        *,
        adapter: PeftAdapter | None = None,
        padding: int | None = None,
    ) -> TorchEngine:
        """Return the engine of a bundle's model.

        Args:
            bundle: the bundle, with the adapted layers and the readout.
            loaded: the model, as `load_base_model` loads it; its experts are computed eagerly from now on.
            adapter: the adapter with `lora_a` and scales; default: the bundle's own.
            padding: see the class.
        """
        model = bundle.chain.model
        adapter = adapter or read_lora(bundle.adapter)
        scales = {module.name: adapter.scale_of(module.name) for module in model.modules}
        lora_a = {name: torch.from_numpy(adapter.lora_a[name]) * scale for name, scale in scales.items()}
        network: Any = loaded.model
        network.set_experts_implementation("eager")
        network.config.return_dict = True
        pooling = bundle.chain.pooling
        engine = cls(network, model, lora_a, scales=scales, pooling=pooling, padding=padding)
        if padding is not None and "position_ids" in inspect.signature(network.forward).parameters:
            engine.positions = position_numbers(loaded, model.sequence_length)
        return engine

    @property
    def seconds(self) -> float:
        """The seconds spent in calls; see `prge.engine.Engine`."""
        return self._seconds

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the network."""
        dtype: torch.dtype = self.network.dtype
        return dtype

    def to(self, dtype: torch.dtype) -> TorchEngine:
        """Convert the network and `lora_a` in place; return this engine."""
        self.network.to(dtype)
        self.lora_a = {name: matrix.to(dtype) for name, matrix in self.lora_a.items()}
        return self

    def forward(self, call: Call) -> FloatArray:
        """Compute the outputs of all adapter copies; see `prge.engine.Engine`."""
        with self._timed(), torch.no_grad():
            outputs = [self.outputs(call.sequences, self._tensor(values)) for values in call.adapters]
        stacked: FloatArray = torch.stack(outputs).numpy()
        return stacked

    def jvp(self, call: Call, directions: Directions) -> tuple[FloatArray, FloatArray]:
        """Compute outputs and their directional derivatives; see `prge.engine.Engine`.

        Each sequence takes two backward passes, and one more for each query.
        """
        outputs, derivatives = [], []
        with self._timed():
            for number, sequence in enumerate(call.sequences):
                values = self._tensor(call.adapters[0]).requires_grad_()
                sequence_outputs = self.outputs([sequence], values)
                # v^T J is linear in v, so its derivative with respect to v gives J times a direction.
                weights = torch.zeros_like(sequence_outputs, requires_grad=True)
                (product,) = torch.autograd.grad(sequence_outputs, values, weights, create_graph=True)
                queries = self._along(directions, number)
                sequence_derivatives = [
                    torch.autograd.grad(product, weights, each, retain_graph=True)[0] for each in queries
                ]
                outputs.append(sequence_outputs.detach())
                derivatives.append(torch.stack(sequence_derivatives))
        return torch.cat(outputs).numpy(), torch.cat(derivatives, 1).numpy()

    def vjp(self, call: Call, grad_fn: GradFn) -> tuple[FloatArray, FloatArray]:
        """Compute outputs and the gradient of the adapter; see `prge.engine.Engine`."""
        with self._timed():
            values = self._tensor(call.adapters[0]).requires_grad_()
            outputs = self.outputs(call.sequences, values)
            outputs_array = outputs.detach().numpy()
            output_gradient = np.asarray(grad_fn(outputs_array))
            if output_gradient.shape != outputs_array.shape:
                shapes = f"{[*output_gradient.shape]} instead of the outputs' {[*outputs_array.shape]}"
                raise EngineError(
                    f"The gradient of the loss has the shape {shapes}.", code="gradient-of-other-shape"
                )
            (gradient,) = torch.autograd.grad(outputs, values, self._tensor(output_gradient))
            if not (np.isfinite(outputs_array).all() and gradient.isfinite().all()):
                gradient = torch.full_like(gradient, torch.nan)
        return outputs_array, gradient.numpy()

    def outputs(self, sequences: Sequence[TokenSequence], values: torch.Tensor | None = None) -> torch.Tensor:
        """Compute differentiable outputs, [targets] or [sequences, width].

        Args:
            sequences: the sequences.
            values: the adapter's values, [adapter size]; None computes without an adapter.
        """
        sequences = [part for sequence in sequences for part in sequence.split()]
        if self.padding is not None:
            return self._padded_outputs(sequences, values, self.padding)
        return torch.cat([self._single_output(sequence, values) for sequence in sequences])

    def logits(self, tokens: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits [rows, length, vocabulary] of tokens i64 [rows, length] without padding."""
        logits: torch.Tensor = self.call(values, input_ids=tokens).logits
        return logits

    def call(self, values: torch.Tensor | None, **inputs: Any) -> Any:
        """Call the network.

        Args:
            values: the adapter's values, [adapter size], or one adapter per row, [rows, adapter size].
            inputs: the network's inputs by name.

        Returns:
            The output of transformers' model.
        """
        if self._takes_cache:
            inputs["use_cache"] = False
        default_dtype = torch.get_default_dtype()
        # Some models make tensors of the default dtype in their forward.
        torch.set_default_dtype(self.dtype)
        try:
            with self.adapted(values):
                return self.network(**inputs)
        finally:
            torch.set_default_dtype(default_dtype)

    @contextmanager
    def adapted(self, values: torch.Tensor | None) -> Iterator[None]:
        """Add an adapter to the network while the context is active; for `values` see `call`."""
        with ExitStack() as hooks:
            if values is not None:
                trained = split_adapter_values(self.model.modules, values.to(self.dtype))
                for module in self.model.modules:
                    layer = self.network.get_submodule(module.name)
                    hook = partial(_add, *self._matrices(module, trained))
                    hooks.callback(layer.register_forward_hook(hook).remove)
            yield

    def _matrices(
        self, module: AdaptedModule, trained: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's `lora_a` and `lora_b`, one of them with the scale."""
        lora_b = trained[f"lora_b.{module.name}"]
        if not module.trains_a:
            return self.lora_a[module.name], lora_b
        return trained[f"lora_a.{module.name}"], lora_b * self.scales.get(module.name, 1.0)

    def _single_output(self, sequence: TokenSequence, values: torch.Tensor | None) -> torch.Tensor:
        tokens = torch.tensor([sequence.tokens])
        if self.model.is_encoder:
            states = hidden_states_of(self.call(values, input_ids=tokens), len(sequence.tokens))
            return _precise(states[:, 0] if self.pooling == "first" else states.mean(1))
        _, positions, targets = _targets([sequence])
        return torch.log_softmax(_precise(self.logits(tokens, values)[0]), -1)[positions, targets]

    def _padded_outputs(
        self, sequences: Sequence[TokenSequence], values: torch.Tensor | None, padding: int
    ) -> torch.Tensor:
        tokens, mask = pad_sequences(sequences, padding)
        if self.model.is_encoder:
            token_mask = torch.from_numpy(mask)
            output = self._call_padded(values, tokens, attention_mask=token_mask)
            states = _precise(hidden_states_of(output, tokens.shape[1]))
            if self.pooling == "first":
                return states[:, 0]
            weights = token_mask.to(states.dtype).unsqueeze(1)
            return torch.bmm(weights, states).squeeze(1) / weights.sum(2)
        rows, positions, targets = _targets(sequences)
        longest = int(positions.max()) + 1
        # The vocabulary head computes each position with a target once, and no other position.
        unique_positions, index = torch.unique(rows * longest + positions, return_inverse=True)

        def select_positions(head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (inputs[0].reshape(-1, inputs[0].shape[-1]).index_select(0, unique_positions)[None],)

        hook = self.network.get_output_embeddings().register_forward_pre_hook(select_positions)
        try:
            logits = self._call_padded(values, tokens[:, :longest]).logits[0]
        finally:
            hook.remove()
        return torch.log_softmax(_precise(logits), -1)[index, targets]

    def _call_padded(self, values: torch.Tensor | None, tokens: IntArray, **inputs: torch.Tensor) -> Any:
        if self.positions is not None:
            inputs["position_ids"] = self.positions[:, : tokens.shape[1]]
        return self.call(values, input_ids=torch.from_numpy(tokens), **inputs)

    def _along(self, directions: Directions, number: int) -> Iterator[torch.Tensor]:
        """Yield the directions of a sequence as adapter values, one for each query."""
        trained = matrices(self.model.modules)
        for query in range(len(directions[trained[0].u])):
            yield self._tensor(direction_values(self.model.modules, directions, query, number))

    def _tensor(self, array: Array) -> torch.Tensor:
        return torch.tensor(array, dtype=self.dtype)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begin


def load_base_model(bundle: Bundle, model: str, *, rounds_activations: bool = False) -> LoadedModel:
    """Load the model that a bundle was exported from, with the bundle's frozen values.

    Args:
        bundle: the bundle.
        model: the folder, GGUF file or Hub id of the model.
        rounds_activations: whether quantized layers also round their inputs, with straight-through gradients.

    Raises:
        BundleError: there is no such model, or it is not the bundle's.
    """
    recorded = bundle.manifest.get("model", {})
    revision = recorded.get("revision") if recorded.get("name_or_path") == model else None
    own_head = bundle.pooling == OWN_HEAD
    loaded = load_model(model, pooled=bundle.chain.is_encoder, revision=revision, own_head=own_head)
    apply_bundle_weights(bundle, loaded, rounds_activations=rounds_activations)
    return loaded


def apply_bundle_weights(bundle: Bundle, loaded: LoadedModel, *, rounds_activations: bool = False) -> None:
    """Replace a model's weights in place by a bundle's frozen values; Conv1D layers become linear.

    Raises:
        BundleError: the model is not the bundle's.
    """
    recorded = bundle.manifest.get("model", {})
    if problems := model_problems(loaded, recorded) or content_problems(loaded, recorded.get("sha256")):
        raise BundleError(
            f"{loaded.name_or_path} is not the model of the bundle: " + "; ".join(problems),
            remedy="Give the model that the bundle was exported from with --model.",
            code="model-differs",
        )
    convert_conv1d(loaded.model)
    scheme = bundle.quantization or "fp32"
    if not rounds_activations or scheme == "fp32":
        round_base(loaded.model, scheme, rounded_layers_of(bundle))
        return
    quantize_layers(loaded.model, scheme, rounded_layers_of(bundle))
    for layer in loaded.model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = _straight_through(layer)


def split_adapter_values(modules: Sequence[AdaptedModule], values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split values [..., adapter size] into the trained matrices, views [..., rank, width] by name."""
    trained = matrices(modules)
    parts = values.split([matrix.size for matrix in trained], -1)
    return {
        matrix.name: part.reshape(*values.shape[:-1], matrix.rank, matrix.width)
        for matrix, part in zip(trained, parts, strict=True)
    }


def direction_values(
    modules: Sequence[AdaptedModule], directions: Directions, query: int, number: int
) -> FloatArray:
    """Return the direction of a query and a sequence as adapter values, f32 [adapter size]."""
    products = [
        np.outer(directions[matrix.u][query, number], directions[matrix.v][query, number]).ravel()
        for matrix in matrices(modules)
    ]
    return np.concatenate(products)


def pad_sequences(sequences: Sequence[TokenSequence], padding: int) -> tuple[IntArray, IntArray]:
    """Return tokens padded on the right and their mask, i64 [sequences, longest]."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    tokens = np.full((len(sequences), longest), padding, np.int64)
    mask = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
        mask[row, : len(sequence.tokens)] = 1
    return tokens, mask


def _targets(sequences: Sequence[TokenSequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return row, position and token of all targets, i64 [targets] each."""
    targets = [
        (row, target.position, target.token)
        for row, sequence in enumerate(sequences)
        for target in sequence.targets
    ]
    rows, positions, tokens = torch.tensor(targets, dtype=torch.long).reshape(-1, 3).unbind(1)
    return rows, positions, tokens


def _precise(outputs: torch.Tensor) -> torch.Tensor:
    """Return outputs of a network in bfloat16 as float32, in which losses are computed; others unchanged."""
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs


def _add(
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    layer: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> torch.Tensor:
    """Add the adapter's output to a layer's, as a forward hook; each row may have its own adapter."""
    x = inputs[0]
    if lora_b.dim() == 2:
        return output + F.linear(x, lora_a) @ lora_b
    rows = x.reshape(len(lora_b), -1, x.shape[-1])
    return output + torch.bmm(rows @ lora_a.mT, lora_b).reshape(output.shape)


def _straight_through(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward for a quantized layer with the gradient of its dequantized weights."""
    weight: Any = layer.weight
    dequantized, rounded = weight.dequantize(), layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rounded_output = rounded(x)
        smooth_output = F.linear(x, dequantized, layer.bias)
        return smooth_output + (rounded_output - smooth_output).detach()

    return forward
